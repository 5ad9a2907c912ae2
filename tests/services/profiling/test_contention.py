"""How much longer passes take beside another process's: a real one, of a small model."""

import asyncio
import multiprocessing
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from common.config import Config, InstanceConfig, ModelConfig
from common.profile import Contention
from services.hosts.engines import load_engine
from services.profiling import contention
from services.profiling.contention import (
    CASES,
    NEIGHBOURS,
    REST,
    BesideOthers,
    ContendedPass,
    ContentionWatch,
    Neighbour,
    NeighbourLost,
    fit_contention,
    has_neighbours,
    measure_contention,
    neighbour_of,
)
from services.profiling.pass_watch import PassWatch
from services.profiling.profiler import measure_profile
from tests.common.model.conftest import MakeTiny

ENDS_S = 60.0


@pytest.fixture(scope="module")
def config(tiny: MakeTiny, tmp_path_factory: pytest.TempPathFactory) -> Config:
    model = ModelConfig(
        directory=tiny("llama").directory,
        cache_directory=tmp_path_factory.mktemp("cache"),
        dtype="fp32",
        kernels="torch",
        threads=1,
    )
    return Config(model=model, instance=InstanceConfig(kv_bytes=8 << 20, block_size=16, role="decode"))


def directory_of(config: Config) -> Path:
    assert config.model.directory is not None
    return config.model.directory


def with_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))


def beside(passes_per_s: float, **took: float) -> list[ContendedPass]:
    """Chunks by how many milliseconds they take alone, and what they took beside such passes."""
    return [
        ContendedPass(((0, tokens),), 0, 0, alone_ms / 1e3, (BesideOthers(passes_per_s, seconds),))
        for tokens, (alone_ms, seconds) in enumerate((int(name[1:]), each) for name, each in took.items())
    ]


def test_what_is_the_same_of_all_passes_and_what_grows_with_them_are_told_apart() -> None:
    found = fit_contention(beside(50, _13=0.01552, _30=0.0332, _200=0.21))
    assert (50 * found.s_per_rate, found.share) == pytest.approx((0.002, 0.04))
    # What came out shorter takes no time from the others.
    found = fit_contention(beside(50, _20=0.0198, _100=0.097))
    assert (found.s_per_rate, found.share) == (0.0, 0.0)
    found = fit_contention(beside(50, _10=0.012, _100=0.1005))
    assert 50 * found.s_per_rate == pytest.approx(0.002, rel=0.05)
    assert found.share == 0.0


def test_passes_take_longer_by_how_many_a_second_the_other_one_computes_and_by_that_it_does() -> None:
    def took(alone_s: float, passes_per_s: float) -> BesideOthers:
        return BesideOthers(passes_per_s, 1.02 * alone_s + 0.00003 * passes_per_s)

    taken = [
        ContendedPass((), batch, 128, alone_s, tuple(took(alone_s, rate) for rate in rates))
        for batch, alone_s in ((1, 0.013), (16, 0.025), (64, 0.09))
        for rates in ((70.0, 20.0), (70.0, 20.0))
    ]
    burst = ContendedPass((), 1, 128, 0.013, (BesideOthers(60.0, 0.1), BesideOthers(12.5, 0.2)))
    found = fit_contention([*taken, burst])
    assert (found.s_per_rate, found.share) == pytest.approx((0.00003, 0.02))


@pytest.mark.parametrize(
    ("cores", "threads", "engine", "device", "expected"),
    [
        (2, 1, "model", "cpu", True),
        (1, 1, "model", "cpu", False),
        (4, 2, "model", "cpu", True),
        (2, 2, "model", "cpu", False),
        (2, None, "model", "cpu", False),
        (2, 1, "emulated", "cpu", False),
        (2, 1, "model", "cuda", False),
    ],
)
def test_there_are_neighbours_where_another_instance_has_cores_of_its_own(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    threads: int | None,
    engine: str,
    device: str,
    expected: bool,
) -> None:
    with_cores(monkeypatch, cores)
    model = msgspec.structs.replace(config.model, threads=threads, device=device)
    instance = msgspec.structs.replace(config.instance, engine=engine)
    assert has_neighbours(Config(model=model, instance=instance)) is expected


