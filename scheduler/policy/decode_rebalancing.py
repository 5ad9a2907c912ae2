"""Sequences that go from a decode instance that is about to run out of memory to one that has some.

Aladdin 4.3 (algorithm 2) moves requests that have not begun from over-utilised workers to under-utilised
ones as predictions turn out wrong; here running ones may go, too, as their KV can (``decode.departures``).
Its errors of output length and batch size are in what an instance says of its own: a sequence that has
outlived its prediction counts with the mean of those that got as far, and one that has ended early counts no
more. What is compared is the KV that each instance comes to hold, at the worst of the next steps.

Mixed instances take part, too. What their prompts hold, or are owed once their turn comes, counts with what
those that stay will draw; prompts themselves go nowhere. Otherwise two mixed instances exchange nothing, as
each might wait for the other's memory (``policy.coupling``); here whoever is given something has room to
spare.

Moves end. One is made only where it takes KV from a step at which its source is over its memory, and where
the destination stays below its own by a fifth at every step: so the KV that is too much, summed over
instances and steps, falls with each. That fifth keeps the destination from passing on what it has just taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from common.ids import InstanceId
from common.messages import MovableSequence
from scheduler.policy.decode_admission import Growing

HORIZON_STEPS = 256
"""What is expected beyond is too uncertain to move KV for."""
LEAST_STEPS = 64
"""Which every sequence is held to go on for, if it may: it takes as long to notice, decide and move."""
ROOM_SHARE = 0.8
"""Of its memory, which a destination may be expected to need."""


def peak_need(growing: Sequence[Growing], block_size: int) -> tuple[int, int]:
    """(tokens, step): the most KV that they need at one of the next steps, a block's remainder counted whole
    for each, and at which step."""
    most, at, held_tokens = 0, 0, 0
    latest_first = sorted(growing, key=attrgetter("coming_tokens"), reverse=True)
    for running, each in enumerate(latest_first, 1):
        step = each.coming_tokens if each.coming_tokens < HORIZON_STEPS else HORIZON_STEPS
        held_tokens += each.tokens + block_size - 1
        need = held_tokens + running * step
        if need > most:
            most, at = need, step
    return most, at


def most_need(tokens: int, sequences: int, block_size: int) -> int:
    """What ``peak_need`` of so many, that have so many tokens together, cannot exceed."""
    return tokens + sequences * (block_size - 1 + HORIZON_STEPS)


def as_growing(tokens: int, coming_tokens: int, left_tokens: int) -> Growing:
    """A sequence that may draw ``left_tokens`` more and is expected to draw ``coming_tokens``."""
    least = left_tokens if left_tokens < LEAST_STEPS else LEAST_STEPS
    return Growing(tokens, coming_tokens if coming_tokens > least else least)


def need_of(sequence: Growing | MovableSequence, block_size: int) -> int:
    """The most that it will need alone, as ``peak_need`` counts."""
    return sequence.tokens + min(sequence.coming_tokens, HORIZON_STEPS) + block_size - 1


@dataclass(frozen=True, slots=True)
class DecodeWorker:
    """``movable``: who could leave, each needing KV when the most is needed. ``is_taking``: newcomers may be
    placed there. Sequences only go between workers of one ``kv_format``."""

    instance_id: InstanceId
    kv_format: tuple[str, str, int]
    capacity_tokens: int
    need_tokens: int
    is_taking: bool
    movable: tuple[MovableSequence, ...] = ()

    @property
    def excess_tokens(self) -> int:
        return self.need_tokens - self.capacity_tokens

    @property
    def block_size(self) -> int:
        return self.kv_format[2]


@dataclass(frozen=True, slots=True)
class Departure:
    source: InstanceId
    sequence: MovableSequence
    destination: InstanceId


def choose_departures(workers: Sequence[DecodeWorker]) -> list[Departure]:
    """Until nobody is over its memory, or nobody has room. Who has not begun goes first, as its KV has to
    be sent anyway; then whoever has most still to come for the KV that is to be moved."""
    departures: list[Departure] = []
    now = {worker.instance_id: worker for worker in workers}
    for source in sorted(workers, key=lambda each: each.excess_tokens, reverse=True):
        excess = source.excess_tokens
        for sequence in sorted(source.movable, key=_cost):
            if excess <= 0:
                break
            need = need_of(sequence, source.block_size)
            destination = _roomiest(list(now.values()), source, need)
            if destination is None:
                continue
            departures.append(Departure(source.instance_id, sequence, destination.instance_id))
            taken = replace(destination, need_tokens=destination.need_tokens + need)
            now[destination.instance_id] = taken
            excess -= need
    return departures


def _cost(sequence: MovableSequence) -> tuple[bool, float]:
    return sequence.has_begun, sequence.tokens / (sequence.tokens + sequence.coming_tokens)


def _roomiest(workers: Sequence[DecodeWorker], source: DecodeWorker, need: int) -> DecodeWorker | None:
    able = [
        worker
        for worker in workers
        if worker.is_taking
        and worker.instance_id != source.instance_id
        and worker.kv_format == source.kv_format
        and worker.need_tokens + need <= ROOM_SHARE * worker.capacity_tokens
    ]
    return min(able, key=lambda each: each.need_tokens / each.capacity_tokens, default=None)
