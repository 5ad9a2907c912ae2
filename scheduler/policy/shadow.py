"""What every rule would have chosen, by the same look at the same instances, and what that would have cost.

A choice's cost is a prediction: for prefill the time to the first token, which is the queue's and the
prompt's by what the instance has learned of its chunks (``common.performance``), or else by its rate; for
decode the time per output token, which is that of a step with the request in the batch and half of what is
to be drawn in the context (Aladdin, 4.2). A pool that would be asked for more than it holds makes its
sequences take turns: each then gets as many steps fewer.

Only instances that have measured their own speed are looked at. A rule's regret is its choice's cost less the
least cost; it is never under 0, and 0 for whoever chose the best. A rule that gathers requests on few
instances on purpose (best fit) regrets the seconds that it spends on that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.ids import InstanceId
from common.laws import prompt_s, queue_s, step_s
from common.messages import Phase
from scheduler.policy.admission import prefill_s
from scheduler.policy.best_fit import GAMMA
from scheduler.policy.candidates import Arrival, DecodeCandidate, Objectives, PrefillCandidate, Scored
from scheduler.policy.coupling import choose_coupled
from scheduler.policy.dispatch import DECODE_POLICIES, PREFILL_POLICIES, choose


@dataclass(slots=True)
class Look:
    """What one decision saw; nobody of a phase in which nothing was chosen."""

    arrival: Arrival
    prefills: Sequence[PrefillCandidate] = ()
    decodes: Sequence[DecodeCandidate] = ()
    objectives: Objectives | None = None
    """None where no decode instance was chosen: then nothing was placed."""


@dataclass(frozen=True, slots=True)
class Regret:
    """Of one rule at one decision, in seconds: to the first token (prefill), or per output token (decode)."""

    phase: Phase
    policy: str
    cost_s: float
    regret_s: float


def predicted_ttft_s(candidate: PrefillCandidate, arrival: Arrival) -> float | None:
    """None where the instance has measured nothing yet."""
    rate, law, chunk_tokens = candidate.tokens_per_s, candidate.chunk_time, candidate.chunk_tokens
    if law is None:
        return prefill_s(candidate.pending_tokens + arrival.prompt_tokens, None, chunk_tokens, rate)
    own_s = prompt_s(law, arrival.prompt_tokens, chunk_tokens)
    return queue_s(law, candidate.pending_tokens, chunk_tokens) + own_s


def predicted_tpot_s(candidate: DecodeCandidate, arrival: Arrival) -> float | None:
    """None where the instance has measured nothing yet."""
    law = candidate.step_time
    if law is None:
        return None
    held = candidate.context_tokens + arrival.prompt_tokens
    coming = candidate.coming_tokens + arrival.lengths.mean - arrival.drawn_tokens
    taken_s = step_s(law, candidate.requests + 1, round(held + GAMMA * coming))
    return taken_s * max(1.0, (held + coming) / candidate.capacity_tokens)


def judge_policies(look: Look) -> list[Regret]:
    """Of every rule of each phase in which somebody could be chosen."""
    regrets: list[Regret] = []
    prefill_costs = {
        each.instance_id: cost_s
        for each in look.prefills
        if (cost_s := predicted_ttft_s(each, look.arrival)) is not None
    }
    if prefill_costs and look.objectives is not None:
        prefills = [each for each in look.prefills if each.instance_id in prefill_costs]
        for policy, rule in PREFILL_POLICIES.items():
            taken = choose(rule(prefills, look.arrival, look.objectives))
            regrets.append(_regret("prefill", policy, taken, prefill_costs))
    decode_costs = {
        each.instance_id: cost_s
        for each in look.decodes
        if (cost_s := predicted_tpot_s(each, look.arrival)) is not None
    }
    if decode_costs and look.objectives is not None:
        decodes = [each for each in look.decodes if each.instance_id in decode_costs]
        for decode_policy, decode_rule in DECODE_POLICIES.items():
            scored, home = decode_rule(decodes, look.arrival, look.objectives), look.arrival.home
            taken = choose(scored) if home is None else choose_coupled(scored, home, decode_policy)
            regrets.append(_regret("decode", decode_policy, taken, decode_costs))
    return regrets


def _regret(phase: Phase, policy: str, taken: Scored | None, costs: dict[InstanceId, float]) -> Regret:
    assert taken is not None, f"{policy} took none of {list(costs)}"
    cost_s = costs[taken.instance_id]
    return Regret(phase, policy, cost_s, cost_s - min(costs.values()))