def test_a_profile_says_what_passes_take_beside_a_process_that_has_ended_then(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cores(monkeypatch, 2)
    seen: list[tuple[int, int]] = []
    found = asyncio.run(
        measure_profile(config, directory_of(config), 2, lambda done, of: seen.append((done, of)))
    )
    assert seen == [(done, 4) for done in range(5)]
    assert found.contention is not None
    assert 0 <= found.contention.s_per_rate < 1
    assert 0 <= found.contention.share < 100
    assert not multiprocessing.active_children()


def test_passes_are_timed_while_the_other_process_does_what_it_was_told(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that says a pass took as long as the other process lets it."""
    told: list[bytes] = []
    tell = Neighbour.tell

    def tell_and_note(neighbour: Neighbour, what: bytes) -> bool:
        done = tell(neighbour, what)
        told.append(what)
        return done

    monkeypatch.setattr(Neighbour, "tell", tell_and_note)
    times = {b"rest": 0.02, b"quick": 0.024, b"slow": 0.021}
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += times[told[-1]] / 2 if told else 0.01
        return now_s

    async def measured() -> list[ContendedPass]:
        directory = directory_of(config)
        engine = await load_engine(config, directory)
        try:
            with neighbour_of(config, directory) as neighbour:
                watch = ContentionWatch(PassWatch(engine, clock), neighbour)
                assert await watch.warm_up()
                return await watch.take()
        finally:
            engine.thread.close()

    taken = asyncio.run(measured())
    assert told == [*NEIGHBOURS, REST, REST, *NEIGHBOURS, REST]
    for each in taken:
        assert each.alone_s == pytest.approx(0.01)
        seen = [*map(msgspec.structs.astuple, each.beside)]
        assert seen == [pytest.approx((100.0, 0.012)), pytest.approx((100.0, 0.0105))]
    assert {(each.chunks, each.batch, each.context) for each in taken} < {*CASES}, "there is little room"


def test_all_that_a_neighbour_computes_is_timed_alone_too() -> None:
    assert {case for cases in NEIGHBOURS.values() for case in cases} <= {*CASES}


def test_a_process_that_was_lost_is_an_error_and_not_waited_for(config: Config) -> None:
    with neighbour_of(config, directory_of(config)) as neighbour:
        neighbour.tell(b"quick")
        [process] = multiprocessing.active_children()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(NeighbourLost, match="ended"):
            neighbour.tell(b"rest")
    assert not multiprocessing.active_children()


def test_who_has_no_room_for_what_it_is_told_rests_and_says_so(config: Config) -> None:
    """Of a context in which steps of some sequences are too long: beside nothing, nothing is measured."""
    short = msgspec.structs.replace(config.model, context_length=64)
    with neighbour_of(msgspec.structs.replace(config, model=short), directory_of(config)) as neighbour:
        assert [neighbour.tell(what) for what in (*NEIGHBOURS, REST)] == [False, True, True]

    async def measured() -> Contention | None:
        engine = await load_engine(config, directory_of(config))
        try:
            watch = PassWatch(engine, time.perf_counter)
            given = msgspec.structs.replace(config, model=short)
            return await measure_contention(watch, given, directory_of(config), 1, lambda done: None)
        finally:
            engine.thread.close()

    assert asyncio.run(measured()) is None


def test_who_fails_says_why_and_a_profile_goes_without(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nowhere = msgspec.structs.replace(config.model, directory=tmp_path)
    with (
        neighbour_of(msgspec.structs.replace(config, model=nowhere), tmp_path) as neighbour,
        pytest.raises(NeighbourLost, match=r"failed: .*config\.json"),
    ):
        neighbour.tell(REST)

    def lost(neighbour: Neighbour, what: bytes) -> bool:
        raise NeighbourLost("a process that computes beside this one ended")

    monkeypatch.setattr(Neighbour, "tell", lost)
    with_cores(monkeypatch, 2)
    said: list[str] = []
    found = asyncio.run(
        measure_profile(config, directory_of(config), 1, lambda done, of: None, tell=said.append)
    )
    assert found.contention is None
    assert found.step_s
    assert said == [
        "passes beside another process's were not measured: a process that computes beside this one ended"
    ]


def test_a_process_ends_with_the_one_that_began_it(config: Config) -> None:
    """However that ended: nothing tells it to."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(
        target=contention.compute_beside, args=(config, directory_of(config), there), daemon=True
    )
    process.start()
    there.close()
    Neighbour(here).tell(b"slow")
    here.close()
    began_s = time.monotonic()
    process.join(ENDS_S)
    assert process.exitcode == 0, f"it computes on after {time.monotonic() - began_s:.0f} s"
