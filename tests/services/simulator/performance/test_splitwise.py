"""Splitwise's model against the figures of its own simulator, and the corrected one beside it."""

from pathlib import Path

import pytest

from services.simulator.performance.files import PerformanceFileError
from services.simulator.performance.splitwise import (
    CorrectedSplitwiseModel,
    SplitwiseModel,
    SplitwiseProfile,
    read_splitwise,
)
from services.simulator.shape import PassShape
from tests.services.simulator.performance.conftest import (
    assert_more_takes_longer,
    assert_steps_are_their_passes,
    mean_error,
    write_csv,
)

CASES = ((128, 1), (512, 1), (2048, 1), (8192, 1), (512, 4), (512, 16), (512, 64))


def rows(**changed: object) -> list[dict[str, object]]:
    made = []
    for prompt, batch in CASES:
        tokens, context = prompt * batch, prompt + 64
        row: dict[str, object] = {
            "model": "m",
            "hardware": "h",
            "tensor_parallel": 8,
            "prompt_size": prompt,
            "batch_size": batch,
            "token_size": 128,
            "prompt_time": 20 + 0.1 * tokens + 1e-6 * prompt * tokens,
            "token_time": 30 + 0.1 * batch + 1e-4 * batch * context,
        }
        made.append({**row, **changed})
    return made


@pytest.fixture
def profile(tmp_path: Path) -> SplitwiseProfile:
    return read_splitwise(write_csv(tmp_path / "perf_model.csv", rows()), "m", "h", 8)


def published(shared: Path, model: str, hardware: str) -> SplitwiseProfile:
    return read_splitwise(shared / "data/splitwise/perf_model.csv", model, hardware, 8)


@pytest.mark.parametrize(
    ("model", "hardware", "prompt_ms", "token_ms"),
    [
        (
            "bloom-176b",
            "h100-80gb",
            {128: 48.3, 512: 76.1, 1024: 132.2, 2048: 252.0, 4096: 649.6, 8192: 1411.6},
            {1: 35.33, 64: 35.53, 512: 36.17},
        ),
        (
            "bloom-176b",
            "a100-80gb",
            {128: 79.7, 512: 174.4, 1024: 287.5, 2048: 536.1, 4096: 1332.6, 8192: 3591.5},
            {1: 47.52, 64: 47.56, 512: 49.31},
        ),
        ("llama2-70b", "h100-80gb", {1024: 77.7, 2048: 134.4}, {1: 31.47, 64: 30.68, 512: 30.56}),
        ("llama2-70b", "a100-80gb", {1024: 160.9, 2048: 282.7}, {1: 42.58, 64: 42.81, 512: 45.03}),
    ],
)
def test_it_says_what_their_simulator_says(
    shared_directory: Path,
    model: str,
    hardware: str,
    prompt_ms: dict[int, float],
    token_ms: dict[int, float],
) -> None:
    found = SplitwiseModel(published(shared_directory, model, hardware))
    assert {size: found.prompt_ms(size) for size in prompt_ms} == pytest.approx(prompt_ms, abs=0.051)
    assert {batch: found.token_ms(batch) for batch in token_ms} == pytest.approx(token_ms, abs=0.0051)


def test_an_iteration_is_prompts_decodes_or_a_tenth_longer_than_both_as_prompts(
    profile: SplitwiseProfile,
) -> None:
    model = SplitwiseModel(profile)
    assert model.pass_s(PassShape(((0, 300), (0, 724)))) == pytest.approx(model.prompt_ms(1024) / 1e3)
    assert model.pass_s(PassShape((), 7, 9999)) == pytest.approx(model.token_ms(7) / 1e3)
    both = PassShape(((0, 1000),), 24, 9999)
    assert model.pass_s(both) == pytest.approx(1.1 * model.prompt_ms(1024) / 1e3)


def test_beyond_its_rows_the_outermost_segments_go_on(profile: SplitwiseProfile) -> None:
    model = SplitwiseModel(profile)
    last = (model.prompt_ms(32_768) - model.prompt_ms(8192)) / (32_768 - 8192)
    assert model.prompt_ms(40_000) == pytest.approx(model.prompt_ms(32_768) + last * (40_000 - 32_768))
    first = (model.prompt_ms(512) - model.prompt_ms(128)) / (512 - 128)
    assert model.prompt_ms(1) == pytest.approx(model.prompt_ms(128) - 127 * first)


def test_the_corrected_one_knows_batch_and_context(profile: SplitwiseProfile) -> None:
    theirs, corrected = SplitwiseModel(profile), CorrectedSplitwiseModel(profile)
    step = PassShape((), 64, 64 * (512 + 64))
    assert corrected.pass_s(step) == pytest.approx((30 + 6.4 + 1e-4 * 64 * 576) / 1e3, rel=1e-3)
    assert theirs.pass_s(step) < 0.9 * corrected.pass_s(step)
    longer = PassShape((), 64, 64 * 4000)
    assert theirs.pass_s(longer) == theirs.pass_s(step)
    assert corrected.pass_s(longer) > 1.2 * corrected.pass_s(step)
    whole, short = (corrected.pass_s(PassShape(chunks)) for chunks in (((0, 8192),), ((0, 512),) * 16))
    assert whole > 1.02 * short


def test_both_hold_to_what_all_models_do(profile: SplitwiseProfile) -> None:
    assert_steps_are_their_passes(SplitwiseModel(profile))
    assert_steps_are_their_passes(CorrectedSplitwiseModel(profile))
    assert_more_takes_longer(CorrectedSplitwiseModel(profile))


def test_a_large_batch_of_bloom_takes_what_its_rows_say(shared_directory: Path) -> None:
    model = CorrectedSplitwiseModel(published(shared_directory, "bloom-176b", "h100-80gb"))
    assert model.pass_s(PassShape((), 1, 576)) == pytest.approx(0.0362, abs=2e-4)
    assert model.pass_s(PassShape((), 64, 64 * 576)) == pytest.approx(0.0638, abs=2e-4)
    assert_more_takes_longer(model)


def test_held_out_rows_are_predicted_within_three_percent(shared_directory: Path) -> None:
    kinds = [(model, hardware) for model in ("bloom-176b", "llama2-70b") for hardware in ("h100", "a100")]
    profiles = [published(shared_directory, model, f"{hardware}-80gb") for model, hardware in kinds]
    theirs = [error for profile in profiles for error in profile.held_out_published()]
    corrected = [error for profile in profiles for error in profile.held_out()]
    assert mean_error(theirs) < 0.03
    assert mean_error(corrected) < mean_error(theirs)


def test_what_breaks_a_rule_is_named(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "perf_model.csv", rows())
    with pytest.raises(PerformanceFileError, match="column hardware: has no row with 'b200'; has h"):
        read_splitwise(path, "m", "b200", 8)
    with pytest.raises(PerformanceFileError, match=r"column tensor_parallel: has no row with 4; has 8"):
        read_splitwise(path, "m", "h", 4)
    write_csv(path, rows(token_time=-1))
    with pytest.raises(PerformanceFileError, match="column token_time, row 2: '-1': must be a number over 0"):
        read_splitwise(path, "m", "h", 8)
    write_csv(path, rows(prompt_size=512, batch_size=1))
    with pytest.raises(PerformanceFileError, match="column prompt_size: needs two products"):
        read_splitwise(path, "m", "h", 8)
