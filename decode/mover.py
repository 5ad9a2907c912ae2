"""Has the KV of running sequences moved from one pool's workers to another's, amid their streams.

The workers move the bytes between them; each worker of the one pool has a counterpart with the same heads in
the other. What is given up may still land: its end is waited for before anybody else gets the blocks.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from common.bus import Bus
from common.errors import BusError, BusTimeout, HandoverFailed, RequestError
from common.ids import sequence_key
from common.instance_metrics import InstanceMetrics
from common.kv.blocks import BlockOwner, in_pool, pool_of
from common.messages import Acknowledged, HostProcess, KVDelivered, KVDestination
from common.messages.attention import HoldKV, MoveKV, SettleKV
from common.subjects import Subjects
from common.timeline import timeline
from common.timeline_events import MOVE_KV
from common.transfer.interface import SOCKET_GRACE_S, PeerInfo, decode_peer_info
from decode.events import DecodeEvent, MoveDrained, MoveFailed, MoveFinished, MoveSequence
from decode.inheritance import BoundWorker
from decode.settling import wait_settled

Answer = TypeVar("Answer", KVDelivered, Acknowledged)

log = logging.getLogger("lamella.decode")

MOVE_TIMEOUT_S = 2.0
"""No stream stands still for longer. Whether the worker it is at is silent, its next step finds out."""
ANSWER_TIMEOUT_S = 2.0
"""The other worker may be in no step; one that does not answer for so long, while NATS does, is lost."""


@dataclass(frozen=True, slots=True)
class WorkerMove:
    """One worker's share of a move: what it is asked, and what its counterpart then is."""

    source: str
    source_peer: PeerInfo
    move: MoveKV
    target: str
    hold: HoldKV


