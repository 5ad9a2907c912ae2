"""The signals that end a process, apart from ``common.service``, whose wires a supervisor does without."""

import asyncio
import signal


def listen_to_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """``stop`` is set by the first SIGTERM, SIGINT or SIGHUP, ``abort`` by the second."""
    stop, abort = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (abort if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # nohup and the like ignore SIGHUP for whoever they start.
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, on_signal)
    return stop, abort
