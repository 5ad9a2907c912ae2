"""Calls that hand tasks over to instances: each is given up once its instance's process has ended, as nobody
will answer it; a call's own time is much longer than it takes to see that."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from common.errors import BusTimeout
from common.messages import InstanceLife


@dataclass(slots=True)
class HandingOver:
    _calls: dict[InstanceLife, set[asyncio.Task[Any]]] = field(default_factory=dict)

    async def wait(self, life: InstanceLife, call: Coroutine[Any, Any, Any]) -> None:
        """Raises what the call does, and BusTimeout where it was given up."""
        task = asyncio.get_running_loop().create_task(call)
        calls = self._calls.setdefault(life, set())
        calls.add(task)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            calls.discard(task)
            if not calls:
                self._calls.pop(life, None)
        if task.cancelled():
            raise BusTimeout(f"{life.instance_id} has ended")
        task.result()

    def end(self, life: InstanceLife) -> None:
        """Its process is no more, or counts as gone."""
        for task in self._calls.get(life, ()):
            task.cancel()
