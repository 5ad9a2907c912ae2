"""What an attention worker computes: attention over its KV, layer by layer, as model workers ask.

Weight-free: it knows pools' layouts and each layer's ``AttentionSpec``. One thread serves all lanes in turn
and polls their exchanges; the event loop of the process does nothing per step.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch

from common.bell import Bell, bells_of
from common.errors import InvalidRequest, UnknownRequest
from common.exchange_shape import RecordPlace
from common.host_cores import HostCores
from common.ids import BindingId
from common.kv.blocks import blocks_for
from common.kv.pool import KVPool
from common.model.attention import LocalAttention
from common.model.exchange import Group, Lane, Records
from common.model.waiting import PeerSilent, Waiting
from common.spec import AttentionSpec
from common.timeline import EventId, timeline
from common.timeline_events import ATTENTION_STEP, LAYER, SEND_OUTPUT, WAIT_KV, WAIT_Q

STEP_TIMEOUT_S = 30.0
"""Between two layers of a step the model worker computes; longer than this and it is stuck."""
TURN_POLL_S = 0.001


Held = dict[int, tuple[int, tuple[int, ...]]]
"""By ``sequence_key``: of how many tokens the KV is complete, and where it lies."""


class _GivenUp(Exception):
    """The model worker's step failed amid its layers."""


class ServedLane:
    """One batch of one model worker. ``advance`` does what has come, without waiting.

    ``held``: the sequences of the last step, as it left them.
    """

    def __init__(
        self, binding_id: BindingId, lane: Lane, pool: KVPool, attention_specs: Sequence[AttentionSpec]
    ) -> None:
        self.binding_id = binding_id
        self.is_in_step = False
        self.held: Held = {}
        self.steps_begun = 0
        self.steps = 0
        self._lane = lane
        self._pool = pool
        self._specs = tuple(attention_specs)
        self._attention: list[LocalAttention] = []
        self._attention_ns = 0
        self._moved_s = time.monotonic()
        self._course = self._serve()

    @property
    def bell(self) -> Bell | None:
        """Rings as something comes that ``advance`` can do."""
        return self._lane.bell

    def close(self) -> None:
        """Lets go of the pool and the exchange, when no thread serves the lane any more. ``held`` stays.

        Else this and its suspended course keep each other, and the pool's memory, until a garbage
        collection."""
        self._course.close()
        self._attention.clear()
        del self._pool, self._lane

    def advance(self) -> bool:
        """Whether there was something to do. Raises TransferError, or PeerSilent amid a step that stands."""
        has_worked = next(self._course)
        if has_worked or not self.is_in_step:
            self._moved_s = time.monotonic()
        elif time.monotonic() - self._moved_s > STEP_TIMEOUT_S:
            raise PeerSilent(f"the model worker stopped amid a step, {STEP_TIMEOUT_S:g} s ago")
        return has_worked

    def _serve(self) -> Generator[bool]:
        layers = len(self._specs)
        while True:
            while (step := self._lane.announced_step(layers)) is None:
                yield False
            self._lane.step = step
            groups = self._lane.read_plan(step, layers)
            if not groups:
                continue
            self.is_in_step = True
            self.steps_begun += 1
            yield True  # whoever serves this takes its cores before the step computes
            self._attention_ns = 0
            began_ns = timeline.begin()
            try:
                yield from self._serve_step(groups, step * (layers + 1))
            except _GivenUp:
                self.is_in_step = False
                continue
            self.is_in_step = False
            if began_ns:
                sequences = sum(len(group.chunks) for group in groups)
                tokens = groups[-1].stop
                timeline.end(began_ns, ATTENTION_STEP, sequences, tokens, layers, self._attention_ns)
            self.steps += 1

    def _serve_step(self, groups: Sequence[Group], base: int) -> Iterator[bool]:
        self._note(groups, tokens_done=0)
        records = [self._lane.records(group.begin, group.stop) for group in groups]
        batches = [
            (self._planned(index, group, record), record)
            for index, (group, record) in enumerate(zip(groups, records, strict=True))
        ]
        for layer in range(len(self._specs)):
            for attention, record in batches:
                yield from self._serve_layer(attention, record, layer, base + 1 + layer)
        self._note(groups, tokens_done=1)

    def _serve_layer(
        self, attention: LocalAttention, record: Records, layer: int, number: int
    ) -> Iterator[bool]:
        lane, device = self._lane, self._pool.device
        yield from self._until(record.q_place, number, WAIT_Q, layer)
        # On the host these are the records themselves; between host and device each copy is waited for.
        began_ns = timeline.begin()
        attention.send_q(layer, record.q.to(device))
        if began_ns:
            self._attention_ns += time.monotonic_ns() - began_ns
        yield from self._until(record.kv_place, number, WAIT_KV, layer)
        began_ns = timeline.begin()
        attention.send_kv(layer, record.k.to(device), record.v.to(device))
        output = attention.receive(layer)
        if output is not record.output:
            record.output.copy_(output)
        if began_ns:
            self._attention_ns += time.monotonic_ns() - began_ns
            timeline.end(began_ns, LAYER, layer, len(record.q))
            began_ns = timeline.begin()
        lane.send(record.output_place, number)
        if began_ns:
            timeline.end(began_ns, SEND_OUTPUT, layer, record.output_place.nbytes)
        yield True

    def _until(self, place: RecordPlace, number: int, event: EventId, layer: int) -> Iterator[bool]:
        """Raises _GivenUp where another step is announced instead."""
        lane = self._lane
        if lane.has_request(place, number):
            return
        began_ns = timeline.begin()
        while not lane.has_request(place, number):
            if lane.announced_step(len(self._specs)) is not None:
                raise _GivenUp
            yield False
        if began_ns:
            timeline.end(began_ns, event, layer)

    def _planned(self, index: int, group: Group, record: Records) -> LocalAttention:
        """Mini-batches are computed in turn, so each has its own step state over the one pool.

        A layer's output may lie in the record while it is computed: its Q comes after the last layer's output
        was taken out of there."""
        while len(self._attention) <= index:
            self._attention.append(LocalAttention(self._pool, self._specs))
        self._attention[index].begin(group.chunks, record.output)
        return self._attention[index]

    def _note(self, groups: Sequence[Group], tokens_done: int) -> None:
        self.held = {
            chunk.key: (chunk.start + tokens_done * chunk.length, tuple(chunk.block_table))
            for group in groups
            for chunk in group.chunks
            if chunk.key
        }


