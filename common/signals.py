"""The signals that end a process, apart from ``common.service``, whose wires a supervisor does without."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def listen_to_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """``stop`` is set by the first SIGTERM, SIGINT or SIGHUP, ``abort`` by the second."""
    stop, abort = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (abort if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in heeded(signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    return stop, abort


def heeded(*numbers: signal.Signals) -> list[signal.Signals]:
    """Those that are not ignored: nohup and the like ignore SIGHUP for whoever they start."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def run_until_signal(main: Coroutine[Any, Any, T]) -> T:
    """As ``uvloop.run``, but SIGTERM and SIGHUP cancel ``main`` as Ctrl-C does. Raises KeyboardInterrupt once
    it has ended: a handler that raised that would do so in whatever runs just then, and in a connection's
    callback it costs a request and ends nothing."""
    is_interrupted = False

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "a coroutine that runs is a task's"

        def interrupt() -> None:
            nonlocal is_interrupted
            is_interrupted = True
            task.cancel()

        for number in before:
            loop.add_signal_handler(number, interrupt)
        return await main

    before = {number: signal.getsignal(number) for number in heeded(signal.SIGTERM, signal.SIGHUP)}
    try:
        return uvloop.run(cancellable())
    except asyncio.CancelledError:
        if is_interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
