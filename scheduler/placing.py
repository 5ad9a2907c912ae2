"""Which instances take a request: who could, by what is known of them, and whom the configured rules choose.

Every choice is kept with its candidates and their scores (``scheduler.decision_log``). Nothing is booked.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from common.config import ObjectivesConfig, SchedulerConfig
from common.errors import ContextLengthExceeded, NoInstanceReady, Overloaded, RequestError
from common.ids import InstanceId, RequestId
from common.lengths import LengthDistribution, capped
from common.messages import GenerationRequest, Phase
from common.predictions import NewestLengths
from scheduler.barring import Elsewhere, barred_of
from scheduler.decision_log import Barred, Choice, Decision, DecisionLog
from scheduler.kv_links import Distrust, KVLinks
from scheduler.policy.admission import next_end_s, prefill_s, retry_after_s
from scheduler.policy.candidates import Arrival, DecodeCandidate, Objectives, PrefillCandidate, Scored
from scheduler.policy.coupling import choose_coupled
from scheduler.policy.dispatch import DECODE_POLICIES, PREFILL_POLICIES, choose
from scheduler.policy.length_history import LengthHistory
from scheduler.policy.shadow import Look, predicted_tpot_s, predicted_ttft_s
from scheduler.regret import RegretLog, TimeBudget
from scheduler.standby import Serving, Standby, serving_of
from scheduler.trust import NOBODY, trusted_receivers, trusted_senders
from scheduler.views import InstanceView, KVFormat, decode_candidates, prefill_candidates

NO_INSTANCE_RETRY_S = 2.0


@dataclass(slots=True)
class Placer:
    """``standby``: who serves; ``links``: between whom KV gets through. ``objectives`` are those of every
    class that is not among ``service_classes``. ``lengths``: what outputs have been like; ``predicted``: what
    a predictor said of single requests. ``look``: what the newest decision saw, for whoever judges it
    (``scheduler.regret``)."""

    settings: SchedulerConfig
    objectives: ObjectivesConfig
    standby: Standby
    links: KVLinks
    service_classes: Mapping[str, ObjectivesConfig] = field(default_factory=dict)
    lengths: LengthHistory = field(default_factory=LengthHistory)
    predicted: NewestLengths[RequestId] = field(default_factory=NewestLengths)
    log: DecisionLog = field(init=False)
    regret: RegretLog = field(init=False)
    look: Look | None = None
    _distrust: Distrust | None = None
    _prefills: Sequence[PrefillCandidate] = ()
    _chosen: int = 0
    _elsewhere: Elsewhere = field(default_factory=Elsewhere)
    _foreseen: tuple[GenerationRequest, LengthDistribution, LengthDistribution] | None = None

    def __post_init__(self) -> None:
        self.log = DecisionLog(self.settings.decisions_kept)
        self.regret = RegretLog(TimeBudget(self.settings.shadow_share))

    def predict(self, request: GenerationRequest) -> LengthDistribution:
        """Tokens that it will have drawn in the end: by the predictor's word or else by what like prompts
        drew, of those that got as far."""
        whole = self.predicted.find(request.request_id) or self.lengths.predict(len(request.prompt_ids))
        foreseen = self._foreseen
        if foreseen is None or foreseen[0] is not request or foreseen[1] is not whole:
            lengths = capped(whole.beyond(len(request.output_ids)), request.sampling.max_tokens)
            # A placement asks several times of the same one.
            foreseen = self._foreseen = request, whole, lengths
        return foreseen[2]

    def choose_both(
        self,
        request: GenerationRequest,
        excluded: frozenset[InstanceId],
        now: float,
        *,
        is_patient: bool = False,
    ) -> tuple[InstanceView, InstanceView]:
        """(prefill, decode); for who is patient, a prefill instance with a short queue or none at all.
        Raises Overloaded, NoInstanceReady or ContextLengthExceeded."""
        arrival = self._arrival(request)
        choices: list[Choice] = []
        self._distrust = self.links.distrust(now)
        try:
            decodes = self._serving("decode", excluded)
            prefill = self._choose_prefill(request, arrival, excluded, decodes, choices, is_patient)
            arrival = _at_home(arrival, prefill)
            decode = self._choose_decode(request, arrival, decodes, prefill, choices)
        finally:
            self._keep(request, arrival, choices, now)
        self._chosen += 1
        return prefill, decode

    def choose_decode(
        self,
        request: GenerationRequest,
        now: float,
        former: InstanceView | None = None,
        wanted: InstanceId | None = None,
        refused: InstanceId | None = None,
    ) -> InstanceView:
        """For a sequence whose KV need not be computed: ``former``, if any, has it and is to hand it over,
        or where it is mixed may decode it itself; ``wanted``, if it is ready, takes it, and ``refused`` only
        if nobody else is. Raises as ``choose_both``."""
        arrival = self._arrival(request)
        self._prefills = ()
        choices: list[Choice] = []
        excluded: frozenset[InstanceId] = frozenset()
        if former is not None:
            arrival = _at_home(arrival, former)
            excluded = frozenset({former.instance_id} - {arrival.home})
        decodes = self._serving("decode", excluded)
        self._distrust = self.links.distrust(now)
        trusted, _ = trusted_receivers(self._distrust, former, decodes.ready)
        ready = [view for view in trusted if view.instance_id == wanted] or decodes.ready
        ready = [view for view in ready if view.instance_id != refused] or ready
        decodes = decodes._replace(ready=ready)
        try:
            decode = self._choose_decode(request, arrival, decodes, former, choices, wanted)
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
                service_class=request.service_class,
                drawn_tokens=arrival.drawn_tokens,
            )
        )

    def _choose_prefill(
        self,
        request: GenerationRequest,
        arrival: Arrival,
        excluded: frozenset[InstanceId],
        decodes: Serving,
        choices: list[Choice],
        is_patient: bool,
    ) -> InstanceView:
        policy = self.settings.prefill_policy
        partners, prefills = decodes.kv_formats, self._serving("prefill", excluded)
        members, distrusted, tokens = prefills.members, NOBODY, arrival.prompt_tokens
        try:
            views = self._fitting("prefill", prefills, tokens, partners)
            if prefills.is_any_mixed:
                views = self._with_room_after(views, request)
            views, distrusted = trusted_senders(self._distrust, views, decodes.ready)
            everyone = prefill_candidates(views)
            candidates = (
                self._with_short_queue(everyone) if is_patient else self._within_bound(everyone, tokens)
            )
        except RequestError as exc:
            barred = self._barred("prefill", members, (), tokens, partners, distrusted)
            choices.append(Choice("prefill", policy, (), None, exc.message, barred=barred))
            raise
        self._prefills = candidates
        scored = PREFILL_POLICIES[policy](candidates, arrival, self._promised(request))
        taken = choose(scored)
        assert taken is not None, f"{policy} took none of {scored}"
        view = self.standby.instances[taken.instance_id]
        choices.append(
            Choice(
                "prefill",
                policy,
                _shown(scored, taken),
                taken.instance_id,
                predicted_s=predicted_ttft_s(view.for_prefill, arrival),
                barred=self._barred("prefill", members, candidates, tokens, partners, distrusted),
            )
        )
        return view

    def _promised(self, request: GenerationRequest) -> Objectives:
        promised = self.service_classes.get(request.service_class, self.objectives)
        return Objectives(promised.ttft_s, promised.tpot_s)

    def _with_room_after(
        self, views: Sequence[InstanceView], request: GenerationRequest
    ) -> list[InstanceView]:
        """A mixed instance that could not decode the sequence itself does not compute its prompt. Raises
        Overloaded or ContextLengthExceeded where nobody else can."""
        bound, tokens = self.settings.max_requests_per_decode, request.max_total_tokens
        able = [
            view
            for view in views
            if view.role == "prefill" or (view.longest_tokens >= tokens and view.for_decode.requests < bound)
        ]
        if not able:
            self._fitting("decode", serving_of(views, "decode"), tokens, {view.kv_format for view in views})
            raise self._decode_overloaded(view.for_decode for view in views)
        return able

    def _decode_overloaded(self, full: Iterable[DecodeCandidate]) -> Overloaded:
        bound = self.settings.max_requests_per_decode
        ends_s = [
            next_end_s(each.requests, each.context_tokens, each.coming_tokens, each.step_time)
            for each in full
        ]
        return Overloaded(
            f"every decode instance has scheduler.max_requests_per_decode = {bound} requests",
            retry_after_s=retry_after_s(min((each for each in ends_s if each is not None), default=None)),
        )

    def next_turn_retry_s(self) -> float:
        """After which somebody who waits may be bound, and leaves a place to wait."""
        below = self.settings.bind_below_tokens
        queues = [view.for_prefill for view in self.standby.serving("prefill").ready]
        turns_s = [
            prefill_s(
                max(0, each.pending_tokens - below), each.chunk_time, each.chunk_tokens, each.tokens_per_s
            )
            for each in queues
        ]
        return retry_after_s(min((each for each in turns_s if each is not None), default=None))

    def has_short_queue(self) -> bool:
        """Whether there is an instance that who waits is waiting for."""
        below = self.settings.bind_below_tokens
        return any(view.for_prefill.pending_tokens < below for view in self.standby.serving("prefill").ready)

    def _with_short_queue(self, candidates: list[PrefillCandidate]) -> list[PrefillCandidate]:
        """Raises Overloaded."""
        below = self.settings.bind_below_tokens
        short = [each for each in candidates if each.pending_tokens < below]
        if not short:
            raise Overloaded(
                f"scheduler.bind_below_tokens = {below} prompt tokens wait at every prefill instance"
            )
        return short

    def _within_bound(self, candidates: list[PrefillCandidate], tokens: int) -> list[PrefillCandidate]:
        """Those whose queue has room; an empty one takes any prompt. Raises Overloaded."""
        most = max(0, self.settings.max_pending_prefill_tokens - tokens)
        most_s = self.settings.max_prefill_wait_s
        within = [each for each in candidates if each.pending_tokens <= most and each.queue_s <= most_s]
        if within:
            return within
        raise self._queues_full(min(candidates, key=lambda each: each.pending_tokens), most)

    def _queues_full(self, least: PrefillCandidate, most_tokens: int) -> Overloaded:
        """``least``: with the shortest queue, which has over ``most_tokens`` or takes too long."""
        settings, known = self.settings, (least.chunk_time, least.chunk_tokens, least.tokens_per_s)
        wait_s = prefill_s(least.pending_tokens, *known)
        if least.pending_tokens > most_tokens:
            bound = f"scheduler.max_pending_prefill_tokens is {settings.max_pending_prefill_tokens}"
            excess_s = prefill_s(least.pending_tokens - most_tokens, *known)
        else:
            bound = f"scheduler.max_prefill_wait_s is {settings.max_prefill_wait_s:g}"
            excess_s = None if wait_s is None else wait_s - settings.max_prefill_wait_s
        lasting = "" if wait_s is None else f", {wait_s:.1f} s of work,"
        return Overloaded(
            f"{least.pending_tokens} prompt tokens{lasting} wait at the least busy prefill instance; {bound}",
            retry_after_s=retry_after_s(excess_s),
        )

    def _choose_decode(
        self,
        request: GenerationRequest,
        arrival: Arrival,
        decodes: Serving,
        sender: InstanceView | None,
        choices: list[Choice],
        wanted: InstanceId | None = None,
    ) -> InstanceView:
        policy, bound = self.settings.decode_policy, self.settings.max_requests_per_decode
        members, distrusted, tokens, home = decodes.members, NOBODY, request.max_total_tokens, arrival.home
        kv_formats = {view.kv_format for view in ([sender] if sender is not None else decodes.ready)}
        try:
            fitting = self._fitting("decode", decodes, tokens, kv_formats)
            views, distrusted = trusted_receivers(self._distrust, sender, fitting)
            if home is not None:
                # Not to another mixed one that is not wanted: see ``policy.coupling``.
                views = [
                    view
                    for view in views
                    if view.role == "decode" or view.instance_id == home or view.instance_id == wanted
                ]
            candidates = [each for each in decode_candidates(views) if each.requests < bound]
            if not candidates:
                raise self._decode_overloaded(view.for_decode for view in views)
        except RequestError as exc:
            barred = self._barred("decode", members, (), tokens, kv_formats, distrusted, home)
            choices.append(Choice("decode", policy, (), None, exc.message, barred=barred))
            raise
        objectives = self._promised(request)
        scored = DECODE_POLICIES[policy](candidates, arrival, objectives)
        taken = choose(scored) if home is None else choose_coupled(scored, home, policy)
        assert taken is not None, f"{policy} took none of {scored}"
        view = self.standby.instances[taken.instance_id]
        are_able = decodes.are_all_mixed and len(fitting) == len(members) and self._distrust is None
        are_known = are_able and members is self.standby.serving("decode").members
        if are_known and len(candidates) == 1 and taken.instance_id == home:
            barred = self._elsewhere.than(home, members)
        else:
            barred = self._barred("decode", members, candidates, tokens, kv_formats, distrusted, home)
        choices.append(
            Choice(
                "decode",
                policy,
                _shown(scored, taken),
                taken.instance_id,
                predicted_s=predicted_tpot_s(view.for_decode, arrival),
                loads=tuple(candidates),
                tpot_s=objectives.tpot_s,
                barred=barred,
            )
        )
        self.look = Look(arrival, self._prefills, candidates, objectives)
        return view

    def _barred(
        self,
        phase: Phase,
        members: Sequence[InstanceView],
        candidates: Collection[PrefillCandidate | DecodeCandidate],
        tokens: int,
        kv_formats: Collection[KVFormat],
        distrusted: Mapping[InstanceId, str],
        home: InstanceId | None = None,
    ) -> tuple[Barred, ...]:
        if len(members) == len(candidates):
            return ()
        scored = {each.instance_id for each in candidates}
        most = self.settings.max_requests_per_decode
        return barred_of(phase, members, scored, tokens, kv_formats, most, distrusted, home)

    # who could

    def _serving(self, phase: Phase, excluded: Collection[InstanceId]) -> Serving:
        serving = self.standby.serving(phase)
        if not excluded:
            return serving
        members = [view for view in serving.members if view.instance_id not in excluded]
        return serving_of(members, phase)

    def _fitting(
        self, phase: Phase, serving: Serving, tokens: int, kv_formats: Collection[KVFormat]
    ) -> list[InstanceView]:
        """Of those that are ready who can exchange KV, and of whom a pool could hold ``tokens``."""
        ready = serving.ready
        if ready and serving.least_tokens >= tokens and serving.kv_formats.issubset(kv_formats):
            return ready
        partners = [view for view in ready if view.kv_format in kv_formats]
        if not partners:
            missing = "no decode instance" if ready and not kv_formats else f"no {phase} instance"
            why = " with a partner's model, dtype and block size" if ready and kv_formats else ""
            raise NoInstanceReady(f"{missing}{why} is ready", retry_after_s=NO_INSTANCE_RETRY_S)
        fitting = [view for view in partners if view.longest_tokens >= tokens]
        if fitting:
            return fitting
        members = self.standby.serving(phase).members
        largest = max(max(view.longest_tokens, view.longest_tokens_at_start) for view in members)
        if largest >= tokens:
            raise NoInstanceReady(
                f"no {phase} instance that holds {tokens} tokens is ready", retry_after_s=NO_INSTANCE_RETRY_S
            )
        raise ContextLengthExceeded(
            f"the sequence needs KV memory for {tokens} tokens; the largest {phase} instance holds {largest}",
            param="max_tokens" if phase == "decode" else "prompt",
        )


def _shown(scored: Sequence[Scored], taken: Scored) -> tuple[Scored, ...]:
    """With what speaks against the one that was taken."""
    if taken.note is None:
        return tuple(scored)
    return tuple(taken if each.instance_id == taken.instance_id else each for each in scored)


def _at_home(arrival: Arrival, prefill: InstanceView) -> Arrival:
    """Of a prompt that is computed there."""
    if prefill.role != "mixed":
        return arrival
    return arrival.at(prefill.instance_id)
