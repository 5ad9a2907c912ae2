"""Sequences that leave a binding's pool for another worker's, or came from there.

The bytes go from worker to worker, into memory that the other one offers; the decode instance says which.
Where the KV lies is otherwise known from the steps (``attention.engine.ServedLane.held``); what came or went
between two of them is noted here, for whoever goes on with the KV of an instance that died.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeVar

from attention.engine import Held
from common.errors import HandoverFailed, InvalidRequest, TransferError, UnknownRequest
from common.kv.endpoint import KV_REGION
from common.kv.layout import KVLayout
from common.messages import KVDelivered
from common.messages.attention import HoldKV, MoveKV
from common.transfer.endpoint import TransferEndpoint
from common.transfer.interface import Run, decode_peer_info

Value = TypeVar("Value")

REMEMBERED = 1024
"""Sequences. A note is of use until the next step."""


@dataclass(slots=True)
class MovedSequences:
    """Of one binding. ``region``: its pool, as ``transfer`` knows it."""

    transfer: TransferEndpoint
    region: str
    layout: KVLayout
    total_blocks: int
    _came: OrderedDict[int, tuple[int, tuple[int, ...]]] = field(default_factory=OrderedDict)
    _went: OrderedDict[int, int] = field(default_factory=OrderedDict)
    _sends: dict[MoveKV, "asyncio.Task[KVDelivered]"] = field(default_factory=dict)
    _is_over: bool = False

    @property
    def under_way(self) -> int:
        return len(self._sends)

    async def send(self, call: MoveKV) -> KVDelivered:
        """Writes the KV, once for all who ask while that is under way.

        Returns, or raises UnknownRequest, InvalidRequest or HandoverFailed, when nothing is in the air.
        """
        send = self._sends.get(call)
        if send is None:
            if self._is_over:
                raise UnknownRequest(f"binding {call.binding_id} has ended")
            send = self._sends[call] = asyncio.create_task(self._write(call), name=f"move {call.key:x}")
            send.add_done_callback(lambda _: self._sends.pop(call))
        return await asyncio.shield(send)

    def take(self, call: HoldKV) -> None:
        """Another worker has written the KV. Raises InvalidRequest, UnknownRequest."""
        if self._is_over:
            raise UnknownRequest(f"binding {call.binding_id} has ended")
        if not call.blocks or min(call.blocks) < 0 or max(call.blocks) >= self.total_blocks:
            raise InvalidRequest(f"blocks {call.blocks}: must lie in 0..{self.total_blocks - 1}")
        self._went.pop(call.key, None)
        _remember(self._came, call.key, (call.tokens, call.blocks))

    async def wait_settled(self, key: int) -> None:
        """Returns when nothing of that sequence is in the air."""
        sends = [send for call, send in self._sends.items() if call.key == key]
        if sends:
            await asyncio.wait(sends)

    def end(self) -> None:
        """Begins nothing more."""
        self._is_over = True

    async def wait_ended(self) -> None:
        """Writes nothing any more when this returns: the pool's memory can be given back."""
        if self._sends:
            await asyncio.wait([*self._sends.values()])

    def corrected(self, held: Held) -> Held:
        """``held``, as the steps left it, without what went and with what came."""
        here = {key: at for key, at in held.items() if at[0] > self._went.get(key, -1)}
        for key, at in self._came.items():
            here[key] = max(at, here.get(key, at), key=lambda place: place[0])
        return here

    async def _write(self, call: MoveKV) -> KVDelivered:
        runs = self._runs(call)
        try:
            link = await self.transfer.link(decode_peer_info(call.destination.endpoint))
            transfer = link.write(runs)
            await transfer.wait_settled()
            statistics = await transfer
        except TransferError as exc:
            raise HandoverFailed(f"the KV could not be written: {exc}") from exc
        self._came.pop(call.key, None)
        _remember(self._went, call.key, call.tokens)
        return KVDelivered(statistics.nbytes, statistics.seconds)

    def _runs(self, call: MoveKV) -> list[Run]:
        destination = call.destination
        if destination.kv_heads != self.layout.kv_heads:
            raise InvalidRequest(
                f"{destination.kv_heads} KV heads there are not the {self.layout.kv_heads} here"
            )
        try:
            pairs = self.layout.paired_runs(
                call.blocks,
                call.destination_blocks,
                range(call.tokens),
                self.total_blocks,
                destination.total_blocks,
                range(self.layout.layers),
            )
        except ValueError as exc:
            raise InvalidRequest(str(exc)) from exc
        return [Run(self.region, source, KV_REGION, target, nbytes) for source, target, nbytes in pairs]


def _remember(notes: OrderedDict[int, Value], key: int, value: Value) -> None:
    notes[key] = value
    notes.move_to_end(key)
    if len(notes) > REMEMBERED:
        notes.popitem(last=False)
