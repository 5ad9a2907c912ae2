"""Rates that are shares of what a mesh serves."""

from pathlib import Path

import msgspec
import pytest

from common.errors import ConfigError
from services.compare.capacity import CAPACITY_ROUND, GOAL, Rates, capacity_of
from services.compare.comparison import Candidate
from services.compare.records import RunRecord
from services.compare.simulated import Simulation
from services.compare.simulated_mesh import Overhead
from services.simulator.metrics import measure
from tests.services.compare.test_simulated import ALONE, BUSY, COMPARISON, SPLIT, TRUE, live

SHARED = msgspec.structs.replace(BUSY, rate_per_s=None, capacity_share=0.5)
SHARES = msgspec.structs.replace(COMPARISON, workload=(ALONE, SHARED), capacity_requests=100)


def rates_in(folder: Path, told: list[str] | None = None) -> Rates:
    return Rates(SHARES, folder / "rates.jsonl", (told if told is not None else []).append)


def shared(candidate: Candidate, rates: Rates, records: list[RunRecord]) -> float:
    return rates.rate_per_s(candidate, SHARED, records)


def test_a_mesh_s_capacity_is_the_highest_rate_at_which_it_keeps_what_is_promised() -> None:
    capacity_per_s = capacity_of(SHARES, SPLIT, SHARED, TRUE)

    def attained(rate_per_s: float) -> float:
        many = msgspec.structs.replace(SHARED, requests=SHARES.capacity_requests)
        cluster = Simulation(SHARES).simulate(SPLIT, many, rate_per_s, CAPACITY_ROUND, TRUE)
        attainment = measure(cluster, SHARED.objectives).attainment
        assert attainment is not None
        return attainment.share

    assert attained(capacity_per_s) >= GOAL
    assert attained(1.3 * capacity_per_s) < GOAL


def test_a_share_is_of_what_a_mesh_serves_with_all_that_its_own_runs_say(tmp_path: Path) -> None:
    told: list[str] = []
    rate_per_s = shared(SPLIT, rates_in(tmp_path, told), [live(ALONE, TRUE)])
    slower = live(ALONE, Overhead(pass_s=0.009, hop_s=0.002))
    (tmp_path / "slower").mkdir()
    assert shared(SPLIT, rates_in(tmp_path / "slower"), [slower]) < 0.97 * rate_per_s
    assert rate_per_s == pytest.approx(capacity_of(SHARES, SPLIT, SHARED, TRUE) / 2, rel=0.1)
    assert told[-1].endswith(f"hpld comes at {rate_per_s:g}/s, for {SHARED.requests / rate_per_s:.0f} s")


def test_a_rate_is_found_once(tmp_path: Path) -> None:
    found = shared(SPLIT, rates_in(tmp_path), [live(ALONE, TRUE)])
    told: list[str] = []
    again = rates_in(tmp_path, told)
    assert again.known_rate(SPLIT, SHARED) == found
    assert shared(SPLIT, again, []) == found
    assert not told
    other = msgspec.structs.replace(SHARES, seed=7)
    with pytest.raises(ConfigError, match="line 1 is of another comparison"):
        Rates(other, tmp_path / "rates.jsonl", told.append)


def test_what_is_fitted_to_comes_at_a_share_of_what_the_bare_model_serves(tmp_path: Path) -> None:
    first = msgspec.structs.replace(ALONE, rate_per_s=None, capacity_share=0.05)
    comparison = msgspec.structs.replace(SHARES, workload=(first, SHARED))
    rates = Rates(comparison, tmp_path / "rates.jsonl", lambda line: None)
    bare_per_s = capacity_of(comparison, SPLIT, first, Overhead())
    assert rates.rate_per_s(SPLIT, first, []) == pytest.approx(0.05 * bare_per_s, rel=0.01)
    with pytest.raises(ConfigError, match=r"calibration = \['alone'\]: must name workloads"):
        rates.rate_per_s(SPLIT, SHARED, [])


def test_a_configuration_s_own_rate_is_no_share(tmp_path: Path) -> None:
    own = msgspec.structs.replace(SPLIT, rates_per_s={"hpld": 0.25})
    assert shared(own, rates_in(tmp_path), []) == 0.25
    assert not (tmp_path / "rates.jsonl").exists()


def test_a_workload_that_no_rate_can_please_is_refused(tmp_path: Path) -> None:
    hopeless = msgspec.structs.replace(SHARED, tpot_s=0.001)
    comparison = msgspec.structs.replace(SHARES, workload=(ALONE, hopeless), capacity_requests=8)
    rates = Rates(comparison, tmp_path / "rates.jsonl", lambda line: None)
    said = r"workload.capacity_share = 0.5: is of nothing: by simulation split serves none of hpld"
    with pytest.raises(ConfigError, match=said):
        rates.rate_per_s(SPLIT, hopeless, [live(ALONE, TRUE)])
