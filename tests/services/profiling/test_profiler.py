"""`lamella profile`: measures a real model here, and instances find what it wrote."""

import asyncio
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import pytest

from common.config import Config, Dtype, InstanceConfig, ModelConfig
from common.errors import ConfigError
from common.laws import step_features
from common.model.attention_kernels import TILE_KEYS
from common.model.device import OutOfMemory
from common.model.precision import precision_of
from common.performance import DEFAULT_CHUNK_TOKENS, DEFAULT_LAYERWISE_MIN_TOKENS
from common.profile import Profile, link_of, machine_name, profile_path, read_profile, write_profile
from common.steps import Runner, SequenceStep
from services.hosts.engines import Engine, load_engine
from services.profiling import profiler
from services.profiling.hand_over_times import times_of
from services.profiling.measured import fit, held_out_error, rows_of
from services.profiling.passes import CHUNKS, FEW, LARGER_SHARED, RESTS, SHARED
from services.profiling.probe import Probe
from services.profiling.profiler import measure_profile
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
    assert profile.look_s is not None
    assert 0 < profile.look_s < 60
    assert profile.weight_bytes == 4
    assert profile.key_tile == 1, "in fp32"
    assert 0 <= profile.step_held_out_error < float("inf")
    assert profile.shared_s
    cases = len(profile.chunk_s) + len(profile.step_s) + len(profile.shared_s)
    assert len([*rows_of(profile)]) == cases


class Timed:
    """A clock by which a pass takes as long as ``seconds`` says, of its rows and what they attend to."""

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self._seconds = seconds
        self._now_s = 0.0
        self._due_s = 0.0
        self.seen: list[tuple[int, int]] = []

    def run(self, batch: Sequence[SequenceStep]) -> list[None]:
        rows = sum(len(step.token_ids) for step in batch)
        context = sum(step.start for step in batch)
        self.seen.append((rows, context))
        self._due_s = self._seconds(rows, context)
        return [None for _ in batch]

    def clock(self) -> float:
        self._now_s += self._due_s
        self._due_s = 0.0
        return self._now_s


def profiled_by(
    timed: Timed, config: Config, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Profile:
    """Of a model with a context of 4,096 tokens and a pool of as many."""
    longer = tmp_path / "long"
    shutil.copytree(directory, longer)
    spec = json.loads((longer / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (longer / "config.json").write_text(json.dumps(spec))
    model = msgspec.structs.replace(config.model, directory=longer)
    instance = InstanceConfig(kv_bytes=6 << 20, block_size=16, role="decode")

    async def load(config: Config, directory: Path) -> Engine:
        return replace(await load_engine(config, directory), runner=cast(Runner, timed))

    monkeypatch.setattr(profiler, "load_engine", load)
    made = Config(model=model, instance=instance)
    return asyncio.run(measure_profile(made, longer, 1, lambda done, rounds: None, timed.clock))


def test_looks_come_between_passes_and_the_pass_after_one_does_not_count(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config.model.directory is not None
    timed = Timed(lambda rows, context: 0.3)
    seen_before: list[int] = []

    def looks(probe: Probe, count: int) -> list[float]:
        seen_before.append(len(timed.seen))
        return [0.001, 0.002, 0.9][:count]

    monkeypatch.setattr(Probe, "looks", looks)
    found = profiled_by(timed, config, config.model.directory, tmp_path, monkeypatch)
    cases = len(found.chunk_s) + len(found.step_s) + len(found.shared_s)
    assert len(seen_before) == math.ceil(cases / profiler.LOOK_EVERY) > 1
    assert all(timed.seen[passes] == timed.seen[passes + 1] for passes in seen_before)
    assert found.look_s == 0.002


def test_larger_passes_are_measured_where_the_next_smaller_one_is_brief(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a millisecond a token: after 1,024 tokens no chunk is tried, but larger steps are."""
    assert config.model.directory is not None
    timed = Timed(lambda rows, context: 0.5e-3 * rows + 1e-5 * context)
    found = profiled_by(timed, config, config.model.directory, tmp_path, monkeypatch)
    chunks = {(before, tokens) for before, tokens, _ in found.chunk_s}
    steps = {(batch, context) for batch, context, _ in found.step_s}
    assert max(tokens for _, tokens in chunks) == 1024
    assert {tokens for before, tokens in chunks if before > 1024} == set()
    assert {(1, 2048), (2, 2048), (128, 32)} <= steps
    assert (256, 32) in steps, "128 rows take 0.1 s"
    assert (512, 32) not in steps, "and there is no room for their contexts"
    beyond = {case.chunks for case in found.shared_s} - {chunks for chunks, *_ in SHARED}
    assert beyond == {((0, 256),) * 4}, "a chunk of 512 is not brief"


def test_a_card_is_measured_until_it_is_busy(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 2,048 rows take as long as one: only from there on is it kept busy."""
    assert config.model.directory is not None
    timed = Timed(lambda rows, context: 0.01 * max(1.0, rows / 2048))
    found = profiled_by(timed, config, config.model.directory, tmp_path, monkeypatch)
    chunks = [(tokens, before) for before, tokens, _ in found.chunk_s]
    assert {(2048, 0), (4096, 0), (2048, 1024)} <= {*chunks}
    assert chunks == sorted(chunks)
    steps = [(batch, context) for batch, context, _ in found.step_s]
    assert steps == sorted(steps)
    assert found.saturation_tokens == 2048
    assert {case.chunks for case in found.shared_s} >= {case[0] for case in LARGER_SHARED[:3]}


def test_a_first_pass_that_was_cold_is_seen_again(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config.model.directory is not None
    seen: set[tuple[int, int]] = set()

    def seconds(rows: int, context: int) -> float:
        is_cold = (rows, context) not in seen
        seen.add((rows, context))
        return 1.0 if is_cold else 0.01

    found = profiled_by(Timed(seconds), config, config.model.directory, tmp_path, monkeypatch)
    assert (0, 4096) in {(before, tokens) for before, tokens, _ in found.chunk_s}


def test_a_pass_for_which_the_device_has_no_memory_is_left_out(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config.model.directory is not None

    def seconds(rows: int, context: int) -> float:
        if rows > 2048:
            raise OutOfMemory("CUDA out of memory")
        return 0.01

    found = profiled_by(Timed(seconds), config, config.model.directory, tmp_path, monkeypatch)
    assert max(tokens for _, tokens, _ in found.chunk_s) == 2048


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


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_an_engine_says_how_many_keys_its_chunks_attend_to_at_once(config: Config, dtype: Dtype) -> None:
    """Where bf16 is asked for and the processor has no products of it, it computes in fp32."""
    assert config.model.directory is not None
    model = msgspec.structs.replace(config.model, dtype=dtype)
    key_tile = TILE_KEYS if dtype == "bf16" and precision_of(model).compute == "bfloat16" else 1
    engine = asyncio.run(loaded(msgspec.structs.replace(config, model=model), config.model.directory))
    assert engine.key_tile == key_tile


def test_attention_with_a_softcap_is_computed_without_tiles(tiny: MakeTiny, config: Config) -> None:
    directory = tiny("gemma2").directory
    model = msgspec.structs.replace(config.model, directory=directory, dtype="bf16")
    engine = asyncio.run(loaded(msgspec.structs.replace(config, model=model), directory))
    assert engine.key_tile == 1


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
