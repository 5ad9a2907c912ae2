"""The memory through which a model worker and an attention worker exchange one step's attention.

Each side owns a region and the other writes into it (one-sided, host-bypassing: Lamina 2, section 4.1). Data
and sequence number go in one write; the reader polls the number, and sleeps on a bell of the region where
others want its core. Per layer there are no system calls but these two's, no event loop, and one buffer made:
the output that the model keeps. What the attention worker's compiled kernels compute of a decode step goes
straight into the record.

The *request* region lies with the attention worker: the step's plan, then each layer's Q, then its K and V.
The *response* region lies with the model worker: the attention's output. A layer's records may be overwritten
by the next layer's because these are sent only after the output came back. A step may be cut into
*mini-batches* of sequences, each with its own records, so that one is on its way while another is computed
(Lamina 1, section 5.2.1).

A number is a random salt plus a counter, compared for equality: no data and no half-written word is taken for
it. Relies on bytes of one write becoming visible in order: stores on x86-64, a TCP stream's receiver.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from common.bell import Bell, Bells, bells_of
from common.exchange_shape import MAX_MINI_BATCHES, PLAN_HEAD_WORDS, WORD, ExchangeShape, RecordPlace
from common.model.device import pin_host_memory, unpin_host_memory
from common.model.interface import SequenceChunk
from common.model.waiting import PeerSilent


class Mirror(Protocol):
    """A peer's region as this process writes it: first into ``memory``, then ``publish`` (in order).
    ``is_mapped``: the memory is the region itself."""

    @property
    def is_mapped(self) -> bool: ...

    @property
    def memory(self) -> memoryview: ...

    def publish(self, offset: int, nbytes: int) -> None:
        """Raises TransferError where the peer cannot be reached."""
        ...

    def wait_settled(self, timeout_s: float) -> bool:
        """Whether nothing that was published is still on its way. Blocks until then, or for that long."""
        ...


@dataclass(slots=True)
class Pace:
    """A link of the given bandwidth and latency, emulated by telling the reader when a record is due.

    One direction's, which all lanes between two processes share, from whatever threads. Both processes read
    the same clock, so this serves within one host.
    """

    bandwidth_bytes_per_s: float | None
    latency_s: float
    _is_free_at_ns: int = 0
    _changes: threading.Lock = field(default_factory=threading.Lock)

    def due_ns(self, nbytes: int) -> int:
        send_s = nbytes / self.bandwidth_bytes_per_s if self.bandwidth_bytes_per_s else 0.0
        with self._changes:
            free_at_ns = max(self._is_free_at_ns, time.monotonic_ns()) + int(send_s * 1e9)
            self._is_free_at_ns = free_at_ns
        return free_at_ns + int(self.latency_s * 1e9)


@dataclass(frozen=True, slots=True)
class Group:
    """One mini-batch of a step: its chunks, and its rows ``begin``..``stop`` among the step's tokens."""

    chunks: tuple[SequenceChunk, ...]
    begin: int
    stop: int