@dataclass(frozen=True, slots=True)
class KeptKV:
    """What a lost decode instance's sequences had here."""

    pool: KVPool
    held: Held

    def tokens(self, key: int) -> int:
        """Raises UnknownRequest."""
        if key not in self.held:
            raise UnknownRequest("the sequence's KV is not kept here")
        return self.held[key][0]

    @torch.inference_mode()
    def copy_to(self, pool: KVPool, key: int, tokens: int, blocks: Sequence[int]) -> None:
        """The first ``tokens`` positions, block by block, into these of ``pool``.

        Raises UnknownRequest, or InvalidRequest where the blocks do not fit.
        """
        if self.tokens(key) < tokens:
            raise UnknownRequest(f"the KV of {self.tokens(key)} tokens is kept, not of {tokens}")
        count = blocks_for(tokens, pool.layout.block_size)
        if not blocks or len({*blocks}) != count or min(blocks) < 0 or max(blocks) >= pool.total_blocks:
            raise InvalidRequest(f"{tokens} tokens do not fit the blocks {blocks} of {pool.total_blocks}")
        device = pool.device
        held = self.held[key][1][:count]
        source, target = (torch.tensor(each, device=device) for each in (held, blocks))
        for old, new in zip((*self.pool.keys, *self.pool.values), (*pool.keys, *pool.values), strict=True):
            new[target] = old[source]


def kept_kv(lanes: Sequence[ServedLane], pool: KVPool) -> KeptKV:
    """Of lanes that are served no more. A sequence that changed lanes is where it got furthest."""
    entries = sorted((tokens, key, blocks) for lane in lanes for key, (tokens, blocks) in lane.held.items())
    return KeptKV(pool, {key: (tokens, blocks) for tokens, key, blocks in entries})


class AttentionLoop:
    """Serves lanes until ``stop``. ``on_failure`` is told, on the loop's thread, of a binding that ended.

    Computes on its share of ``cores``, taken anew for every step; without them, on ``threads``. ``steps``: of
    all lanes there ever were.
    """

    def __init__(
        self,
        on_failure: Callable[[BindingId, Exception], None],
        cores: HostCores | None = None,
        threads: int = 1,
    ) -> None:
        self._on_failure = on_failure
        self._cores = cores
        self._threads = threads
        self._lanes: tuple[ServedLane, ...] = ()
        self._changes = threading.Lock()
        self.steps = 0
        self._turns = 0
        self._is_stopped = False
        self._has_ended = False

    @property
    def lanes(self) -> tuple[ServedLane, ...]:
        return self._lanes

    def add(self, lanes: Sequence[ServedLane]) -> None:
        with self._changes:
            self._lanes = (*self._lanes, *lanes)

    def remove(self, binding_id: BindingId) -> None:
        """Its memory is not touched any more when this returns. Blocks for two turns of the loop, or until
        it has ended."""
        self._drop(binding_id)
        seen = self._turns
        while self._turns <= seen + 1 and not self._has_ended:
            time.sleep(TURN_POLL_S)

    def stop(self) -> None:
        self._is_stopped = True

    def _drop(self, binding_id: BindingId) -> None:
        with self._changes:
            self._lanes = tuple(lane for lane in self._lanes if lane.binding_id != binding_id)

    @torch.inference_mode()
    def run(self) -> None:
        """Until ``stop``. Raises what is no single lane's failure; nothing is served from then on."""
        try:
            self._serve_lanes()
        finally:
            self._has_ended = True

    def _serve_lanes(self) -> None:
        torch.set_num_threads(self._threads)
        waiting = Waiting()
        has_cores = False
        lanes: tuple[ServedLane, ...] = ()
        bells = None
        while not self._is_stopped:
            has_worked = is_step_new = False
            if self._lanes is not lanes:
                lanes = self._lanes
                bells = bells_of([lane.bell for lane in lanes])
            for lane in lanes:
                begun, done = lane.steps_begun, lane.steps
                has_worked |= self._advance(lane)
                is_step_new |= lane.steps_begun != begun
                self.steps += lane.steps - done
            is_busy = any(lane.is_in_step for lane in lanes)
            if self._cores is not None and (is_step_new or is_busy != has_cores):
                has_cores = is_busy
                self._take_cores(self._cores, is_busy)
            self._turns += 1
            if has_worked:
                waiting.restart()
            else:
                waiting.pause(bells)

    def _advance(self, lane: ServedLane) -> bool:
        try:
            return lane.advance()
        except Exception as exc:  # a full device, say: the other bindings are served on
            self._drop(lane.binding_id)
            self._on_failure(lane.binding_id, exc)
            return False

    def _take_cores(self, cores: HostCores, is_busy: bool) -> None:
        """While a step stands, this thread's share as it is now; else none."""
        if is_busy:
            cores.claim()
            torch.set_num_threads(cores.share())
        else:
            cores.release()
