"""Vidur-Search where the best alone is asked for, against looking at all, in worlds whose capacities are
known."""

from collections import Counter
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.latency import ServiceObjectives
from services.planner.candidates import InstanceKind
from services.planner.checkpoint import Checkpoint
from services.planner.driver import Here, drive
from services.planner.probes import Point, Probe
from services.planner.samples import Sample
from services.planner.vidur_search import DELAY_S, VidurBest, search_best, within
from tests.services.planner.worlds import CATALOGUE, Capacities, bounds_in, kind_of, point

OBJECTIVES = ServiceObjectives(ttft_s=2.0, tbt_s=0.2)
SHORT, LONG = Sample(5_000, 0.5), Sample(5_000, 1.0)
HALF = 6
KINDS = [
    msgspec.structs.replace(kind_of("mixed", device), chunk_tokens=tokens)
    for device in ("a100", "h100")
    for tokens in range(512, 512 + 2 * HALF)
]
ROOM, TIGHT = 0.15, 0.25
"""Gaps at the capacity, s: those of the second kind keep the objective up to four fifths of it."""


def search_in(
    capacities: Capacities, gaps_s: Mapping[InstanceKind, float]
) -> tuple[VidurBest, Counter[InstanceKind]]:
    """What it found, and how often each was run. Queues are short up to the capacity, and gaps grow with the
    load."""
    runs: Counter[InstanceKind] = Counter()

    def answer(probe: Probe) -> Point:
        kind = probe.pools[0].kind
        runs[kind] += 1
        load = probe.rate_per_s / capacities[kind]
        gap_s = gaps_s[kind] * load
        waited_s = 0.1 if load <= 1 else 2 * DELAY_S
        return msgspec.structs.replace(point(), queue_p99_s=waited_s, tbt_s=(gap_s,) * 4)

    search = search_best(tuple(capacities), bounds_in(capacities), CATALOGUE, OBJECTIVES, SHORT, LONG)
    with Checkpoint(None) as kept:
        return drive(search, Here(answer), kept, b""), runs


@given(
    st.lists(st.floats(1.0, 20.0), min_size=len(KINDS), max_size=len(KINDS)),
    st.lists(st.sampled_from([ROOM, TIGHT]), min_size=len(KINDS), max_size=len(KINDS)),
)
def test_the_best_is_what_looking_at_all_finds(rates: list[float], gaps: list[float]) -> None:
    capacities, gaps_s = dict(zip(KINDS, rates, strict=True)), dict(zip(KINDS, gaps, strict=True))
    found, _ = search_in(capacities, gaps_s)
    values = [
        3600 * capacities[kind] * min(1.0, 0.2 / gaps_s[kind]) / CATALOGUE[kind.device].price_usd_h
        for kind in KINDS
    ]
    # The bisections stop within their tolerances.
    assert max(values) / 1.12 <= found.points[0].requests_per_usd <= max(values) * (1 + 1e-9)
    assert within(found.points, OBJECTIVES) == list(found.points)


def test_those_that_cannot_be_the_best_take_one_run_or_none() -> None:
    cheap, dear = KINDS[: 2 * HALF], KINDS[2 * HALF :]
    first, others = cheap[:HALF], cheap[HALF:]
    # By their bounds the others might be the best, and the dear ones might not.
    capacities = dict.fromkeys(first, 10.0) | dict.fromkeys(others, 8.0) | dict.fromkeys(dear, 15.0)
    found, runs = search_in(capacities, dict.fromkeys(KINDS, ROOM))
    assert found.points[0].kind in first
    assert {runs[kind] for kind in others} == {1}
    assert all(runs[kind] > 1 for kind in first)
    assert not any(runs[kind] for kind in dear)
    assert (found.kinds, found.simulated) == (len(KINDS), len(cheap))


def test_a_rate_at_which_an_objective_is_missed_is_not_served() -> None:
    better, good = KINDS[:2]
    found, _ = search_in({better: 10.0, good: 8.5}, {better: TIGHT, good: ROOM})
    assert found.points[0].kind == good
    assert found.points[0].tbt_p99_s == pytest.approx(ROOM, rel=0.05)


def test_one_that_misses_an_objective_at_half_its_bound_is_run_once() -> None:
    slow, good = KINDS[:2]
    found, runs = search_in({slow: 10.0, good: 8.0}, {slow: 2 * TIGHT, good: ROOM})
    assert [each.kind for each in found.points] == [good]
    assert runs[slow] == 1
