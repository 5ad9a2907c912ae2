"""Which instances take a request: who could, by what is known of them, and whom the configured rules choose.

Every choice is kept with its candidates and their scores (``scheduler.decision_log``). Nothing is booked.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from common.config import ObjectivesConfig, SchedulerConfig
from common.errors import ContextLengthExceeded, NoInstanceReady, Overloaded, RequestError
from common.ids import InstanceId, RequestId
from common.lengths import LengthDistribution, capped
from common.messages import GenerationRequest, Role
from common.predictions import NewestLengths
from scheduler.decision_log import Choice, Decision, DecisionLog
from scheduler.policy.admission import retry_after_s
from scheduler.policy.dispatch import (
    DECODE_POLICIES,
    PREFILL_POLICIES,
    Arrival,
    DecodeCandidate,
    Objectives,
    PrefillCandidate,
    Scored,
    choose,
)
from scheduler.policy.length_history import LengthHistory
from scheduler.views import InstanceView

NO_INSTANCE_RETRY_S = 2.0
DECODE_FULL_RETRY_S = 2.0
KVFormat = tuple[str, str, int]
"""``InstanceRecord.kv_format``."""


@dataclass(slots=True)
class Placer:
    """``instances`` are the state's own. ``lengths``: what outputs have been like; ``predicted``: what a
    predictor said of single requests."""

    settings: SchedulerConfig
    objectives: ObjectivesConfig
    instances: dict[InstanceId, InstanceView]
    lengths: LengthHistory = field(default_factory=LengthHistory)
    predicted: NewestLengths[RequestId] = field(default_factory=NewestLengths)
    log: DecisionLog = field(init=False)
    _chosen: int = 0

    def __post_init__(self) -> None:
        self.log = DecisionLog(self.settings.decisions_kept)

    def predict(self, request: GenerationRequest) -> LengthDistribution:
        """Tokens that it will have drawn in the end: by the predictor's word or else by what like prompts
        drew, of those that got as far."""
        whole = self.predicted.find(request.request_id) or self.lengths.predict(len(request.prompt_ids))
        return capped(whole.beyond(len(request.output_ids)), request.sampling.max_tokens)

    def choose_both(
        self, request: GenerationRequest, excluded: frozenset[InstanceId], now: float
    ) -> tuple[InstanceView, InstanceView]:
        """(prefill, decode). Raises Overloaded, NoInstanceReady or ContextLengthExceeded."""
        arrival = self._arrival(request)
        choices: list[Choice] = []
        try:
            prefill = self._choose_prefill(request, arrival, excluded, choices)
            decode = self._choose_decode(request, arrival, excluded, {prefill.record.kv_format}, choices)
        finally:
            self._keep(request, arrival, choices, now)
        self._chosen += 1
        return prefill, decode

    def choose_decode(
        self, request: GenerationRequest, now: float, former: InstanceView | None = None
    ) -> InstanceView:
        """For a sequence whose KV need not be computed: ``former``, if any, has it and is to hand it over.
        Raises as ``choose_both``."""
        arrival = self._arrival(request)
        choices: list[Choice] = []
        excluded: frozenset[InstanceId] = frozenset()
        kv_formats = {view.record.kv_format for view in self._ready("decode", excluded)}
        if former is not None:
            excluded, kv_formats = frozenset({former.record.instance_id}), {former.record.kv_format}
        try:
            decode = self._choose_decode(request, arrival, excluded, kv_formats, choices)
        finally:
            self._keep(request, arrival, choices, now)
        self._chosen += 1
        return decode

    def _arrival(self, request: GenerationRequest) -> Arrival:
        digest = hashlib.blake2b(request.request_id.encode(), digest_size=8).digest()
        return Arrival(
            self._chosen,
            int.from_bytes(digest),
            request.tokens,
            len(request.output_ids),
            self.predict(request),
        )

    def _keep(
        self, request: GenerationRequest, arrival: Arrival, choices: Sequence[Choice], now: float
    ) -> None:
        self.log.add(
            Decision(
                request.request_id,
                request.attempt,
                now,
                arrival.prompt_tokens,
                arrival.lengths.mean,
                tuple(choices),
            )
        )

    def _choose_prefill(
        self,
        request: GenerationRequest,
        arrival: Arrival,
        excluded: frozenset[InstanceId],
        choices: list[Choice],
    ) -> InstanceView:
        policy = self.settings.prefill_policy
        try:
            partners = {view.record.kv_format for view in self._ready("decode", excluded)}
            views = self._fitting("prefill", request.tokens, excluded, partners)
            candidates = self._within_bound(list(map(self._prefill_candidate, views)), request.tokens)
        except RequestError as exc:
            choices.append(Choice(policy, (), None, exc.message))
            raise
        return self._take(policy, PREFILL_POLICIES[policy](candidates, arrival), choices)

    def _within_bound(self, candidates: list[PrefillCandidate], tokens: int) -> list[PrefillCandidate]:
        """Those whose queue has room; an empty one takes any prompt. Raises Overloaded."""
        bound = self.settings.max_pending_prefill_tokens
        most = max(0, bound - tokens)
        within = [each for each in candidates if each.pending_tokens <= most]
        if within:
            return within
        least = min(candidates, key=lambda each: each.pending_tokens)
        raise Overloaded(
            f"{least.pending_tokens} prompt tokens wait at the least busy prefill instance; the bound"
            f" scheduler.max_pending_prefill_tokens is {bound}",
            retry_after_s=retry_after_s(least.pending_tokens + tokens - bound, least.tokens_per_s),
        )

    def _choose_decode(
        self,
        request: GenerationRequest,
        arrival: Arrival,
        excluded: frozenset[InstanceId],
        kv_formats: Collection[KVFormat],
        choices: list[Choice],
    ) -> InstanceView:
        policy, bound = self.settings.decode_policy, self.settings.max_requests_per_decode
        try:
            views = self._fitting("decode", request.max_total_tokens, excluded, kv_formats)
            everyone = map(self._decode_candidate, views)
            candidates = [candidate for candidate in everyone if candidate.requests < bound]
            if not candidates:
                raise Overloaded(
                    f"every decode instance has scheduler.max_requests_per_decode = {bound} requests",
                    retry_after_s=DECODE_FULL_RETRY_S,
                )
        except RequestError as exc:
            choices.append(Choice(policy, (), None, exc.message))
            raise
        objectives = Objectives(self.objectives.ttft_s, self.objectives.tpot_s)
        return self._take(policy, DECODE_POLICIES[policy](candidates, arrival, objectives), choices)

    def _take(self, policy: str, scored: list[Scored], choices: list[Choice]) -> InstanceView:
        taken = choose(scored)
        assert taken is not None, f"{policy} took none of {scored}"
        choices.append(Choice(policy, tuple(scored), taken.instance_id))
        return self.instances[taken.instance_id]

    # who could

    def _ready(self, role: Role, excluded: frozenset[InstanceId]) -> list[InstanceView]:
        return [
            view
            for view in self.instances.values()
            if view.role == role and view.is_ready and view.record.instance_id not in excluded
        ]

    def _fitting(
        self, role: Role, tokens: int, excluded: frozenset[InstanceId], kv_formats: Collection[KVFormat]
    ) -> list[InstanceView]:
        """The ready instances of a role that can exchange KV, and of which a pool could hold ``tokens``."""
        everyone = self._ready(role, excluded)
        ready = [view for view in everyone if view.record.kv_format in kv_formats]
        if not ready:
            missing = "no decode instance" if everyone and not kv_formats else f"no {role} instance"
            why = " with a partner's model, dtype and block size" if everyone and kv_formats else ""
            raise NoInstanceReady(f"{missing}{why} is ready", retry_after_s=NO_INSTANCE_RETRY_S)
        fitting = [view for view in ready if view.longest_tokens >= tokens]
        if fitting:
            return fitting
        largest = max(
            max(view.longest_tokens, view.longest_tokens_at_start)
            for view in self.instances.values()
            if view.role == role
        )
        if largest >= tokens:
            raise NoInstanceReady(
                f"no {role} instance that holds {tokens} tokens is ready", retry_after_s=NO_INSTANCE_RETRY_S
            )
        raise ContextLengthExceeded(
            f"the sequence needs KV memory for {tokens} tokens; the largest {role} instance holds {largest}",
            param="max_tokens" if role == "decode" else "prompt",
        )

    def _prefill_candidate(self, view: InstanceView) -> PrefillCandidate:
        report, booked = view.report, view.booked
        return PrefillCandidate(
            view.record.instance_id,
            booked.unreported_tokens + (0 if report is None else report.pending_prefill_tokens),
            booked.unreported + (0 if report is None else report.pending_prefill_requests),
            None if report is None else report.prefill_tokens_per_s,
        )

    def _decode_candidate(self, view: InstanceView) -> DecodeCandidate:
        """Own bookings or the instance's report, whichever knows of more (another scheduler's, or ours
        before a restart)."""
        report, booked = view.report, view.booked
        reported_requests = 0 if report is None else report.decode_running + report.decode_waiting
        reported_tokens = 0 if report is None else report.decode_tokens
        context_tokens = max(booked.decoding_tokens, reported_tokens)
        expected = booked.decoding_tokens + booked.decoding_expected
        return DecodeCandidate(
            view.record.instance_id,
            requests=max(booked.decoding, reported_requests),
            context_tokens=context_tokens,
            capacity_tokens=view.capacity_tokens,
            coming_tokens=max(0, expected - context_tokens),
            heavy=booked.decoding_heavy,
            step_time=None if report is None else report.step_time,
        )
