"""An instance, and a request that was placed, as the scheduler sees them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from common.ids import GatewayId, Incarnation, InstanceId, RequestId
from common.laws import queue_s
from common.lengths import LengthDistribution
from common.messages import InstanceRecord, LoadReport, Placement, Role
from common.messages.bookings import BookingVersion
from common.performance import DEFAULT_CHUNK_TOKENS, FittedTime
from scheduler.learned_times import KindTimes
from scheduler.policy.best_fit import Growth
from scheduler.policy.candidates import DecodeCandidate, PrefillCandidate
from scheduler.policy.decode_rebalancing import DecodeWorker

KVFormat = tuple[str, str, int]
"""``InstanceRecord.kv_format``."""


@dataclass(slots=True)
class PlacedRequest:
    """``acknowledged_s``: when the prefill instance took it over. ``is_reported``: a load report has it.
    ``is_void``: an instance of the placement left before that; nobody counts it, and it only says that the
    request is still wanted. ``expected_tokens``: that it will draw, ``predicted``: the predictor's word.
    ``deliverer``: the scheduler that hands it over, or has."""

    placement: Placement
    version: BookingVersion
    gateway_id: GatewayId
    prompt_tokens: int
    deliverer: Incarnation
    expected_tokens: int = 0
    is_heavy: bool = False
    acknowledged_s: float | None = None
    is_reported: bool = False
    is_void: bool = False
    predicted: LengthDistribution | None = None

    @property
    def attempt(self) -> int:
        return self.version.attempt

    def expect(self, lengths: LengthDistribution, drawn_tokens: int) -> None:
        """``lengths``: of its whole output, of which it has drawn so much."""
        self.expected_tokens = round(lengths.mean) - drawn_tokens
        self.is_heavy = lengths.is_heavy


@dataclass(slots=True)
class BookedWork:
    """Of the requests that are booked on an instance, in sums: a decision looks at every instance.

    ``unreported``: prompts on their way to it that no report of its own counts yet, and their tokens.
    ``decoding``: requests that it decodes or is to, their prompts' tokens, what they are expected to draw,
    and how many are expected to draw many.
    """

    unreported: int = 0
    unreported_tokens: int = 0
    decoding: int = 0
    decoding_tokens: int = 0
    decoding_expected: int = 0
    decoding_heavy: int = 0

    def add(self, instance_id: InstanceId, placed: PlacedRequest, sign: Literal[1, -1]) -> None:
        if placed.placement.prefill_instance == instance_id and not placed.is_reported:
            self.unreported += sign
            self.unreported_tokens += sign * placed.prompt_tokens
        if placed.placement.decode_instance == instance_id:
            self.decoding += sign
            self.decoding_tokens += sign * placed.prompt_tokens
            self.decoding_expected += sign * placed.expected_tokens
            self.decoding_heavy += sign * placed.is_heavy


@dataclass(slots=True)
class Standing:
    """``changes``: how often somebody came or left, or changed whom it serves: role, readiness, room."""

    changes: int = 0


@dataclass(slots=True)
class InstanceView:
    """One incarnation of one instance, as seen from here. A decision looks at every instance, but few have
    changed since the one before: what it looks at is made once for each change of its report or bookings.
    ``next_look_s``: for bookings of which nobody heard the end (``scheduler.membership``). ``learned``: by
    all of its kind, which ``chunk_time`` and ``step_time`` were at its newest report, where it had learned
    nothing itself. ``are_sequences_asked``: whether any rule looks at each of its sequences."""

    record: InstanceRecord
    last_heard_s: float
    report: LoadReport | None = None
    are_sequences_asked: bool = True
    is_suspect: bool = False
    next_look_s: float = 0.0
    placed: set[RequestId] = field(default_factory=set)
    booked: BookedWork = field(default_factory=BookedWork)
    standing: Standing = field(default_factory=Standing, repr=False, compare=False)
    learned: KindTimes = field(default_factory=KindTimes, repr=False, compare=False)
    chunk_time: FittedTime | None = field(init=False, default=None)
    step_time: FittedTime | None = field(init=False, default=None)
    instance_id: InstanceId = field(init=False)
    kv_format: KVFormat = field(init=False)
    role: Role = field(init=False)
    longest_tokens: int = field(init=False)
    """Of one sequence, which lives in one pool; its pools are attention workers', which come and go."""
    _decoding: dict[RequestId, PlacedRequest] = field(default_factory=dict)
    _prefilling: dict[RequestId, PlacedRequest] = field(default_factory=dict)
    """Prompts that no report counts yet."""
    _for_prefill: PrefillCandidate | None = None
    _for_decode: DecodeCandidate | None = None

    def __post_init__(self) -> None:
        record = self.record
        self.instance_id, self.kv_format, self.role = record.instance_id, record.kv_format, record.role
        if self.report is not None:
            self._learn(self.report)
        self._note_pools()

    def take_record(self, record: InstanceRecord) -> None:
        """Of the same life, as the store has it now."""
        if record is not self.record:
            self.standing.changes += 1
        self.record = record
        if self.report is None:
            self.role = record.role
            self._note_pools()

    def take_report(self, report: LoadReport, now: float) -> None:
        former = self.report
        is_changed = (
            former is None
            or self.is_suspect
            or report.role != former.role
            or report.is_draining != former.is_draining
            or report.largest_pool_blocks != former.largest_pool_blocks
        )
        self.report, self.role = report, report.role
        if is_changed:
            self.standing.changes += 1
            self._note_pools()
        self._learn(report)
        self.is_suspect = False
        self.last_heard_s = now
        self._for_prefill = self._for_decode = None
        if self._prefilling:
            self._note_reported()

    def _note_pools(self) -> None:
        pools = self.record if self.report is None else self.report
        self.longest_tokens = pools.largest_pool_blocks * self.record.block_size

    def _learn(self, report: LoadReport) -> None:
        learned = self.learned
        learned.take(report)
        self.chunk_time = learned.of_chunks(report.chunk_time)
        self.step_time = learned.of_steps(report.step_time)

    def suspect(self) -> None:
        """It did not answer: it is avoided until it is heard of."""
        self.is_suspect = True
        self.standing.changes += 1

    def book(self, request_id: RequestId, placed: PlacedRequest) -> None:
        if request_id not in self.placed:
            self.placed.add(request_id)
            if placed.placement.decode_instance == self.instance_id:
                self._decoding[request_id] = placed
            if placed.placement.prefill_instance == self.instance_id and not placed.is_reported:
                self._prefilling[request_id] = placed
            self._count(placed, 1)

    def unbook(self, request_id: RequestId, placed: PlacedRequest) -> None:
        """One that is not booked here, or was in an earlier life, is left alone."""
        if request_id in self.placed:
            self.placed.remove(request_id)
            self._decoding.pop(request_id, None)
            self._prefilling.pop(request_id, None)
            self._count(placed, -1)

    def _note_reported(self) -> None:
        """Its own report counts all prompts from now on that it had acknowledged."""
        for request_id, placed in list(self._prefilling.items()):
            if placed.acknowledged_s is not None:
                del self._prefilling[request_id]
                self._count(placed, -1)
                placed.is_reported = True
                self._count(placed, 1)

    def _count(self, placed: PlacedRequest, sign: Literal[1, -1]) -> None:
        self.booked.add(self.instance_id, placed, sign)
        self._for_prefill = self._for_decode = None

    @property
    def for_prefill(self) -> PrefillCandidate:
        if self._for_prefill is None:
            self._for_prefill = self._prefill_candidate()
        return self._for_prefill

    @property
    def for_decode(self) -> DecodeCandidate:
        if self._for_decode is None:
            self._for_decode = self._decode_candidate()
        return self._for_decode

    def check(self) -> None:
        """What decisions look at is how it is."""
        assert self._for_prefill in (None, self._prefill_candidate()), "an old view of a prefill queue"
        assert all(not each.is_reported for each in self._prefilling.values()), "a prompt was reported"
        assert self._for_decode in (None, self._decode_candidate()), "an old view of what is decoded"
        pools = self.report or self.record
        assert self.longest_tokens == pools.largest_pool_blocks * self.record.block_size, (
            "an old view of pools"
        )

    def _prefill_candidate(self) -> PrefillCandidate:
        report, booked = self.report, self.booked
        pending_tokens, requests = booked.unreported_tokens, booked.unreported
        rate, chunk_time, chunk_tokens = None, self.chunk_time, DEFAULT_CHUNK_TOKENS
        if report is not None:
            pending_tokens += report.pending_prefill_tokens
            requests += report.pending_prefill_requests
            rate, chunk_tokens = report.prefill_tokens_per_s, report.chunk_tokens
        waits_s = 0.0
        if pending_tokens and chunk_time is not None:
            waits_s = queue_s(chunk_time, pending_tokens, chunk_tokens)
        name = self.instance_id
        if self.role != "mixed":
            return PrefillCandidate(
                name, pending_tokens, requests, rate, chunk_time, chunk_tokens, queue_s=waits_s
            )
        # It mostly decodes what it computes: these are counted once.
        beside = self.for_decode
        return PrefillCandidate(
            name,
            pending_tokens,
            max(requests, beside.requests),
            rate,
            chunk_time,
            chunk_tokens,
            beside.coming_tokens,
            beside,
            None if report is None else report.decode_spare_s,
            waits_s,
        )

    def _decode_candidate(self) -> DecodeCandidate:
        """Own bookings or the instance's report, whichever knows of more (another scheduler's, or ours
        before a restart; what will still be drawn by those that outlived their predictions)."""
        report, booked = self.report, self.booked
        reported_requests = reported_tokens = reported_coming = 0
        if report is None:
            total_blocks = self.record.total_blocks
        else:
            reported_requests = report.decode_running + report.decode_waiting
            reported_tokens, reported_coming = report.decode_tokens, report.decode_coming_tokens
            total_blocks = report.total_blocks
        context_tokens = max(booked.decoding_tokens, reported_tokens)
        capacity_tokens = total_blocks * self.kv_format[2]
        expected = booked.decoding_tokens + booked.decoding_expected
        is_plenty = 2 * expected <= capacity_tokens or reported_requests > booked.decoding
        return DecodeCandidate(
            self.instance_id,
            max(booked.decoding, reported_requests),
            context_tokens,
            capacity_tokens,
            max(0, expected - context_tokens, reported_coming),
            booked.decoding_heavy,
            self.step_time,
            self._sequences(context_tokens) if self.are_sequences_asked and not is_plenty else None,
        )

    def _sequences(self, context_tokens: int) -> tuple[Growth, ...]:
        """Of each booked request, as if all had drawn equally many of the tokens that are held beyond their
        prompts. Not asked for where others' requests are there, too, or the pool would at most be half
        full."""
        booked = self.booked
        drawn = (context_tokens - booked.decoding_tokens) / max(1, booked.decoding)
        return tuple(
            (placed.prompt_tokens + drawn, max(0.0, placed.expected_tokens - drawn))
            for placed in self._decoding.values()
        )

    def as_decode_worker(self, most_requests: int) -> DecodeWorker:
        """What is still on its way here counts in full; what its report does not know cannot leave."""
        candidate, report = self.for_decode, self.report
        need_tokens = 0 if report is None else report.decode_need_tokens
        movable = () if report is None else report.movable
        if not movable:
            booked_tokens = round(candidate.context_tokens + candidate.coming_tokens)
            need_tokens = max(need_tokens + self.booked.unreported_tokens, booked_tokens)
        return DecodeWorker(
            self.instance_id,
            self.kv_format,
            self.capacity_tokens,
            need_tokens,
            self.is_ready and candidate.requests < most_requests,
            movable,
        )

    @property
    def is_ready(self) -> bool:
        return self.report is not None and not self.report.is_draining and not self.is_suspect

    @property
    def reported_requests(self) -> int | None:
        """In any phase, those that change instances at both; None before the first report."""
        report = self.report
        if report is None:
            return None
        prefilled = report.pending_prefill_requests + report.handovers_waiting
        return prefilled + report.decode_running + report.decode_waiting

    @property
    def is_idle(self) -> bool:
        """It reported no work of any kind."""
        report = self.report
        return report is not None and not (
            report.decode_running
            or report.decode_waiting
            or report.pending_prefill_requests
            or report.handovers_waiting
        )

    @property
    def is_leaving(self) -> bool:
        return self.report is not None and self.report.is_draining

    @property
    def home(self) -> Role:
        """The role that it goes back to."""
        told = self.record if self.report is None else self.report
        return told.home or told.role

    @property
    def capacity_tokens(self) -> int:
        """Of all sequences together."""
        pools = self.record if self.report is None else self.report
        return pools.total_blocks * self.record.block_size

    @property
    def longest_tokens_at_start(self) -> int:
        return self.record.largest_pool_blocks * self.record.block_size


def prefill_candidates(views: Iterable[InstanceView]) -> list[PrefillCandidate]:
    """``for_prefill`` of each. Most have it ready: a placement looks at everybody."""
    return [view._for_prefill or view.for_prefill for view in views]


def decode_candidates(views: Iterable[InstanceView]) -> list[DecodeCandidate]:
    """``for_decode`` of each."""
    return [view._for_decode or view.for_decode for view in views]
