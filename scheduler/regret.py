"""What the rules that were not asked would have cost, and how right predictions were: sums over decisions.

A sample of decisions is judged (``scheduler.policy.shadow``), as many as a share of one core's time allows:
whoever drives this says how long each took, and asks before the next. Nothing here changes a decision.
"""

from dataclasses import dataclass, field
from typing import Self

import msgspec

from common.messages import Phase
from scheduler.decision_log import Decision
from scheduler.policy.shadow import Look, Regret, judge_policies

MOST_SAVED_S = 0.02
"""Of time that was not used: what was idle for an hour is not judged for minutes then."""


@dataclass(slots=True)
class TimeBudget:
    """``share`` of one core. A single judgement may overdraw it, which is then waited for."""

    share: float
    _credit_s: float = 0.0
    _seen_s: float | None = None

    def may_spend(self, now: float) -> bool:
        earned_s = 0.0 if self._seen_s is None else self.share * (now - self._seen_s)
        self._seen_s = now
        self._credit_s = min(MOST_SAVED_S, self._credit_s + earned_s)
        return self._credit_s > 0.0

    def spend(self, seconds: float) -> None:
        self._credit_s -= seconds


class Totals(msgspec.Struct, frozen=True):
    """Numbers that add up, of what its texts name."""

    def plus(self, other: Self) -> Self:
        """Of the same name."""
        added = {
            name: value + getattr(other, name)
            for name in self.__struct_fields__
            if not isinstance(value := getattr(self, name), str)
        }
        return msgspec.structs.replace(self, **added)


class PolicyRegret(Totals, frozen=True):
    """Sums over the ``decisions`` that were judged, in predicted seconds to the first token (prefill) or per
    output token (decode). ``best``: how often nobody's choice would have been better."""

    phase: Phase
    policy: str
    decisions: int = 0
    best: int = 0
    cost_s: float = 0.0
    regret_s: float = 0.0


class Hindsight(Totals, frozen=True):
    """Sums over ``requests`` that ended by themselves where they were first placed: what was predicted of the
    choice that was taken, what their clients saw, and by how much the one missed the other."""

    phase: Phase
    requests: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    error_s: float = 0.0


class RegretReport(msgspec.Struct, frozen=True):
    """What ``/regret`` answers. ``prefill_policy`` and ``decode_policy`` are those that decide. ``spent_s``:
    CPU time that judging took since the scheduler began."""

    prefill_policy: str
    decode_policy: str
    spent_s: float
    policies: list[PolicyRegret]
    hindsight: list[Hindsight]


@dataclass(slots=True)
class RegretLog:
    budget: TimeBudget
    spent_s: float = 0.0
    policies: dict[tuple[Phase, str], PolicyRegret] = field(default_factory=dict)
    hindsight: dict[Phase, Hindsight] = field(default_factory=dict)

    def judge(self, look: Look) -> list[Regret]:
        regrets = judge_policies(look)
        for each in regrets:
            key = each.phase, each.policy
            best = int(each.regret_s <= 0.0)
            one = PolicyRegret(each.phase, each.policy, 1, best, each.cost_s, each.regret_s)
            self.policies[key] = one if key not in self.policies else self.policies[key].plus(one)
        return regrets

    def spend(self, seconds: float) -> None:
        """CPU time of the last judgement."""
        self.budget.spend(seconds)
        self.spent_s += seconds

    def compare(self, decision: Decision) -> None:
        """One whose request has ended. Of a later attempt the first token came long before, and of one that
        was moved as it ran most of its tokens came of where it had been."""
        if decision.attempt != 0:
            return
        measured = {"prefill": decision.ttft_s, "decode": decision.tpot_s}
        for choice in decision.choices:
            measured_s, predicted_s = measured[choice.phase], choice.predicted_s
            is_moved = choice.phase == "decode" and decision.drawn_tokens > 1
            if measured_s is None or predicted_s is None or is_moved:
                continue
            known = self.hindsight.get(choice.phase) or Hindsight(choice.phase)
            self.hindsight[choice.phase] = Hindsight(
                choice.phase,
                known.requests + 1,
                known.predicted_s + predicted_s,
                known.measured_s + measured_s,
                known.error_s + abs(measured_s - predicted_s),
            )

    def report(self, prefill_policy: str, decode_policy: str) -> RegretReport:
        return RegretReport(
            prefill_policy,
            decode_policy,
            self.spent_s,
            list(self.policies.values()),
            list(self.hindsight.values()),
        )
