"""Where a request goes. Pure choices over what is known of the instances' load, one rule for each phase.

A rule scores every candidate, the least being the best, and refuses those that it would not take, with the
reason: so every decision can be explained afterwards. Prefill and decode are chosen at once, so that the
transfer can overlap prefill (Splitwise IV-A).
"""

from collections.abc import Callable, Sequence
from math import inf

from common.config import DecodePolicy, PrefillPolicy
from common.ids import InstanceId
from scheduler.policy.best_fit import prompt_refusal_of, refusal_of, weighted_load
from scheduler.policy.candidates import Arrival, DecodeCandidate, Objectives, PrefillCandidate, Scored
from scheduler.policy.power_of_two import draw_two, heavy_ratio


def choose(scored: Sequence[Scored]) -> Scored | None:
    """The best that is not refused; ties by id, so every scheduler agrees. None: all are refused."""
    best, least = None, inf
    for each in scored:
        if each.refusal is None:
            score = each.score
            if best is None or score < least or (score == least and each.instance_id < best.instance_id):
                best, least = each, score
    return best


def _in_turn(candidates: Sequence[PrefillCandidate | DecodeCandidate], arrival: Arrival) -> list[Scored]:
    """Round robin (Vidur 4.5): the first is the one after who had the last."""
    ordered = sorted(candidates, key=lambda each: each.instance_id)
    return [
        Scored(each.instance_id, float((place - arrival.number) % len(ordered)))
        for place, each in enumerate(ordered)
    ]


def _by_requests(candidates: Sequence[PrefillCandidate | DecodeCandidate], _: Arrival) -> list[Scored]:
    """Least outstanding (Vidur 4.5)."""
    return [Scored(each.instance_id, float(each.requests)) for each in candidates]


def _by_pending_tokens(candidates: Sequence[PrefillCandidate], _: Arrival, __: Objectives) -> list[Scored]:
    """Join the shortest queue, counted in pending tokens (Splitwise IV-A, DistServe 4.3)."""
    return [Scored(each.instance_id, each.pending_tokens + each.coming_tokens) for each in candidates]


def _by_pass_tokens(candidates: Sequence[PrefillCandidate], _: Arrival, __: Objectives) -> list[Scored]:
    """Join the shortest queue, counted in the tokens of what waits for a pass: prompts with all of theirs,
    and each sequence that is decoded there with one, however many it is to draw (splitwise-sim)."""
    return [
        Scored(each.instance_id, each.pending_tokens + (0 if each.beside is None else each.beside.requests))
        for each in candidates
    ]


def _by_load(candidates: Sequence[DecodeCandidate], _: Arrival, __: Objectives) -> list[Scored]:
    """Least loaded (DistServe 4.3): by the share of its KV capacity that is spoken for, then by requests."""
    return [
        Scored(
            each.instance_id,
            each.context_tokens / each.capacity_tokens + each.requests * REQUEST_WEIGHT,
        )
        for each in candidates
    ]


REQUEST_WEIGHT = 1e-9
"""Only where shares are equal."""


def _two_by_heaviness(candidates: Sequence[DecodeCandidate], arrival: Arrival, _: Objectives) -> list[Scored]:
    """Of two drawn among those with room for the whole request (TetriInfer 3.3.4), who has fewer heavy ones
    beside each light one takes a heavy one, and who has fewer requests a light one, so that there are enough
    light ones everywhere. Where nobody has room, two are drawn among all."""
    needed = arrival.prompt_tokens + arrival.lengths.quantile(LIKELY) - arrival.drawn_tokens
    free = [each.capacity_tokens - each.context_tokens - each.coming_tokens for each in candidates]
    able = [index for index, room in enumerate(free) if room >= needed] or list(range(len(candidates)))
    drawn = {able[index] for index in draw_two(len(able), arrival.salt)}
    drawn |= {index for index in able if candidates[index].instance_id == arrival.home}
    scored = []
    for index, each in enumerate(candidates):
        ratio = heavy_ratio(each.heavy + 1, each.requests - each.heavy)
        score = ratio if arrival.lengths.is_heavy else float(each.requests)
        refusal = None if index in drawn else "not drawn" if index in able else "no room"
        scored.append(Scored(each.instance_id, score, refusal))
    return scored