def mini_batches(chunks: Sequence[SequenceChunk], count: int) -> list[Group]:
    """At most ``count`` groups of whole sequences, as equal as they come; both sides cut alike."""
    count = max(1, min(count, len(chunks), MAX_MINI_BATCHES))
    groups = []
    begin = 0
    for index in range(count):
        members = tuple(chunks[index * len(chunks) // count : (index + 1) * len(chunks) // count])
        stop = begin + sum(chunk.length for chunk in members)
        groups.append(Group(members, begin, stop))
        begin = stop
    return groups


@dataclass(frozen=True, slots=True)
class Records:
    """Views of one mini-batch's records: Q or the output [tokens, heads, head_dim], K and V with kv_heads."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    output: torch.Tensor
    q_place: RecordPlace
    kv_place: RecordPlace
    output_place: RecordPlace


class Lane:
    """One pair of regions, seen from either side: who sends through it, and what it receives. ``outgoing`` is
    the mirror of one of the two; what comes is in the other.

    ``step`` counts the steps announced through it, and is where sequence numbers come from. ``bell`` rings
    here as something comes, where the peer can ring: both are on one host, and what is sent is due at once.
    """

    def __init__(
        self,
        shape: ExchangeShape,
        request: memoryview,
        response: memoryview,
        outgoing: Mirror,
        salt: int,
        pace: Pace | None = None,
    ) -> None:
        self.shape = shape
        self.salt = salt
        self.step = 0
        self._outgoing = outgoing
        self._pace = pace
        self._sent = outgoing.memory.cast("q")
        self._request_words = request.cast("q")
        self._response_words = response.cast("q")
        dtype: torch.dtype = getattr(torch, shape.element_type)
        self._request = torch.frombuffer(request, dtype=dtype)
        self._response = torch.frombuffer(response, dtype=dtype)
        self._records: dict[tuple[int, int], Records] = {}
        self.bell: Bell | None = None
        self._peer_bell: Bell | None = None
        if outgoing.is_mapped and pace is None:
            bells = Bell(request, shape.request_bell), Bell(response, shape.response_bell)
            self.bell, self._peer_bell = bells if outgoing.memory is response else reversed(bells)
        self.bells: Bells | None = bells_of([self.bell])

    def records(self, begin: int, stop: int) -> Records:
        """Of a mini-batch's rows ``begin``..``stop``. Those of the usual batches are made once."""
        found = self._records.get((begin, stop))
        if found is None:
            if len(self._records) >= 4 * self.shape.max_tokens:
                self._records.clear()
            found = self._records[begin, stop] = self._new_records(begin, stop)
        return found

    def _new_records(self, begin: int, stop: int) -> Records:
        shape, tokens = self.shape, stop - begin
        q = shape.record(shape.q_offset, shape.q_row_bytes, begin, tokens)
        kv = shape.record(shape.kv_offset, shape.kv_row_bytes, begin, tokens)
        out = shape.record(0, shape.q_row_bytes, begin, tokens)

        def rows(memory: torch.Tensor, offset: int, heads: int) -> torch.Tensor:
            count = tokens * heads * shape.head_dim
            first = offset // memory.element_size()
            return memory[first : first + count].view(tokens, heads, shape.head_dim)

        half = tokens * shape.kv_row_bytes // 2
        return Records(
            rows(self._request, q.offset, shape.heads),
            rows(self._request, kv.offset, shape.kv_heads),
            rows(self._request, kv.offset + half, shape.kv_heads),
            rows(self._response, out.offset, shape.heads),
            q,
            kv,
            out,
        )

    def pin(self) -> None:
        """Readies both regions for a device's copies. Raises ServiceError."""
        pin_host_memory(self._request)
        pin_host_memory(self._response)

    def unpin(self) -> None:
        """Of a lane that is used no more."""
        unpin_host_memory(self._request)
        unpin_host_memory(self._response)

    # -- sending --------------------------------------------------------------------------------------------

    def send(self, place: RecordPlace, number: int) -> None:
        """What was written into the record goes to the peer."""
        words = self._sent
        words[place.number_word - 1] = self._pace.due_ns(place.nbytes) if self._pace else 0
        words[place.number_word] = self.salt + number
        self._publish(place.offset, place.nbytes)

    def announce(self, chunks: Sequence[SequenceChunk], groups: int, layers: int) -> int:
        """The next step, of so many mini-batches: its number, which its layers' follow. Without chunks it has
        no layers, and ends one that was given up. Raises ValueError for a batch over the region's bounds."""
        words = [groups, len(chunks)]
        for chunk in chunks:
            words += (chunk.key, chunk.start, chunk.length, len(chunk.block_table), *chunk.block_table)
        tokens = sum(chunk.length for chunk in chunks)
        shape = self.shape
        if tokens > shape.max_tokens or len(words) > shape.plan_words:
            raise ValueError(f"a step of {tokens} tokens and {len(words)} words of plan: over {shape}")
        self.step += 1
        number = self.step * (layers + 1)
        nbytes = WORD * (PLAN_HEAD_WORDS + len(words) + 1)
        sent = self._sent
        # The first number goes ahead: whoever still reads a plan that was given up sees that it is replaced.
        sent[1] = self.salt + number
        sent[2] = len(words)
        sent[0] = self._pace.due_ns(nbytes) if self._pace else 0
        for index, word in enumerate(words, PLAN_HEAD_WORDS):
            sent[index] = word
        sent[PLAN_HEAD_WORDS + len(words)] = self.salt + number
        self._publish(0, nbytes)
        return number

    def _publish(self, offset: int, nbytes: int) -> None:
        self._outgoing.publish(offset, nbytes)
        if self._peer_bell is not None:
            self._peer_bell.ring()

    def settle(self, timeout_s: float) -> None:
        """What was sent has arrived: its records may be written anew without an answer. Raises PeerSilent."""
        if not self._outgoing.wait_settled(timeout_s):
            raise PeerSilent(f"what was sent to the other side is on its way for {timeout_s:g} s")

    # -- receiving ------------------------------------------------------------------------------------------

    def announced_step(self, layers: int) -> int | None:
        """The step after ``step`` whose plan is here; those between were given up."""
        words = self._request_words
        number = words[1]
        step, rest = divmod(number - self.salt, layers + 1)
        if step <= self.step or rest:
            return None
        is_whole = words[PLAN_HEAD_WORDS + words[2]] == number and words[0] <= time.monotonic_ns()
        return step if is_whole else None

    def read_plan(self, step: int, layers: int) -> list[Group]:
        """The announced step's mini-batches; none of an empty step, nor if the next plan has come since."""
        length = self._request_words[2]
        words = self._request_words[PLAN_HEAD_WORDS : PLAN_HEAD_WORDS + length].tolist()
        if self._request_words[1] != self.salt + step * (layers + 1) or words[1] == 0:
            return []
        groups, count = words[:2]
        place = 2
        chunks = []
        for _ in range(count):
            key, start, length, blocks = words[place : place + 4]
            place += 4
            chunks.append(SequenceChunk(tuple(words[place : place + blocks]), start, length, key))
            place += blocks
        return mini_batches(chunks, groups)

    def has_request(self, place: RecordPlace, number: int) -> bool:
        return self._has_arrived(self._request_words, place, number)

    def has_response(self, place: RecordPlace, number: int) -> bool:
        return self._has_arrived(self._response_words, place, number)

    def _has_arrived(self, words: memoryview, place: RecordPlace, number: int) -> bool:
        if words[place.number_word] != self.salt + number:
            return False
        due_ns: int = words[place.number_word - 1]
        return not due_ns or due_ns <= time.monotonic_ns()
