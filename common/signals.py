"""The signals that end a process, apart from ``common.service``, whose wires a supervisor does without."""

import asyncio
import signal
from collections.abc import Coroutine
from types import FrameType
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
    """As ``uvloop.run``, but the first SIGTERM or SIGHUP cancels ``main`` as Ctrl-C does. Raises
    KeyboardInterrupt once it has ended, whatever it ended with: a handler that raised that would do so in
    whatever runs just then, and in a connection's callback it costs a request and ends nothing. As
    ``signal.signal`` and ``uvloop.run``, ValueError in another thread and RuntimeError in a loop."""
    is_interrupted = False
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        if not is_interrupted:
            is_interrupted = True
            for loop, task in running:
                task.cancel()
                # Who waits for connections is woken.
                loop.call_soon_threadsafe(lambda: None)

    async def cancellable() -> T:
        task = asyncio.current_task()
        assert task is not None, "a coroutine that runs is a task's"
        running.append((asyncio.get_running_loop(), task))
        if is_interrupted:
            task.cancel()
        try:
            return await main
        finally:
            running.clear()

    before = {number: signal.signal(number, interrupt) for number in heeded(signal.SIGTERM, signal.SIGHUP)}
    try:
        return uvloop.run(cancellable())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if is_interrupted:
            raise KeyboardInterrupt