@dataclass(slots=True)
class Mover:
    """``workers`` and ``destinations``: by pool, kept by whoever binds them, and gives up those that are
    ``silent``."""

    bus: Bus
    subjects: Subjects
    metrics: InstanceMetrics
    call_timeout_s: float
    workers: dict[int, tuple[BoundWorker, ...]]
    destinations: dict[int, tuple[KVDestination, ...]]
    silent: set[int] = field(default_factory=set)
    _under_way: dict[BlockOwner, tuple[set[int], "asyncio.Task[int]"]] = field(default_factory=dict)

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    async def carry_out(self, command: MoveSequence, handle: Callable[[DecodeEvent], None]) -> None:
        """Tells ``handle`` what became of it, and of a failed one when nothing of it can land any more."""
        owner, loop = command.owner, asyncio.get_running_loop()
        pools = (pool_of(command.blocks[0]), pool_of(command.destination_blocks[0]))
        began_ns, began_s = timeline.begin(), loop.time()
        shares = self._shares(command, *pools)
        facts: dict[str, object] = {"request": owner.request_id, "from_pool": pools[0], "to_pool": pools[1]}
        log.info("move_began", extra=facts)
        work = asyncio.create_task(self._move(shares), name=f"move {owner.request_id}")
        self._under_way[owner] = ({*pools}, work)
        try:
            await asyncio.wait({work}, timeout=MOVE_TIMEOUT_S)
        finally:
            work.cancel()
            del self._under_way[owner]
        peer = shares[0].target if shares else ""
        timeline.end(
            began_ns, MOVE_KV, owner.attempt, len(command.blocks), requests=owner.request_id, peer=peer
        )
        elapsed_s = loop.time() - began_s
        error = _failure_of(work)
        facts["elapsed_s"] = round(elapsed_s, 4)
        if error is None:
            self.metrics.observe_move(work.result(), elapsed_s)
            log.info("kv_moved", extra={**facts, "tokens": command.tokens, "kv_bytes": work.result()})
            handle(MoveFinished(owner))
            return
        self.metrics.move_failed()
        log.warning("move_failed", extra={**facts, "error": str(error)})
        handle(MoveFailed(owner))
        if isinstance(error, TimeoutError | BusTimeout):
            await self._look_for_silence(pools[1], shares)
        await self._wait_settled(shares)
        handle(MoveDrained(owner))

    def give_up(self, pool: int) -> None:
        """The pool is lost: whatever goes there, or comes from there, does not arrive."""
        for pools, work in self._under_way.values():
            if pool in pools:
                work.cancel()

    def _shares(self, command: MoveSequence, source: int, target: int) -> list[WorkerMove]:
        """Empty where one of the pools is lost by now."""
        key, tokens = sequence_key(command.owner.request_id), command.tokens
        blocks, destination_blocks = in_pool(command.blocks), in_pool(command.destination_blocks)
        if not (source in self.workers and target in self.workers):
            return []
        return [
            WorkerMove(
                source=giver.worker_id,
                source_peer=decode_peer_info(given.endpoint),
                move=MoveKV(giver.binding_id, key, tokens, blocks, destination, destination_blocks),
                target=taker.worker_id,
                hold=HoldKV(taker.binding_id, key, tokens, destination_blocks),
            )
            for giver, given, taker, destination in zip(
                self.workers[source],
                self.destinations[source],
                self.workers[target],
                self.destinations[target],
                strict=True,
            )
        ]

    async def _move(self, shares: list[WorkerMove]) -> int:
        """The bytes moved. Raises BusError, RequestError."""
        if not shares:
            raise HandoverFailed("a worker is gone")
        delivered = await asyncio.gather(
            *(self._call(share.source, share.move, KVDelivered, MOVE_TIMEOUT_S) for share in shares)
        )
        # From here on the KV counts as the other pool's, should this instance die.
        await asyncio.gather(
            *(self._call(share.target, share.hold, Acknowledged, MOVE_TIMEOUT_S) for share in shares)
        )
        return sum(each.kv_bytes for each in delivered)

    async def _look_for_silence(self, target: int, shares: list[WorkerMove]) -> None:
        """Only where NATS goes on is a worker silent that does not answer."""
        try:
            await self.bus.flush(ANSWER_TIMEOUT_S)
        except BusError:
            return
        try:
            for share in shares:
                asked = SettleKV(share.hold.binding_id, share.hold.key)
                await self._call(share.target, asked, Acknowledged, ANSWER_TIMEOUT_S)
        except BusTimeout:
            with contextlib.suppress(BusError):
                await self.bus.flush(ANSWER_TIMEOUT_S)
                if target in self.workers:
                    self.silent.add(target)
        except (BusError, RequestError) as exc:
            log.warning("move_destination_unknown", extra={"to_pool": target, "error": str(exc)})

    async def _wait_settled(self, shares: list[WorkerMove]) -> None:
        await asyncio.gather(*(self._wait_source_settled(share) for share in shares))
        await asyncio.sleep(SOCKET_GRACE_S)

    async def _wait_source_settled(self, share: WorkerMove) -> None:
        """A worker takes calls in their order."""
        settle = SettleKV(share.move.binding_id, share.move.key)
        sender = HostProcess(share.source_peer.host, share.source_peer.pid)
        await wait_settled(
            sender, lambda: self._call(share.source, settle, Acknowledged, self.call_timeout_s)
        )

    async def _call(
        self, worker_id: str, call: MoveKV | HoldKV | SettleKV, answer: type[Answer], timeout_s: float
    ) -> Answer:
        return await self.bus.call(self.subjects.attention_calls(worker_id), call, answer, timeout_s)


def _failure_of(work: "asyncio.Task[int]") -> Exception | None:
    """Raises what is neither the bus's nor the worker's fault."""
    if not work.done():
        return TimeoutError(f"not there after {MOVE_TIMEOUT_S:g} s")
    if work.cancelled():
        return HandoverFailed("an attention worker is lost")
    error = work.exception()
    if error is None or isinstance(error, BusError | RequestError):
        return error
    raise error
