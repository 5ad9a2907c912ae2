"""A profile's passes between runs: real passes of a small model."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from common.config_file import config_from_tree
from common.errors import ConfigError
from common.profile import Profile, profile_path, read_profile, write_profile
from services.compare.between import PARTS, PASSES_FILE, TakenPart, passes_between, profiles_between
from services.compare.comparison import Comparison
from services.compare.records import read_kept
from services.compare.simulated import Simulation
from services.compare.simulated_mesh import Overhead, pace_of
from services.profiling.measured import cases_of
from services.profiling.profiler import measure_profile
from services.simulator.metrics import measure
from tests.common.model.conftest import MakeTiny
from tests.services.compare.test_figures import run
from tests.services.compare.test_simulated import ALONE, COMPARISON, SPLIT


@pytest.fixture(scope="module")
def comparison(tiny: MakeTiny, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    model = {
        "directory": str(tiny("llama").directory),
        "cache_directory": str(tmp_path_factory.mktemp("cache")),
        "dtype": "fp32",
        "kernels": "torch",
        "threads": 1,
    }
    settings = {"model": model, "instance": {"kv_bytes": 8 << 20, "block_size": 16}}
    return msgspec.structs.replace(COMPARISON, settings=settings, profiled_between=True)


@pytest.fixture(scope="module")
def base(comparison: Comparison) -> Profile:
    """What its instances took: half a second is no pass of theirs."""
    config = config_from_tree(comparison.settings)
    assert config.model.directory is not None
    found = asyncio.run(measure_profile(config, config.model.directory, 1, lambda done, rounds: None))
    slow = msgspec.structs.replace(
        found,
        saturation_tokens=77,
        look_s=0.5,
        step_s=tuple((batch, context, 0.5) for batch, context, _ in found.step_s),
    )
    write_profile(cache_file(comparison), slow)
    return slow


def cache_file(comparison: Comparison) -> Path:
    model = config_from_tree(comparison.settings).model
    assert model.directory is not None
    return profile_path(model, model.directory, "float32")


def parts(comparison: Comparison, output: Path) -> list[TakenPart]:
    return read_kept(output / PASSES_FILE, TakenPart, comparison)


def test_passes_are_taken_in_parts_and_simulated_ones_take_their_times(
    comparison: Comparison, base: Profile, tmp_path: Path
) -> None:
    with passes_between(comparison, SPLIT, tmp_path) as take:
        first = parts(comparison, tmp_path)
        assert len(first) == PARTS, "all of them at first"
        for _ in range(3):
            take()
    # Another profile since then is not the one that its instances took.
    write_profile(cache_file(comparison), msgspec.structs.replace(base, saturation_tokens=99))
    try:
        with passes_between(comparison, SPLIT, tmp_path) as take:
            assert len(parts(comparison, tmp_path)) == PARTS + 3, "a run that goes on begins no new round"
            take()
    finally:
        write_profile(cache_file(comparison), base)
    kept = parts(comparison, tmp_path)
    cases = [{(each.chunks, each.batch, each.context) for each in part.passes} for part in kept]
    assert cases[PARTS:] == cases[:4], "in turn"
    assert set().union(*cases[:PARTS]) == {*cases_of(base)}
    assert sum(map(len, cases[:PARTS])) == len(cases_of(base)), "each once"
    assert all(part.looks_s and min(part.looks_s) > 0 for part in kept)

    profiles = profiles_between(comparison, tmp_path)
    found = read_profile(profiles["split"])
    assert found is not None
    assert cases_of(found) == cases_of(base)
    assert found.saturation_tokens == 77
    assert 0 < max(seconds for *_, seconds in found.step_s) < 0.5
    assert found.step_time.samples > len(found.step_s)
    assert found.look_s is not None
    assert found.look_s < 0.5

    record = msgspec.structs.replace(run("split", 0, 1.0, 1.0), looks_s=(2 * found.look_s,))
    assert pace_of(comparison, SPLIT, record, profiles["split"]) == pytest.approx(2.0)
    assert pace_of(comparison, SPLIT, record) == pytest.approx(4 * found.look_s)
    slow, fast = (
        measure(Simulation(comparison, known).simulate(SPLIT, ALONE, 0.5, 0, Overhead()), None).tpot
        for known in ({}, profiles)
    )
    assert slow is not None
    assert fast is not None
    assert slow.p50_s == pytest.approx(0.5, rel=0.05)
    assert fast.p50_s < 0.2


def test_too_few_runs_leave_the_profile_that_instances_took(
    comparison: Comparison, base: Profile, tmp_path: Path
) -> None:
    with passes_between(comparison, SPLIT, tmp_path):
        pass
    lines = (tmp_path / PASSES_FILE).read_bytes().splitlines(keepends=True)
    (tmp_path / PASSES_FILE).write_bytes(b"".join(lines[:-1]))
    assert profiles_between(comparison, tmp_path) == {}


def test_nothing_is_taken_where_nothing_is_asked_or_no_model_computes(
    comparison: Comparison, tmp_path: Path
) -> None:
    for unasked in (
        msgspec.structs.replace(comparison, profiled_between=False),
        msgspec.structs.replace(COMPARISON, profiled_between=True),
    ):
        with passes_between(unasked, SPLIT, tmp_path) as take:
            take()
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_was_not_profiled_is_named_before_anything_is_asked(
    comparison: Comparison, tmp_path: Path
) -> None:
    elsewhere = {**comparison.settings["model"], "cache_directory": str(tmp_path / "none")}
    unknown = msgspec.structs.replace(comparison, settings={**comparison.settings, "model": elsewhere})
    with (
        pytest.raises(ConfigError, match=r"was not profiled with these settings"),
        passes_between(unknown, SPLIT, tmp_path),
    ):
        pass
