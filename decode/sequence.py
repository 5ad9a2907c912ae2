"""A sequence as the decode room keeps it."""

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from dataclasses import dataclass, field
from math import ceil, floor
from typing import NamedTuple

from common.errors import HandoverFailed, KVLost, Overloaded
from common.ids import Incarnation, InstanceId, RequestId
from common.kv.blocks import BlockOwner
from common.length_points import outlook_of, tokens_to_come
from common.lengths import LengthDistribution
from common.lifecycle import DecodePhase, next_decode_phase
from common.messages import DecodeTask, ErrorReply, GenerationRequest, ResumeTask
from decode.events import StepRow
from decode.expectations import ALL_TOLD, Expectation, Expectations, Untold

ROOM = "decode"
KV_LOST = ErrorReply(code=KVLost.code, message="the attention worker that held the KV is gone")
PREFILL_GONE = ErrorReply(code=HandoverFailed.code, message="the prefill instance that holds the KV is gone")
PREEMPTED = ErrorReply(code=Overloaded.code, message="preempted: the decode instance ran out of KV blocks")


class _ExpectedLength(NamedTuple):
    """What ``lengths`` say of a sequence that has drawn ``since`` tokens, and fewer than ``until``: on
    average it will have drawn ``end`` in the end; of any, ``whole_mean``."""

    lengths: LengthDistribution
    whole_mean: float
    since: int
    end: int
    until: float

    @property
    def is_last(self) -> bool:
        """Nobody is known to have drawn more, so that one more is expected."""
        return self.lengths.points[-1][0] <= self.since


@dataclass(slots=True)
class DecodeSequence:
    """``pool``: the only one where its KV can be, as its workers keep it; None: any. ``failed_moves``
    count towards giving up to move it. ``is_source_gone``: no further portion of its KV comes.
    ``predicted``: how much it will draw, as was heard after its task. ``preemptions``: how often it has been
    given up for memory, here. ``number``: of all that ever came to the room, in the order of arrival.
    ``drawn_tokens_before``: those that its request came with."""

    owner: BlockOwner
    task: DecodeTask | ResumeTask
    arrived_s: float
    output_ids: list[int]
    phase: DecodePhase = DecodePhase.WAITING
    is_cancelled: bool = False
    lane: int = 0
    pool: int | None = None
    failed_moves: int = 0
    is_source_gone: bool = False
    predicted: LengthDistribution | None = None
    preemptions: int = 0
    number: int = field(default=0, compare=False)
    request: GenerationRequest = field(init=False, compare=False, repr=False)
    service_class: str = field(init=False, compare=False, repr=False)
    drawn_tokens_before: int = field(init=False, compare=False, repr=False)
    prompt_tokens: int = field(init=False)
    max_tokens: int = field(init=False)
    stop_token_ids: tuple[int, ...] = field(init=False)
    _row: StepRow | None = field(default=None, compare=False, repr=False)
    _expected: _ExpectedLength | None = field(default=None, compare=False, repr=False)
    _census: "Sequences | None" = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        request = self.request = self.task.request
        self.service_class, self.drawn_tokens_before = request.service_class, len(request.output_ids)
        self.prompt_tokens, self.max_tokens = len(request.prompt_ids), request.sampling.max_tokens
        self.stop_token_ids = request.sampling.stop_token_ids

    def enter(self, phase: DecodePhase) -> None:
        """Raises ValueError for an illegal move."""
        phase = next_decode_phase(self.phase, phase)
        former, self.phase = self.phase, phase
        if self._census is not None:
            self._census.count_out(former)
            self._census.count_in(self)
        self._row = None

    def row(self, block_table: list[int]) -> StepRow:
        """Of the steps that take it, as long as its blocks stay where they are: every change of its phase
        ends that."""
        if self._row is None:
            known = (self.prompt_tokens, self.max_tokens)
            self._row = StepRow(self.owner, self.task.request, self.output_ids, block_table, *known)
        return self._row

    @property
    def has_blocks(self) -> bool:
        """In a KV pool, be it that they are read or written now."""
        return self.phase not in (DecodePhase.WAITING, DecodePhase.SWAPPED)

    @property
    def is_swapped(self) -> bool:
        """It is in the host tier, or on the way there or back."""
        return self.phase in (DecodePhase.SWAPPING_OUT, DecodePhase.SWAPPED, DecodePhase.SWAPPING_IN)

    @property
    def awaits_first_token(self) -> bool:
        """Whether it comes with the last of the KV."""
        task = self.task
        return (
            isinstance(task, DecodeTask)
            and task.is_early
            and len(self.output_ids) == len(task.request.output_ids)
        )

    @property
    def coming_tokens(self) -> int:
        """That it is still expected to draw."""
        return self.coming_after(len(self.output_ids))

    def coming_after(self, drawn: int) -> int:
        """The same, once it has drawn so many."""
        known, lengths = self._expected, self.predicted or self.task.lengths
        if known is None or not known.since <= drawn < known.until or known.lengths is not lengths:
            known = self._look_ahead(drawn)
        return tokens_to_come(None if known is None else known.end, drawn, self.max_tokens)

    @property
    def lengths(self) -> LengthDistribution | None:
        """What is predicted of it."""
        return self.predicted or self.task.lengths

    def _look_ahead(self, drawn: int) -> _ExpectedLength | None:
        """None: nothing is predicted."""
        lengths, known = self.predicted or self.task.lengths, self._expected
        if lengths is None:
            return None
        if known is None or known.lengths is not lengths:
            mean, until = outlook_of(lengths.points, drawn)
            known = self._expected = _ExpectedLength(lengths, lengths.mean, drawn, round(mean), until)
        elif not known.since <= drawn < known.until:
            mean, until = outlook_of(lengths.points, drawn)
            known = self._expected = _ExpectedLength(lengths, known.whole_mean, drawn, round(mean), until)
        return known

    def expect(self, untold: int = 0) -> Expectation:
        """``untold``: tokens that it has drawn beside ``output_ids``."""
        drawn = len(self.output_ids) + untold
        expected = self._look_ahead(drawn)
        if expected is None:
            end = drawn + tokens_to_come(None, drawn, self.max_tokens)
            return Expectation(end, None, end)
        end = drawn + tokens_to_come(expected.end, drawn, self.max_tokens)
        until = ceil(expected.until)
        if end < until:
            until = end
        error = None
        if drawn > expected.whole_mean:
            error = end - round(expected.whole_mean)
            if expected.is_last and end == drawn + 1:
                return Expectation(end, error, None)
        else:
            outlived = floor(expected.whole_mean) + 1
            if outlived < until:
                until = outlived
        return Expectation(end, error, until)

    def drawn_in(self, untold: Untold) -> int:
        """So many tokens of steps that are."""
        return untold.of_lane[self.lane] if untold.steps and self.phase is RUNNING else 0

    @property
    def drawn_tokens(self) -> int:
        return len(self.output_ids)

    @property
    def left_tokens(self) -> int:
        """That it may still draw, at the most."""
        return self.max_tokens - len(self.output_ids)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + len(self.output_ids)

    @property
    def position(self) -> int:
        """Where the last token goes: the number of positions whose KV exists."""
        return self.tokens - 1


