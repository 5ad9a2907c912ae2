"""The one thread of a process that runs the model, and the event loop's way to it.

Both rooms of an instance share it, so forward passes never overlap. Work waits in the executor's queue; each
room keeps at most one piece of work there, so the queue is bounded by two.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class EngineThread:
    """Runs calls one after the other. ``prepare`` is run first, on the thread itself."""

    def __init__(self, prepare: Callable[[], None] | None = None) -> None:
        self._executor = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="engine", initializer=prepare or (lambda: None)
        )

    async def run(
        self,
        work: Callable[Arguments, Result],
        *arguments: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        """The result of ``work``, computed on the engine's thread. Its exception is raised here."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: work(*arguments, **keywords))

    def close(self) -> None:
        """Waits for the work at hand, takes no more."""
        self._executor.shutdown(wait=True, cancel_futures=True)
