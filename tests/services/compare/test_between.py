"""A profile's passes between runs: real passes of a small model."""

import asyncio
import os
from itertools import chain
from pathlib import Path

import msgspec
import pytest

from common.config_file import config_from_tree
from common.errors import ConfigError
from common.profile import (
    Contention,
    PassTime,
    Profile,
    profile_path,
    read_profile,
    write_profile,
)
from services.compare import between
from services.compare.between import (
    PARTS,
    PASSES_FILE,
    TakenPart,
    _part_paces,
    _run_paces,
    bursts_in,
    pace_change_in,
    passes_between,
    read_between,
)
from services.compare.comparison import Comparison
from services.compare.paces import LEAST_RUNS, with_looks
from services.compare.records import RunKey, keep, read_kept
from services.compare.simulated import Simulation
from services.compare.simulated_mesh import Overhead, simulated_of
from services.profiling.contention import BesideOthers, ContendedPass, fit_contention
from services.profiling.measured import cases_of
from services.profiling.passes import Shared, as_chunk
from services.profiling.profiler import measure_profile
from services.simulator.host_config import HostConfig
from services.simulator.metrics import measure
from tests.common.model.conftest import MakeTiny
from tests.services.compare.test_simulated import ALONE, COMPARISON, SPLIT, TRUE, live

