"""`lamella profile`: measures a real model here, and instances find what it wrote."""

import asyncio
import itertools
import json
import shutil
from pathlib import Path

import msgspec
import pytest

from common.config import Config, InstanceConfig, ModelConfig
from common.errors import ConfigError
from common.performance import DEFAULT_CHUNK_TOKENS, DEFAULT_LAYERWISE_MIN_TOKENS, step_features
from common.profile import Profile, link_of, machine_name, profile_path, read_profile, write_profile
from services.hosts.engines import Engine, load_engine
from services.profiling.hand_over_times import times_of
from services.profiling.passes import (
    BATCHES,
    BEFORES,
    CHUNKS,
    CONTEXTS,
    FEW,
    RESTS,
    larger_chunks,
    larger_steps,
    spread,
)
from services.profiling.profiler import fit, held_out_error, measure_profile, rows_of
from tests.common.model.conftest import MakeTiny


@pytest.fixture(scope="module")
def config(tiny: MakeTiny, tmp_path_factory: pytest.TempPathFactory) -> Config:
    cache = tmp_path_factory.mktemp("cache")
    model = ModelConfig(
        directory=tiny("llama").directory, cache_directory=cache, dtype="fp32", kernels="torch"
    )
    return Config(model=model, instance=InstanceConfig(kv_bytes=8 << 20, block_size=16, role="decode"))


@pytest.fixture(scope="module")
def profile(config: Config) -> Profile:
    assert config.model.directory is not None
    seen: list[int] = []
    found = asyncio.run(
        measure_profile(config, config.model.directory, 2, lambda done, rounds: seen.append(done))
    )
    assert seen == [0, 1, 2]
    return found


def test_every_case_that_fits_is_measured_and_the_laws_come_from_them(profile: Profile) -> None:
    chunks = [tokens for _, tokens, _ in profile.chunk_s]
    assert {*FEW} < {*chunks} <= {*FEW, *CHUNKS, *RESTS}
    assert profile.chunk_time.samples == 2 * len([tokens for tokens in chunks if tokens not in FEW])
    assert all(seconds > 0 for *_, seconds in (*profile.chunk_s, *profile.step_s))
    assert all(case.seconds > 0 for case in profile.shared_s)
    assert profile.saturation_tokens in {tokens for before, tokens, _ in profile.chunk_s if before == 0}
    assert profile.chunk_time.seconds((0.1, 0.005, 1.0)) > 0
    assert profile.probe_s is not None
    assert 0 < profile.probe_s < 60
    assert profile.weight_bytes == 4
    assert 0 <= profile.step_held_out_error < float("inf")
    assert profile.shared_s
    cases = len(profile.chunk_s) + len(profile.step_s) + len(profile.shared_s)
    assert len([*rows_of(profile)]) == cases


@pytest.mark.parametrize(("pass_s", "are_larger"), [(0.1, True), (0.3, False)])
def test_larger_passes_are_measured_where_none_takes_long(
    config: Config, tmp_path: Path, pass_s: float, are_larger: bool
) -> None:
    assert config.model.directory is not None
    directory = tmp_path / "long"
    shutil.copytree(config.model.directory, directory)
    spec = json.loads((directory / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (directory / "config.json").write_text(json.dumps(spec))
    model = msgspec.structs.replace(config.model, directory=directory)
    instance = InstanceConfig(kv_bytes=4 << 20, block_size=16, role="decode")
    ticks = itertools.count()
    found = asyncio.run(
        measure_profile(
            Config(model=model, instance=instance),
            directory,
            1,
            lambda done, rounds: None,
            lambda: pass_s * next(ticks),
        )
    )
    chunks = {(before, tokens) for before, tokens, _ in found.chunk_s}
    steps = {(batch, context) for batch, context, _ in found.step_s}
    assert {(0, 2048), (1024, 2048)} <= chunks or not are_larger
    assert {(256, 32), (1, 2048)} <= steps or not are_larger
    assert (max(tokens for _, tokens in chunks) > CHUNKS[-1]) is are_larger
    assert (max(batch for batch, _ in steps) > BATCHES[-1]) is are_larger
    assert (max(context for _, context in steps) > CONTEXTS[-1]) is are_larger
    assert [tokens for _, tokens, _ in found.chunk_s] == sorted(tokens for _, tokens, _ in found.chunk_s)
    assert found.saturation_tokens in {tokens for _, tokens in chunks}


def test_what_follows_the_largest_ends_somewhere() -> None:
    waiting, seen = [(BEFORES[-1], CHUNKS[-1])], set[tuple[int, int]]()
    while waiting:
        case = waiting.pop()
        seen.add(case)
        waiting += [larger for larger in larger_chunks(case) if larger not in seen]
    assert {before for before, _ in seen} == {1024, 4096, 16384}
    assert {tokens for _, tokens in seen} == {1024, 2048, 4096, 8192}
    assert [*larger_chunks((0, 45))] == [*larger_chunks((256, 512))] == [*larger_steps((64, 512))] == []
    assert {*larger_steps((128, 1024))} == {(256, 1024), (128, 2048)}
    assert [*larger_steps((512, 16384))] == []


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 32])
def test_a_batch_s_contexts_differ_about_their_mean(batch: int) -> None:
    contexts = spread(batch, 128)
    assert len(contexts) == batch
    assert sum(contexts) == 128 * batch
    assert contexts == sorted(contexts)
    assert min(contexts) >= 1
    assert max(contexts) > 1.5 * 128 or batch == 1


