"""How near the newest placements came to the fewest instances: the log's decisions against the program.

They count as one heartbeat's (Aladdin, 4.2): all had come when the oldest of them was placed, and nothing
ended meanwhile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scheduler.decision_log import Choice, Decision
from scheduler.policy.best_fit import Growth
from scheduler.policy.coupling import STAYS
from services.explaining.exact_placement import ExactPlacement, Worker, place_exactly


@dataclass(frozen=True, slots=True)
class Exactness:
    """Of ``requests`` placements. ``used``: decode instances that had something to do after them;
    ``overfull``: placements that broke what is promised, as nobody could keep it. ``exact``: None where
    no placement keeps every promise."""

    requests: int
    policy: str
    instances: int
    used: int
    overfull: int
    exact: ExactPlacement | None


def compare_exactly(decisions: Sequence[Decision]) -> Exactness | None:
    """``decisions``: the newest first, of one scheduler. None where none of them chose a decode instance."""
    placed = [
        (decision, choice)
        for decision in reversed(decisions)
        for choice in decision.choices[-1:]
        if choice.loads and choice.taken is not None
    ]
    if not placed:
        return None
    first = placed[0][1]
    arrivals: list[Growth] = [
        (float(decision.prompt_tokens), max(1.0, decision.predicted_tokens - decision.drawn_tokens))
        for decision, _ in placed
    ]
    tpot_s = min(choice.tpot_s for _, choice in placed if choice.tpot_s is not None)
    busy = {load.instance_id for load in first.loads if load.requests}
    return Exactness(
        requests=len(placed),
        policy=first.policy,
        instances=len(first.loads),
        used=len(busy | {choice.taken for _, choice in placed}),
        overfull=sum(_is_overfull(choice) for _, choice in placed),
        exact=place_exactly([Worker(load) for load in first.loads], arrivals, tpot_s),
    )


def _is_overfull(choice: Choice) -> bool:
    """What it says of whom it took is a constraint, or that no KV needs to move."""
    return any(
        each.instance_id == choice.taken and each.note not in (None, STAYS) for each in choice.candidates
    )


def describe_each(decisions: Mapping[str, Sequence[Decision]]) -> list[str]:
    """A line a scheduler: each placed by what it knew, and took nobody for what another one placed.
    ``decisions``: by scheduler, the newest first; those that made none are left out."""
    made = {scheduler: each for scheduler, each in decisions.items() if each}
    if len(made) < 2:
        return [describe_exactness(each) for each in made.values()]
    return [f"{scheduler}: {describe_exactness(each)}" for scheduler, each in sorted(made.items())]


def describe_exactness(decisions: Sequence[Decision]) -> str:
    """Of one scheduler."""
    found = compare_exactly(decisions)
    if found is None:
        return "exact: no decode instance was chosen"
    said = (
        f"exact: after the newest {found.requests} placements {found.policy} had {found.used} of"
        f" {found.instances} decode instances in use"
    )
    if found.overfull:
        said += f", {found.overfull} placements broke a constraint"
    if found.exact is None:
        return f"{said}; no placement keeps every constraint"
    proof = "the fewest possible" if found.exact.is_proved else "time was up"
    return f"{said}; {found.exact.used} would have done ({proof})"
