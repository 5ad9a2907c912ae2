"""Going on with what another life of a decode instance left on the attention workers.

They keep its KV for a while (``attention.state``) and copy a sequence's into the pool that they hold for this
instance: nothing is computed anew, and nothing crosses a network.
"""

import asyncio
from dataclasses import dataclass, field

from common.bus import Bus
from common.errors import BusError, BusTimeout, HandoverFailed, RequestError
from common.ids import BindingId, sequence_key
from common.kv.blocks import in_pool, pool_of
from common.messages import Acknowledged, ResumeTask
from common.messages.attention import FindKV, InheritKV, KVFound
from common.subjects import Subjects
from decode.events import InheritSequence
from decode.settling import RECONNECT_BACKOFF_S


@dataclass(frozen=True, slots=True)
class BoundWorker:
    """An attention worker, and what it calls this instance's use of it."""

    worker_id: str
    binding_id: BindingId


@dataclass(slots=True)
class Inheritance:
    """``workers``: by pool, kept by whoever binds them; none where the instance holds its KV itself.

    Who calls this instance waits for ``call_timeout_s``.
    """

    bus: Bus
    subjects: Subjects
    call_timeout_s: float
    workers: dict[int, tuple[BoundWorker, ...]] = field(default_factory=dict)

    async def find_pool(self, task: ResumeTask) -> int:
        """The pool all of whose workers keep the sequence's KV. Raises HandoverFailed."""
        pools = dict(self.workers)
        kept = await asyncio.gather(*(self._is_kept(task, workers) for workers in pools.values()))
        for pool, is_kept in zip(pools, kept, strict=True):
            if is_kept:
                return pool
        why = "no attention worker here keeps" if pools else "there are no attention workers to have kept"
        raise HandoverFailed(f"{why} the KV of {task.request.request_id}")

    async def copy(self, command: InheritSequence) -> None:
        """Returns, or raises HandoverFailed, when no worker writes into the blocks any more."""
        key = sequence_key(command.owner.request_id)
        pool, blocks = pool_of(command.blocks[0]), in_pool(command.blocks)
        calls = [
            self._ask_until_certain(
                pool, worker, InheritKV(worker.binding_id, command.former, key, command.tokens, blocks)
            )
            for worker in self.workers.get(pool, ())
        ]
        errors = [error for error in await asyncio.gather(*calls) if error is not None]
        if errors or not calls:
            raise HandoverFailed("; ".join(map(str, errors)) or f"pool {pool} is lost")

    async def _is_kept(self, task: ResumeTask, workers: tuple[BoundWorker, ...]) -> bool:
        key, needed = sequence_key(task.request.request_id), task.request.tokens - 1
        calls = [
            self.bus.call(
                self.subjects.attention_calls(worker.worker_id),
                FindKV(worker.binding_id, task.former, key),
                KVFound,
                self.call_timeout_s / 2,
            )
            for worker in workers
        ]
        try:
            found = await asyncio.gather(*calls)
        except (BusError, RequestError):
            return False
        return all(each.tokens >= needed for each in found)

    async def _ask_until_certain(
        self, pool: int, worker: BoundWorker, call: InheritKV
    ) -> RequestError | None:
        """None: the KV is there. The worker answers a call only when those before it have ended."""
        while True:
            try:
                await self.bus.call(
                    self.subjects.attention_calls(worker.worker_id), call, Acknowledged, self.call_timeout_s
                )
            except RequestError as exc:
                return exc
            except BusTimeout:
                pass
            except BusError:
                await asyncio.sleep(RECONNECT_BACKOFF_S)
            else:
                return None
            if pool not in self.workers:
                # What it may still write is memory that nobody reads.
                return HandoverFailed(f"attention worker {worker.worker_id} is gone")
