"""DistServe's constants against the formulas computed by hand."""

import json
from pathlib import Path

import pytest

from services.simulator.performance.distserve import DistServeConstants, DistServeModel, read_distserve
from services.simulator.performance.files import PerformanceFileError
from services.simulator.shape import PassShape
from tests.services.simulator.performance.conftest import (
    assert_more_takes_longer,
    assert_steps_are_their_passes,
)

OPT_13B_TP1 = DistServeConstants(
    prefill=(18.1025, 0.101912, 7.12226e-6),
    decoding_smallbs=(19.9347, 6.26936e-4, 0.0385070),
    decoding_largebs=(7.16619, 5.79800e-4, 0.158311),
    decoding_large_small_bs_threshold=95,
)
PROMPTS = PassShape(((0, 700), (0, 300)))


def test_prefill_and_both_decodes_are_the_papers_lines() -> None:
    model = DistServeModel(OPT_13B_TP1)
    prefill_ms = 18.1025 + 0.101912 * 1000 + 7.12226e-6 * (700**2 + 300**2) + 1
    assert model.pass_s(PROMPTS) == pytest.approx(prefill_ms / 1e3)
    small_ms = 19.9347 + 6.26936e-4 * 50_000 + 0.0385070 * 94
    large_ms = 7.16619 + 5.79800e-4 * 50_000 + 0.158311 * 95
    assert model.pass_s(PassShape((), 94, 50_000)) == pytest.approx(small_ms / 1e3)
    assert model.pass_s(PassShape((), 95, 50_000)) == pytest.approx(large_ms / 1e3)


def test_stages_share_a_pass_and_each_adds_as_many_ms_as_there_are() -> None:
    one, two = DistServeModel(OPT_13B_TP1), DistServeModel(OPT_13B_TP1, pipeline_parallel=2)
    stage_ms = (1e3 * one.pass_s(PROMPTS) - 1) / 2 + 2
    assert two.stages == 2
    assert two.pass_s(PROMPTS) / 2 == pytest.approx(stage_ms / 1e3)
    assert two.pass_s(PassShape((), 4, 4000)) == pytest.approx(one.pass_s(PassShape((), 4, 4000)))


def test_ray_costs_two_ms_and_a_tenth_of_a_microsecond_a_token_once() -> None:
    bare, ray = DistServeModel(OPT_13B_TP1), DistServeModel(OPT_13B_TP1, is_ray_counted=True)
    assert ray.pass_s(PROMPTS) - bare.pass_s(PROMPTS) == pytest.approx((2 + 1e-4 * 1000) / 1e3)
    step = PassShape((), 8, 8000)
    assert ray.pass_s(step) - bare.pass_s(step) == pytest.approx((2 + 1e-4 * 8000) / 1e3)
    assert_steps_are_their_passes(ray)


def test_it_holds_to_what_all_models_do() -> None:
    model = DistServeModel(OPT_13B_TP1, pipeline_parallel=2)
    assert_steps_are_their_passes(model)
    assert_more_takes_longer(model)


def test_a_chunk_pays_for_the_squares_that_it_adds() -> None:
    model = DistServeModel(OPT_13B_TP1)
    whole, first = model.pass_s(PassShape(((0, 2000),))), model.pass_s(PassShape(((0, 1500),)))
    rest = model.pass_s(PassShape(((1500, 500),)))
    assert first + rest - whole == pytest.approx((18.1025 + 1) / 1e3)


def test_published_constants_are_read(shared_directory: Path) -> None:
    file = shared_directory / "data/distserve/profiler-a100-80g.distserve.json"
    found = read_distserve(file, "facebook/opt-13b", 1)
    assert found.prefill == pytest.approx(OPT_13B_TP1.prefill, rel=1e-4)
    assert found.decoding_smallbs == pytest.approx(OPT_13B_TP1.decoding_smallbs, rel=1e-4)
    assert found.decoding_largebs == pytest.approx(OPT_13B_TP1.decoding_largebs, rel=1e-4)
    tp4 = read_distserve(file, "facebook/opt-13b", 4)
    assert tp4.prefill == pytest.approx((12.0623, 0.0380814, 5.22625e-7), rel=1e-4)
    vllm = file.with_name("profiler-a100-80g.vllm.json")
    assert read_distserve(vllm, "facebook/opt-66b", 2).prefill[2] == pytest.approx(-7.1e-6, rel=0.01)


def test_what_is_not_in_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("{")
    with pytest.raises(PerformanceFileError, match="cannot be read"):
        read_distserve(path, "m", 1)
    path.write_text(json.dumps({"m": {"1": {"prefill": [1, 2]}}}))
    with pytest.raises(PerformanceFileError, match=r"key opt: is missing; has m"):
        read_distserve(path, "opt", 1)
    with pytest.raises(PerformanceFileError, match=r"key m\.8: is missing; has tensor parallelism 1"):
        read_distserve(path, "m", 8)
    with pytest.raises(PerformanceFileError, match=r"profile.json: key m\.1: .*prefill"):
        read_distserve(path, "m", 1)
