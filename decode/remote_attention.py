"""Attention on attention workers, as the model sees it: Q goes out as soon as it exists, K and V when they
do, and the outputs come back.

Sequences live in *pools*. A pool is one worker that holds some sequences whole (request-level partition), or
several that hold some KV heads of every sequence each (head-level: Lamina 2, section 5). Runs on the engine's
thread; everything per layer goes through ``common.model.exchange``. A pool whose worker does not answer is
lost: its rows are zeros from then on, and the step goes on for the others.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from common.errors import AttentionLost, TransferError
from common.exchange_shape import RecordPlace
from common.kv.blocks import in_pool, pool_of
from common.model.exchange import Lane, Records, mini_batches
from common.model.interface import SequenceChunk
from common.model.waiting import PeerSilent, Waiting, wait_until
from common.timeline import timeline
from common.timeline_events import SEND_KV, SEND_PLAN, SEND_Q, TAKE_OUTPUT, WAIT_OUTPUT
from decode.attention_needs import ANSWER_TIMEOUT_S

Rows = slice | torch.Tensor
"""Which of the step's tokens."""


@dataclass(frozen=True, slots=True)
class WorkerExchange:
    """One attention worker of a pool: its share of the query heads, and a lane for each batch under way."""

    worker_id: str
    heads: range
    kv_heads: range
    lanes: tuple[Lane, ...]
    is_gone: Callable[[], bool]


@dataclass(slots=True)
class Pools:
    """The pools that there are, by number. ``lost``: those of them that are given up, with the reason, until
    they are removed. Changed from the loop's and the engine's threads; ``on_loss`` is called on any."""

    workers: dict[int, tuple[WorkerExchange, ...]] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    on_loss: Callable[[], None] = lambda: None
    _changes: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> None:
        """Invariants, called by tests."""
        assert self.lost.keys() <= self.workers.keys(), "a pool is lost that there is not"

    def has(self, pool: int) -> bool:
        return pool in self.workers and pool not in self.lost

    def add(self, pool: int, workers: tuple[WorkerExchange, ...]) -> None:
        with self._changes:
            self.workers = {**self.workers, pool: workers}

    def lose(self, pool: int, reason: str) -> None:
        """Steps go on without it from now on. The first reason counts."""
        with self._changes:
            if pool in self.workers:
                self.lost = {pool: reason, **self.lost}
        self.on_loss()

    def remove(self, pool: int) -> None:
        """No step asks it any more."""
        with self._changes:
            self.workers = {number: workers for number, workers in self.workers.items() if number != pool}
            self.lost = {number: reason for number, reason in self.lost.items() if number != pool}


@dataclass(frozen=True, slots=True)
class Part:
    """One mini-batch on one worker: which rows and heads of the step's tensors go through which records."""

    pool: int
    worker: WorkerExchange
    lane: Lane
    rows: Rows
    records: Records
    base: int

    def number(self, layer: int) -> int:
        """Of the lane's step and layer; the plan has the step's first."""
        return self.base + 1 + layer