LIKELY = 0.9
"""Share of like requests that need no more room: TetriInfer's upper end of the predicted range."""


def _best_fit(
    candidates: Sequence[DecodeCandidate], arrival: Arrival, objectives: Objectives
) -> list[Scored]:
    """The fullest that keeps what is promised (Aladdin, Alg. 1): fewest instances are used. Where none does,
    the emptiest."""
    names = [each.instance_id for each in candidates]
    loads = [weighted_load(each.requests, each.context_tokens, each.coming_tokens) for each in candidates]
    refusals = [_decode_refusal(each, arrival, objectives) for each in candidates]
    return _fullest(names, loads, refusals)


def _best_fit_prompts(
    candidates: Sequence[PrefillCandidate], arrival: Arrival, objectives: Objectives
) -> list[Scored]:
    """The same for whoever computes the prompt; a mixed instance is to decode it, too."""
    names = [each.instance_id for each in candidates]
    loads, refusals = [], []
    for each in candidates:
        refusal = prompt_refusal_of(
            arrival.prompt_tokens,
            pending_tokens=each.pending_tokens,
            chunk_time=each.chunk_time,
            chunk_tokens=each.chunk_tokens,
            ttft_s=objectives.ttft_s,
            spare_s=each.spare_s,
        )
        beside, held_tokens = each.beside, 0
        if beside is not None:
            held_tokens = beside.context_tokens
            refusal = refusal or _decode_refusal(beside, arrival, objectives)
        loads.append(weighted_load(each.requests, each.pending_tokens + held_tokens, each.coming_tokens))
        refusals.append(refusal)
    return _fullest(names, loads, refusals)


def _decode_refusal(candidate: DecodeCandidate, arrival: Arrival, objectives: Objectives) -> str | None:
    return refusal_of(
        (arrival.prompt_tokens, arrival.lengths.mean - arrival.drawn_tokens),
        requests=candidate.requests,
        context_tokens=candidate.context_tokens,
        coming_tokens=candidate.coming_tokens,
        sequences=candidate.sequences,
        capacity_tokens=candidate.capacity_tokens,
        step_time=candidate.step_time,
        tpot_s=objectives.tpot_s,
    )


def _fullest(
    names: Sequence[InstanceId], loads: Sequence[float], refusals: Sequence[str | None]
) -> list[Scored]:
    if not all(refusals):
        return [
            Scored(name, -load, refusal) for name, load, refusal in zip(names, loads, refusals, strict=True)
        ]
    emptiest = min(loads)
    return [
        Scored(name, load, None if load == emptiest else refusal, refusal)
        for name, load, refusal in zip(names, loads, refusals, strict=True)
    ]


BY_SEQUENCE = frozenset({"best_fit"})
"""Rules of either phase that look at each sequence of an instance, and at how far ahead it is of its pace."""

PREFILL_POLICIES: dict[
    PrefillPolicy, Callable[[Sequence[PrefillCandidate], Arrival, Objectives], list[Scored]]
] = {
    "round_robin": lambda candidates, arrival, _: _in_turn(candidates, arrival),
    "least_outstanding": lambda candidates, arrival, _: _by_requests(candidates, arrival),
    "shortest_queue": _by_pending_tokens,
    "token_jsq": _by_pass_tokens,
    "best_fit": _best_fit_prompts,
    # When, not where: ``scheduler.waiting_room``.
    "deferred": _by_pending_tokens,
}

DECODE_POLICIES: dict[
    DecodePolicy, Callable[[Sequence[DecodeCandidate], Arrival, Objectives], list[Scored]]
] = {
    "round_robin": lambda candidates, arrival, _: _in_turn(candidates, arrival),
    "least_outstanding": lambda candidates, arrival, _: _by_requests(candidates, arrival),
    "least_loaded": _by_load,
    "power_of_two": _two_by_heaviness,
    "best_fit": _best_fit,
}