class Staying(NamedTuple):
    """Of the sequences that are not cancelled: how many there are, what they hold, what they are still to
    draw, and by how much ``errors`` of them exceed what was predicted."""

    sequences: int
    tokens: int
    coming_tokens: int
    error_tokens: int
    errors: int


NOBODY = Staying(0, 0, 0, 0, 0)


class Sequences:
    """A room's, by their owners in the order of arrival, and how many of them are in which phase.
    ``tokens``: of all together, and ``drawn_tokens``; whoever lets one grow tells it here. ``joined``: who
    has come to run since somebody took that note; ``departed``: how often one that ran has ceased to."""

    def __init__(self) -> None:
        self.in_batch = 0
        self.tokens = 0
        self.drawn_tokens = 0
        self.without_blocks = 0
        self.swapped = 0
        self.joined: list[DecodeSequence] = []
        self.departed = 0
        self._all: dict[BlockOwner, DecodeSequence] = {}
        self._cancelled: dict[BlockOwner, DecodeSequence] = {}
        self._expectations = Expectations()
        self._arrived = 0
        self._requests: dict[RequestId, list[DecodeSequence]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[BlockOwner]:
        return iter(self._all)

    def __contains__(self, owner: object) -> bool:
        return owner in self._all

    def __getitem__(self, owner: BlockOwner) -> DecodeSequence:
        return self._all[owner]

    def get(self, owner: BlockOwner) -> DecodeSequence | None:
        return self._all.get(owner)

    def keys(self) -> KeysView[BlockOwner]:
        return self._all.keys()

    def values(self) -> ValuesView[DecodeSequence]:
        return self._all.values()

    def items(self) -> ItemsView[BlockOwner, DecodeSequence]:
        return self._all.items()

    def __setitem__(self, owner: BlockOwner, sequence: DecodeSequence) -> None:
        assert owner not in self._all
        self._all[owner] = sequence
        sequence._census = self
        sequence.number = self._arrived
        self._arrived += 1
        self._requests.setdefault(owner.request_id, []).append(sequence)
        self.tokens += sequence.tokens
        self.drawn_tokens += sequence.drawn_tokens
        self._expectations.note_changed(owner)
        self.count_in(sequence)

    def __delitem__(self, owner: BlockOwner) -> None:
        sequence = self._all.pop(owner)
        sequence._census = None
        others = self._requests[owner.request_id]
        others.remove(sequence)
        if not others:
            del self._requests[owner.request_id]
        self.tokens -= sequence.tokens
        self.drawn_tokens -= sequence.drawn_tokens
        self._cancelled.pop(owner, None)
        self._expectations.forget(owner)
        self.count_out(sequence.phase)

    def of_request(self, request_id: RequestId) -> list[DecodeSequence]:
        """All attempts at it that are here, in the order of arrival."""
        return list(self._requests.get(request_id, ()))

    def cancel(self, sequence: DecodeSequence) -> None:
        """It goes as soon as it can."""
        sequence.is_cancelled = True
        self._cancelled[sequence.owner] = sequence
        self._expectations.forget(sequence.owner)

    @property
    def is_any_cancelled(self) -> bool:
        return bool(self._cancelled)

    def predict(self, sequence: DecodeSequence, lengths: LengthDistribution) -> None:
        sequence.predicted = lengths
        if not sequence.is_cancelled:
            self._expectations.note_changed(sequence.owner)

    def note_steps(self, steps: int, tokens: int) -> None:
        """So many steps ended, in which so many tokens were drawn of all together."""
        self.note_drawn(tokens)
        self._expectations.note_steps(steps)

    def note_drawn(self, tokens: int) -> None:
        """In a step that is noted by itself."""
        self.tokens += tokens
        self.drawn_tokens += tokens

    def note_first(self, owner: BlockOwner) -> None:
        """Its first token came beside the steps."""
        self.note_drawn(1)
        self._expectations.note_changed(owner)

    def staying(self, untold: Untold = ALL_TOLD) -> Staying:
        """Nobody who is cancelled has drawn anything that is ``untold``."""
        if not self._all:
            return NOBODY
        sums = self._expectations.sums(self._all, untold)
        drawn_tokens, tokens = self.drawn_tokens + untold.tokens, self.tokens + untold.tokens
        staying = len(self._all)
        for each in self._cancelled.values():
            drawn_tokens -= each.drawn_tokens
            tokens -= each.tokens
            staying -= 1
        return Staying(staying, tokens, sums.end_tokens - drawn_tokens, sums.error_tokens, sums.errors)

    def count_in(self, sequence: DecodeSequence) -> None:
        """It has come, or come to another phase."""
        phase = sequence.phase
        if phase is RUNNING:
            self.in_batch += 1
            self.joined.append(sequence)
        elif phase is MOVING:
            self.in_batch += 1
        elif phase is WAITING or phase is SWAPPED:
            self.without_blocks += 1
            self.swapped += phase is SWAPPED

    def count_out(self, phase: DecodePhase) -> None:
        """One has gone, or left that phase."""
        if phase is RUNNING:
            self.in_batch -= 1
            self.departed += 1
        elif phase is MOVING:
            self.in_batch -= 1
        elif phase is WAITING or phase is SWAPPED:
            self.without_blocks -= 1
            self.swapped -= phase is SWAPPED

    def check(self) -> None:
        """Invariants, called by tests after every event."""
        everyone = self._all.values()
        assert self.tokens == sum(each.tokens for each in everyone)
        assert self._cancelled.keys() == {each.owner for each in everyone if each.is_cancelled}
        staying = [each for each in everyone if not each.is_cancelled]
        expected = [each.expect() for each in staying]
        errors = [each.error_tokens for each in expected if each.error_tokens is not None]
        told = (
            len(staying),
            sum(each.tokens for each in staying),
            sum(each.coming_tokens for each in staying),
        )
        expected_sums = Staying(*told, sum(errors), len(errors))
        assert self.staying() == expected_sums, "the sums of what comes are wrong"
        known = [each for attempts in self._requests.values() for each in attempts]
        assert {id(each) for each in known} == {id(each) for each in everyone}
        assert all(self._requests.values()), "a request is known of which nothing is here"
        assert self.in_batch == sum(each.phase in (RUNNING, MOVING) for each in everyone)
        assert self.without_blocks == sum(not each.has_blocks for each in everyone)
        assert self.swapped == sum(each.phase is SWAPPED for each in everyone)


RUNNING, MOVING, WAITING, SWAPPED = (
    DecodePhase.RUNNING,
    DecodePhase.MOVING,
    DecodePhase.WAITING,
    DecodePhase.SWAPPED,
)


def source_of(task: DecodeTask | ResumeTask) -> tuple[InstanceId, Incarnation]:
    """Whose KV the sequence is to go on with."""
    if isinstance(task, DecodeTask):
        return task.prefill_instance, task.prefill_incarnation
    return task.former.instance_id, task.former.incarnation