def test_an_instance_takes_the_profiles_chunk_size_unless_it_is_told_one(
    config: Config, profile: Profile
) -> None:
    directory = config.model.directory
    assert directory is not None
    path = profile_path(config.model, directory, "float32")
    assert read_profile(path) is None

    async def chunk_tokens() -> int:
        return (await loaded(config, directory)).chunk_tokens

    assert asyncio.run(chunk_tokens()) == DEFAULT_CHUNK_TOKENS
    write_profile(path, msgspec.structs.replace(profile, saturation_tokens=77))
    assert read_profile(path) == msgspec.structs.replace(profile, saturation_tokens=77)
    assert asyncio.run(chunk_tokens()) == 77
    other = msgspec.structs.replace(config.model, dtype="bf16", weights="int8")
    assert profile_path(other, directory, "float32") != path
    on = {profile_path(config.model, directory, "float32", name) for name in ("A100", "H100", None)}
    assert len(on) == 3
    assert path in on
    path.write_text("{}")
    assert read_profile(path) is None


async def loaded(config: Config, directory: Path) -> Engine:
    engine = await load_engine(config, directory)
    engine.thread.close()
    return engine


@pytest.mark.parametrize(
    ("measured", "taken"), [(None, DEFAULT_LAYERWISE_MIN_TOKENS), ((1.0, 0.5), 99), ((0.5, 1.0), None)]
)
def test_an_instance_hands_over_layer_by_layer_from_where_that_was_better_over_its_link(
    config: Config, profile: Profile, measured: tuple[float, float] | None, taken: int | None
) -> None:
    """``taken`` None: no prompt is as long."""
    directory = config.model.directory
    assert directory is not None
    times = None if measured is None else times_of({99: [[each] for each in measured]}, config.transfer)
    path = profile_path(config.model, directory, "float32")
    write_profile(path, msgspec.structs.replace(profile, hand_over=times))
    engine = asyncio.run(loaded(config, directory))
    assert engine.layerwise_min_tokens == (taken or engine.context_length + 1)
    slow = msgspec.structs.replace(config.transfer, emulated_bandwidth_bytes_per_s=1e6)
    assert link_of(slow) != link_of(config.transfer)
    engine = asyncio.run(loaded(msgspec.structs.replace(config, transfer=slow), directory))
    assert engine.layerwise_min_tokens == DEFAULT_LAYERWISE_MIN_TOKENS


def test_a_case_is_predicted_by_the_others() -> None:
    def law(case: tuple[int, int]) -> float:
        return 0.02 + 0.001 * case[0] + 2e-6 * case[0] * case[1]

    def features(case: tuple[int, int]) -> tuple[float, ...]:
        return step_features(case[0], case[0] * case[1])

    cases = {(batch, context): [law((batch, context))] for batch in (1, 4, 16, 32) for context in (100, 1000)}
    assert held_out_error(cases, features) < 0.03
    assert fit(cases, features).coefficients == pytest.approx([2e-3, 1e-3, 0.02], rel=0.05)


def test_a_pool_that_holds_no_case_is_named(config: Config) -> None:
    assert config.model.directory is not None
    small = msgspec.structs.replace(config, instance=InstanceConfig(kv_bytes=1 << 10, block_size=16))
    with pytest.raises(ConfigError, match=r"instance\.kv_bytes"):
        asyncio.run(measure_profile(small, config.model.directory, 1, lambda done, rounds: None))


def test_a_machine_is_named_by_its_processor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: Fast CPU 9\n")
    assert machine_name(cpuinfo=cpuinfo).endswith(" x Fast CPU 9")
    assert machine_name("Fast GPU 7", cpuinfo).startswith("Fast GPU 7, ")
    assert machine_name(cpuinfo=tmp_path / "none").endswith(" x CPU")
