"""The memory through which a model worker and an attention worker exchange one step's attention.

Each side owns a region and the other writes into it (one-sided, host-bypassing: Lamina 2, section 4.1). Data
and sequence number go in one write; the reader polls the number. Per layer there is no system call but the
waiting's, no event loop, and one buffer made: the output that the model keeps. What the attention worker's
compiled kernels compute of a decode step goes straight into the record.

The *request* region lies with the attention worker: the step's plan, then each layer's Q, then its K and V.
The *response* region lies with the model worker: the attention's output. A layer's records may be overwritten
by the next layer's because these are sent only after the output came back. A step may be cut into
*mini-batches* of sequences, each with its own records, so that one is on its way while another is computed
(Lamina 1, section 5.2.1).

A number is a random salt plus a counter, compared for equality: no data and no half-written word is taken for
it. Relies on bytes of one write becoming visible in order: stores on x86-64, a TCP stream's receiver.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from common.errors import ServiceError
from common.exchange_shape import MAX_MINI_BATCHES, PLAN_HEAD_WORDS, WORD, ExchangeShape, RecordPlace
from common.model.device import pin_host_memory, unpin_host_memory
from common.model.interface import SequenceChunk

SPINS = 20
"""Some microseconds. What waits longer offers its core at every look: where nobody wants it, that is no
slower, and where the other side computes on all cores, it is what lets it."""
YIELD_S = 0.0005
SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 0.00005, 0.001
IDLE_S, IDLE_SLEEP_S = 1.0, 0.005
"""Who has had nothing to do for so long may begin a little late, and leaves the core in peace meanwhile."""
LONG_WAIT_S, USUAL_WEIGHT = 0.01, 0.1
"""A wait beyond the first is a pause between steps, and says nothing of the next layer's."""
LOOKS_PER_CHECK = 16
"""Sleeps between two looks at the clock and at whether the peer is still there."""


class PeerSilent(ServiceError):
    """The other side of an exchange did not answer in time, or is gone."""


class Mirror(Protocol):
    """A peer's region as this process writes it: first into ``memory``, then ``publish`` (in order)."""

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
    """One pair of regions, seen from either side: who sends through it, and what it receives.

    ``step`` counts the steps announced through it, and is where sequence numbers come from.
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
        self._outgoing.publish(place.offset, place.nbytes)

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
        self._outgoing.publish(0, nbytes)
        return number

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


class Waiting:
    """How long to look for what has not come: spins, then yields the core, then sleeps ever longer.

    The yielding lasts twice as long as the last waits took, within bounds: what usually comes soon is met
    awake, and nobody burns a core for what does not.
    """

    def __init__(self) -> None:
        self._usual_s = 0.0
        self._clear()

    def _clear(self) -> None:
        self._looks = 0
        self._began_s = 0.0
        self._sleep_s = SHORTEST_SLEEP_S
        self._is_sleeping = False

    def restart(self) -> None:
        """What was waited for has come."""
        waited_s = self.waited_s
        if waited_s < LONG_WAIT_S:
            self._usual_s += USUAL_WEIGHT * (waited_s - self._usual_s)
        self._clear()

    @property
    def waited_s(self) -> float:
        """Since the spinning ended; 0 before."""
        return time.monotonic() - self._began_s if self._began_s else 0.0

    def pause(self) -> bool:
        """Between two looks. True now and then: time to ask whether the peer is still there."""
        self._looks += 1
        if self._looks < SPINS:
            return False
        if not self._began_s:
            self._began_s = time.monotonic()
        if not self._is_sleeping:
            self._is_sleeping = self.waited_s > max(YIELD_S, 2 * self._usual_s)
            os.sched_yield()
            return False
        time.sleep(self._sleep_s)
        longest_s = LONGEST_SLEEP_S if self.waited_s < IDLE_S else IDLE_SLEEP_S
        self._sleep_s = min(1.5 * self._sleep_s, longest_s)
        return self._looks % LOOKS_PER_CHECK == 0


def wait_until(
    has_come: Callable[[RecordPlace, int], bool],
    place: RecordPlace,
    number: int,
    waiting: Waiting,
    timeout_s: float,
    is_gone: Callable[[], bool],
) -> None:
    """Until the record at ``place`` has come with that number.

    Raises PeerSilent after ``timeout_s``, or when ``is_gone`` says that nobody will answer."""
    while not has_come(place, number):
        if not waiting.pause():
            continue
        if is_gone():
            raise PeerSilent("the other side of the exchange is gone")
        if waiting.waited_s > timeout_s:
            raise PeerSilent(f"the other side of the exchange has not answered for {waiting.waited_s:.1f} s")
    waiting.restart()