class RemoteAttention:
    """A ``StepAttention`` over ``pools`` through one lane of each worker. One step at a time."""

    def __init__(self, pools: Pools, layers: int, heads: int, batches: int = 1, lane: int = 0) -> None:
        self._pools = pools
        self._layers = layers
        self._heads = heads
        self._mini_batches = batches
        self._lane = lane
        self._waiting = Waiting()
        self._tokens = 0
        self._parts: list[Part] = []
        self._workers = pools.workers
        self._chunk_pools: list[int] = []
        self._unanswered: int | None = None

    def begin(self, chunks: Sequence[SequenceChunk]) -> None:
        """Announces a step. Raises ValueError for one over the exchange's bounds, AttentionLost where no
        sequence's KV is there."""
        self._tokens = sum(chunk.length for chunk in chunks)
        self._chunk_pools = [pool_of(chunk.block_table[0]) for chunk in chunks]
        begins = [0]
        for chunk in chunks:
            begins.append(begins[-1] + chunk.length)
        self._parts = []
        self._unanswered = None
        self._workers = self._pools.workers
        for pool, workers in self._workers.items():
            members = [index for index, home in enumerate(self._chunk_pools) if home == pool]
            if members and self._pools.has(pool):
                self._begin_pool(pool, workers, chunks, members, begins)
        if not self._parts:
            raise AttentionLost("no attention worker holds the KV of any sequence in the step")

    def _begin_pool(
        self,
        pool: int,
        workers: tuple[WorkerExchange, ...],
        chunks: Sequence[SequenceChunk],
        members: list[int],
        begins: list[int],
    ) -> None:
        local = [
            SequenceChunk(in_pool(each.block_table), each.start, each.length, each.key)
            for each in (chunks[index] for index in members)
        ]
        rows = [row for index in members for row in range(begins[index], begins[index + 1])]
        groups = mini_batches(local, self._mini_batches)
        for worker in workers:
            lane = worker.lanes[self._lane]
            began_ns = timeline.begin()
            try:
                base = lane.announce(local, len(groups), self._layers)
            except TransferError as exc:
                self._lose(pool, worker, exc)
                return
            if began_ns:
                timeline.end(began_ns, SEND_PLAN, len(local), peer=worker.worker_id)
            for group in groups:
                records = lane.records(group.begin, group.stop)
                part = Part(pool, worker, lane, _as_rows(rows[group.begin : group.stop]), records, base)
                self._parts.append(part)

    def send_q(self, layer: int, q: torch.Tensor) -> None:
        for part in self._live_parts():
            heads = part.worker.heads
            began_ns = timeline.begin()
            _put(part.records.q, q[:, heads.start : heads.stop], part.rows)
            self._send(part, part.records.q_place, part.number(layer))
            if began_ns:
                nbytes = part.records.q_place.nbytes
                timeline.end(began_ns, SEND_Q, layer, nbytes, peer=part.worker.worker_id)

    def send_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self._unanswered = layer
        for part in self._live_parts():
            heads = part.worker.kv_heads
            began_ns = timeline.begin()
            _put(part.records.k, k[:, heads.start : heads.stop], part.rows)
            _put(part.records.v, v[:, heads.start : heads.stop], part.rows)
            self._send(part, part.records.kv_place, part.number(layer))
            if began_ns:
                nbytes = part.records.kv_place.nbytes
                timeline.end(began_ns, SEND_KV, layer, nbytes, peer=part.worker.worker_id)

    def has_answer(self, layer: int) -> bool:
        """Whether ``receive`` would not wait."""
        return all(
            part.lane.has_response(part.records.output_place, part.number(layer))
            for part in self._live_parts()
        )

    def receive(self, layer: int) -> torch.Tensor:
        """Raises AttentionLost where no pool of the step answers."""
        sample = self._parts[0].records.output
        output = sample.new_empty(self._tokens, self._heads, sample.shape[2])
        for part in self._live_parts():
            if not self._pools.has(part.pool):  # since this loop began
                continue
            began_ns = timeline.begin()
            try:
                wait_until(
                    part.lane.has_response,
                    part.records.output_place,
                    part.number(layer),
                    self._waiting,
                    ANSWER_TIMEOUT_S,
                    partial(self._is_gone, part),
                    part.lane.bells,
                )
            except PeerSilent as exc:
                self._waiting = Waiting()
                self._lose(part.pool, part.worker, exc)
                continue
            if began_ns:
                timeline.end(began_ns, WAIT_OUTPUT, layer, peer=part.worker.worker_id)
                began_ns = timeline.begin()
            heads = part.worker.heads
            output[part.rows, heads.start : heads.stop] = part.records.output
            if began_ns:
                timeline.end(began_ns, TAKE_OUTPUT, layer, peer=part.worker.worker_id)
        self._unanswered = None
        live = self._live_parts()
        if len(live) < len(self._parts):
            self._blank(output, live)
        return output

    def give_up(self) -> None:
        """Workers write a layer's K and V before they answer it; then an empty step follows the one that
        they would go on waiting for."""
        if self._unanswered is not None and self._live_parts():
            with suppress(AttentionLost):
                self.receive(self._unanswered)
        given_up = {id(part.lane): part for part in self._live_parts()}
        for part in given_up.values():
            try:
                part.lane.settle(ANSWER_TIMEOUT_S)
                part.lane.announce((), 0, self._layers)
            except (PeerSilent, TransferError) as exc:
                self._lose(part.pool, part.worker, exc)

    def lost_chunks(self) -> list[bool]:
        """Of the step's chunks, in order: whose KV is gone, and whose tokens are therefore none."""
        return [not self._pools.has(pool) for pool in self._chunk_pools]

    def _blank(self, output: torch.Tensor, live: list[Part]) -> None:
        """Rows of lost pools, so that nothing undefined goes on through the model."""
        if not live:
            reasons = "; ".join(self._pools.lost.values())
            raise AttentionLost(reasons or "the step's attention workers are gone")
        for part in self._parts:
            if all(part is not each for each in live):
                output[part.rows] = 0

    def _is_gone(self, part: Part) -> bool:
        """By the kernel's word, or another's who has given its pool up meanwhile."""
        return part.worker.is_gone() or not self._pools.has(part.pool)

    def _live_parts(self) -> list[Part]:
        pools = self._pools
        if pools.workers is self._workers and not pools.lost:  # as the step began
            return self._parts
        return [part for part in self._parts if pools.has(part.pool)]

    def _send(self, part: Part, place: RecordPlace, number: int) -> None:
        try:
            part.lane.send(place, number)
        except TransferError as exc:
            self._lose(part.pool, part.worker, exc)

    def _lose(self, pool: int, worker: WorkerExchange, reason: Exception) -> None:
        self._pools.lose(pool, f"attention worker {worker.worker_id}: {reason}")


def _put(record: torch.Tensor, source: torch.Tensor, rows: Rows) -> None:
    """These rows of ``source``, without a copy between where both lie on the host."""
    if isinstance(rows, slice) or source.device != record.device:
        record.copy_(source[rows])
    else:
        torch.index_select(source, 0, rows, out=record)


def _as_rows(rows: list[int]) -> Rows:
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows)
