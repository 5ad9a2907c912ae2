"""A thread that runs the model, and the event loop's way to it: one a process, or one a model replica.

Both rooms of an instance share it (``common.shared_engine``), so forward passes never overlap.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from common.host_cores import HostCores
from common.thread_names import name_thread

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

IDLE_AFTER_S = 0.02
"""The pause between two steps is not idleness: a neighbour would start a long chunk on this engine's core."""


class EngineThread:
    """Runs calls one after the other.

    With ``cores``, ``use_cores`` is called on the thread before each of them with the number to compute on.
    """

    def __init__(
        self,
        cores: HostCores | None = None,
        use_cores: Callable[[int], None] = lambda count: None,
        name: str = "engine",
    ) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, initializer=name_thread, initargs=(name,))
        self._cores = cores
        self._use_cores = use_cores
        self._calls = 0
        self._idle: asyncio.TimerHandle | None = None

    async def run(
        self,
        work: Callable[Arguments, Result],
        *arguments: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        """The result of ``work``, computed on the engine's thread. Its exception is raised here."""

        def compute() -> Result:
            self.share_cores()
            return work(*arguments, **keywords)

        with self.claimed():
            return await asyncio.get_running_loop().run_in_executor(self._executor, compute)

    def share_cores(self, among: int = 1) -> None:
        """Called on the thread: adapts to who else computes now. Long work calls it now and then.

        Called on other threads of the process where they compute in its place: ``among`` how many.
        """
        if self._cores is not None:
            self._use_cores(max(1, self._cores.share() // among))

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """On the event loop: this process computes meanwhile. One claim, however many say so."""
        if self._cores is None:
            yield
            return
        self._start(self._cores)
        try:
            yield
        finally:
            self._calls -= 1
            if self._calls == 0:
                self._idle = asyncio.get_running_loop().call_later(IDLE_AFTER_S, self._cores.release)

    def _start(self, cores: HostCores) -> None:
        self._calls += 1
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if self._calls == 1:
            cores.claim()

    def close(self) -> None:
        """Waits for the work at hand, takes no more."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        if self._idle is not None:
            self._idle.cancel()
        if self._cores is not None:
            self._cores.close()