RUN: RunKey = (0, "alone", "split")
AGAIN: RunKey = (1, "alone", "split")
CONTENTION = Contention(0.00002, 0.0003)


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


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """For an instance and one beside it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


@pytest.fixture(scope="module")
def base(comparison: Comparison) -> Profile:
    """What its instances took, but for steps: of half a second."""
    config = config_from_tree(comparison.settings)
    assert config.model.directory is not None
    found = asyncio.run(measure_profile(config, config.model.directory, 1, lambda done, rounds: None))
    slow = msgspec.structs.replace(
        found,
        saturation_tokens=77,
        look_s=0.5,
        key_tile=8,
        contention=CONTENTION,
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
    comparison: Comparison, base: Profile, cores: None, tmp_path: Path
) -> None:
    comparison = msgspec.structs.replace(comparison, costs=("alone",))
    with passes_between(comparison, SPLIT, tmp_path) as take:
        first = parts(comparison, tmp_path)
        assert len(first) == PARTS, "all of them at first"
        for before in (RUN, RUN, AGAIN):
            take(before)
    with passes_between(comparison, SPLIT, tmp_path) as take:
        assert len(parts(comparison, tmp_path)) == PARTS + 3, "a run that goes on begins no new round"
        take(None)
    kept = parts(comparison, tmp_path)
    cases = [{(each.chunks, each.batch, each.context) for each in part.passes} for part in kept]
    assert cases[PARTS:] == cases[:4], "in turn"
    assert set().union(*cases[:PARTS]) == {*cases_of(base)}
    assert sum(map(len, cases[:PARTS])) == len(cases_of(base)), "each once"

    assert all(each.seconds > 0 for part in kept for each in part.passes)
    contended = [[*part.contended] for part in kept]
    assert all(contended)

    # What they took is this machine's affair: what is made of it is held to passes of known times.
    (tmp_path / PASSES_FILE).unlink()
    for part in kept:
        passes = tuple(msgspec.structs.replace(each, seconds=0.05) for each in part.passes)
        keep(tmp_path / PASSES_FILE, msgspec.structs.replace(part, passes=passes))
    between = read_between(comparison, [SPLIT], tmp_path, [])
    assert between["split"].paces.keys() == {RUN, AGAIN}
    found = read_profile(between["split"].profile)
    assert found is not None
    assert cases_of(found) == cases_of(base)
    assert (found.saturation_tokens, found.key_tile) == (77, 8)
    assert {seconds for *_, seconds in found.step_s} == {0.05}
    assert found.step_time.samples > len(found.step_s)
    assert found.look_s == 0.5
    assert found.contention == fit_contention([*chain.from_iterable(contended)]) != CONTENTION

    slow, fast = (
        measure(Simulation(comparison, known).simulate(SPLIT, ALONE, 0.5, 0, Overhead()), None).tpot
        for known in ({}, between)
    )
    assert slow is not None
    assert fast is not None
    assert slow.p50_s == pytest.approx(0.5, rel=0.05)
    assert fast.p50_s == pytest.approx(0.05, rel=0.05)


def test_a_run_s_pace_is_that_of_the_parts_near_it_and_not_of_a_burst() -> None:
    def part(seconds: float, before: RunKey | None) -> TakenPart:
        passes = (PassTime(((0, 64),), 0, 0, seconds), PassTime((), 4, 128, 2 * seconds))
        return TakenPart(fingerprint="", configuration="split", before=before, passes=passes)

    def paces(parts: list[TakenPart]) -> dict[RunKey, float]:
        times = {(((0, 64),), 0, 0): [0.9, 1.0, 1.1], ((), 4, 128): [2.0]}
        return _run_paces(parts, _part_paces(parts, times))

    # What was taken beside another process is as long as alone, at the machine's pace.
    seen = [part(1.0, None), part(1.1, RUN), part(9.0, AGAIN), part(1.3, None)]
    assert paces(seen) == {RUN: pytest.approx(1.2), AGAIN: pytest.approx(1.3)}
    assert paces([part(1.0, RUN), part(1.5, RUN)]) == {RUN: pytest.approx(1.25)}


def test_a_run_s_pace_is_that_of_passes_beside_another_process_too() -> None:
    """Each is as long as its own median says, which is another one alone and beside either kind."""

    def part(pace: float, beside: float, before: RunKey | None = None) -> TakenPart:
        passes = (PassTime(((0, 64),), 0, 0, pace),)
        contended = tuple(
            ContendedPass(
                ((0, tokens),), 0, 0, pace, tuple(BesideOthers(50, more * beside) for more in (1.1, 1.3))
            )
            for tokens in (16, 64)
        )
        return TakenPart(
            fingerprint="", configuration="split", before=before, passes=passes, contended=contended
        )

    usual = [part(1.0, 1.0)] * 6
    slow = [part(1.0, 1.05), part(1.0, 1.05, RUN), part(1.0, 1.05), part(1.0, 1.05)]
    times: dict[Shared, list[float]] = {(((0, 64),), 0, 0): [1.0]}
    for parts, pace in (([*usual, *slow], 1.05), ([*usual, part(1.02, 1.0, RUN)], 1.0)):
        assert _run_paces(parts, _part_paces(parts, times)) == {RUN: pytest.approx(pace)}


def test_how_far_the_machine_s_pace_changes_is_told_where_passes_were_taken_three_times() -> None:
    steady, wavers = [1.0] * (3 * PARTS), [1.0, 1.25] * (2 * PARTS)
    assert pace_change_in(steady) == 0.0
    # Up by a quarter fourteen times, down by a fifth thirteen times.
    assert pace_change_in(wavers) == pytest.approx(((14 * 0.25**2 + 13 * 0.2**2) / 27) ** 0.5)
    assert pace_change_in(steady[1:]) is None


def test_a_run_whose_looks_took_longer_is_slower(
    comparison: Comparison, base: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[RunKey] = [(number, "alone", "split") for number in range(LEAST_RUNS)]
    with passes_between(comparison, SPLIT, tmp_path) as take:
        for key in keys:
            take(key)
    record = msgspec.structs.replace(live(ALONE, TRUE), duration_s=10.0)
    records = [
        msgspec.structs.replace(
            record,
            round_number=number,
            instances_cpu_s=2.0 * number,
            looks_s=(0.007 if number == 2 else 0.005,) * 40,
        )
        for number, *_ in keys
    ]
    near, paces = (read_between(comparison, [SPLIT], tmp_path, some)["split"].paces for some in ([], records))
    assert near.keys() == paces.keys() == {*keys}
    assert paces == with_looks(near, records) != near

    # What passes near the runs took is this machine's affair.
    monkeypatch.setattr(between, "_part_paces", lambda parts, taken: [1.0] * len(parts))
    paces = read_between(comparison, [SPLIT], tmp_path, records)["split"].paces
    assert paces[keys[2]] > 1.05
    assert all(paces[key] < 1 for key in keys if key != keys[2])


def test_bursts_are_told_from_slow_minutes() -> None:
    """A burst makes one pass of a part longer, slow minutes all of it."""
    cases = [as_chunk((0, tokens)) for tokens in (16, 32, 64, 128, 256)]

    def part(*times: float) -> TakenPart:
        passes = tuple(
            PassTime(chunks, batch, context, seconds)
            for (chunks, batch, context), seconds in zip(cases, times, strict=True)
        )
        return TakenPart(fingerprint="", configuration="split", before=None, passes=passes)

    def bursts(*parts: TakenPart) -> float:
        taken = {case: [part.passes[number].seconds for part in parts] for number, case in enumerate(cases)}
        return bursts_in(parts, taken)

    usual, slow = part(1, 2, 3, 4, 5), part(1.3, 2.6, 3.9, 5.2, 6.5)
    assert bursts(usual, slow, usual, slow) == pytest.approx(1.0)
    assert bursts(usual, part(1, 2, 3, 4, 10), usual, part(1.5, 2, 3, 4, 5)) == pytest.approx(
        (1 + 1.2 + 1 + 1.1) / 4
    )
    assert bursts(usual) == 1.0


def test_simulated_runs_take_the_pace_that_was_found_for_them(
    comparison: Comparison, base: Profile, tmp_path: Path
) -> None:
    with passes_between(comparison, SPLIT, tmp_path) as take:
        take(RUN)
    assert not any(part.contended for part in parts(comparison, tmp_path)), "no host is simulated"
    between = read_between(comparison, [SPLIT], tmp_path, [])
    found = read_profile(between["split"].profile)
    assert found is not None
    assert found.contention == CONTENTION, "that of the profile there was"
    paced = {"split": between["split"]._replace(paces={RUN: 2.0})}
    record = live(ALONE, TRUE)
    assert record.key == RUN
    longer, as_taken = (
        Simulation(comparison, known).pairs([msgspec.structs.replace(record, looks_s=(9.0,))])[1][0].pace
        for known in (paced, {"split": between["split"]._replace(paces={})})
    )
    assert (longer, as_taken) == (2.0, 1.0)


def test_simulated_passes_take_longer_beside_one_another_by_the_profile(
    comparison: Comparison, base: Profile, tmp_path: Path
) -> None:
    host = HostConfig(cores=2, pass_s=0.001)
    found = simulated_of(comparison, SPLIT, Overhead(host=host, pace=2.0)).host
    assert found == msgspec.structs.replace(host, beside_s_per_rate=0.00008, beside_share=0.0003), (
        "fewer passes, each dearer"
    )
    path = tmp_path / "unknown.json"
    write_profile(path, msgspec.structs.replace(base, contention=None))
    assert simulated_of(comparison, SPLIT, Overhead(host=host), path).host == host


def test_a_folder_that_began_with_one_profile_goes_on_with_no_other(
    comparison: Comparison, base: Profile, tmp_path: Path
) -> None:
    with passes_between(comparison, SPLIT, tmp_path):
        pass
    write_profile(cache_file(comparison), msgspec.structs.replace(base, saturation_tokens=99))
    try:
        with (
            pytest.raises(ConfigError, match=r"--output = .*began with another profile of split"),
            passes_between(comparison, SPLIT, tmp_path),
        ):
            pass
    finally:
        write_profile(cache_file(comparison), base)


def test_runs_without_such_passes_are_not_simulated_with_them(
    comparison: Comparison, base: Profile, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"profiled_between = true: but split was run without"):
        read_between(comparison, [SPLIT], tmp_path, [])
    with passes_between(comparison, SPLIT, tmp_path):
        pass
    without = msgspec.structs.replace(comparison, profiled_between=False)
    assert read_between(without, [SPLIT], tmp_path, []) == {}
    assert read_between(comparison, [], tmp_path, []) == {}


def test_a_pool_without_room_for_a_pass_of_the_profile_is_refused(
    comparison: Comparison, base: Profile, tmp_path: Path
) -> None:
    small = {**comparison.settings, "instance": {"kv_bytes": 200_000, "block_size": 16}}
    with (
        pytest.raises(ConfigError, match=r"kv_bytes = 200000: has no room for every pass"),
        passes_between(msgspec.structs.replace(comparison, settings=small), SPLIT, tmp_path),
    ):
        pass


def test_nothing_is_taken_where_nothing_is_asked_or_no_model_computes(
    comparison: Comparison, tmp_path: Path
) -> None:
    for unasked in (
        msgspec.structs.replace(comparison, profiled_between=False),
        msgspec.structs.replace(COMPARISON, profiled_between=True),
    ):
        with passes_between(unasked, SPLIT, tmp_path) as take:
            take(None)
        assert read_between(unasked, [SPLIT], tmp_path, []) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_was_not_profiled_is_named(comparison: Comparison, tmp_path: Path) -> None:
    elsewhere = {**comparison.settings["model"], "cache_directory": str(tmp_path / "none")}
    unknown = msgspec.structs.replace(comparison, settings={**comparison.settings, "model": elsewhere})
    with (
        pytest.raises(ConfigError, match=r"was not profiled with these settings"),
        passes_between(unknown, SPLIT, tmp_path),
    ):
        pass
