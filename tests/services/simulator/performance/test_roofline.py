"""The roofline against ``common.cost``, by hand, and how it moves with its arguments."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cost import PLAIN_ROOFLINE, attention_work, model_work, roofline_s
from common.devices import A100_SXM, DEVICES, H20, H100, DeviceSpec
from common.errors import ConfigError
from common.shapes import LLAMA2_70B, LLAMA3_70B, SHAPES, SMOLLM2_135M, ModelShape
from services.simulator.performance.roofline import Parallelism, RooflineModel
from services.simulator.shape import PassShape
from tests.services.simulator.performance.conftest import (
    assert_more_takes_longer,
    assert_operators_are_their_pass,
    assert_steps_are_their_passes,
)

NO_LATENCY = Parallelism(reduction_latency_s=0, transfer_latency_s=0)


@given(
    shape=st.sampled_from(list(SHAPES.values())),
    device=st.sampled_from(list(DEVICES.values())),
    batch=st.integers(1, 600),
    context=st.integers(1, 60_000),
)
def test_a_decode_step_is_that_of_the_cost_formulas(
    shape: ModelShape, device: DeviceSpec, batch: int, context: int
) -> None:
    model = RooflineModel(shape, device, parallelism=NO_LATENCY, utilisation=PLAIN_ROOFLINE)
    works = model_work(shape, batch, 2), attention_work(shape, batch, context, 2)
    expected = sum(roofline_s(work, device) for work in works)
    assert model.pass_s(PassShape((), batch, batch * context)) == pytest.approx(expected)


@given(
    shape=st.sampled_from(list(SHAPES.values())),
    device=st.sampled_from(list(DEVICES.values())),
    batch=st.integers(1, 600),
    context=st.integers(1, 5000),
    steps=st.integers(0, 400),
)
def test_steps_are_the_sum_of_their_passes_on_either_side_of_the_ridge(
    shape: ModelShape, device: DeviceSpec, batch: int, context: int, steps: int
) -> None:
    model = RooflineModel(shape, device)
    each = (model.pass_s(PassShape((), batch, batch * (context + step))) for step in range(steps))
    assert model.steps_s(batch, batch * context, steps) == pytest.approx(sum(each))


def test_attention_that_turns_from_memory_to_computing_on_the_way_is_summed_exactly() -> None:
    """The ridge is crossed where a KV head serves so many queries that their scores outweigh it."""
    shape = ModelShape(
        name="ridge",
        layers=1,
        hidden_size=4096,
        heads=32,
        kv_heads=1,
        head_dim=128,
        intermediate_size=1,
        vocab_size=1,
        parameters=4096,
        lookup_parameters=0,
    )
    slow = DeviceSpec("slow", 1, 80, 100, None, 1, 1, 1, "made", "made", "made")
    model = RooflineModel(shape, slow)
    crossed = [model.pass_s(PassShape((), 3, 3 * context)) for context in range(1, 200)]
    rises = [after - before for before, after in pairwise(crossed)]
    assert max(rises) > 1.5 * min(rises)
    assert model.steps_s(3, 3, 199) == pytest.approx(sum(crossed))


def test_a_prompt_computes_what_its_tokens_and_pairs_come_to() -> None:
    model = RooflineModel(LLAMA3_70B, H100, parallelism=NO_LATENCY, utilisation=PLAIN_ROOFLINE)
    tokens = 4096
    body = LLAMA3_70B.multiplied_parameters - LLAMA3_70B.head_parameters
    products = 2 * body * tokens + 2 * LLAMA3_70B.head_parameters
    attention = 4 * 80 * 64 * 128 * tokens * (tokens + 1) / 2
    expected = (products + attention) / H100.peak_flop_s
    assert model.pass_s(PassShape(((0, tokens),))) == pytest.approx(expected)


def test_chunks_of_a_prompt_compute_all_that_it_does_and_read_weights_more_often() -> None:
    model = RooflineModel(LLAMA2_70B, A100_SXM, parallelism=Parallelism(tensor=8))
    whole = model.pass_s(PassShape(((0, 4096),)))
    parts = sum(model.pass_s(PassShape(((before, 512),))) for before in range(0, 4096, 512))
    assert whole < parts < 1.2 * whole
    one = 64 * model.pass_s(PassShape(((0, 64),)))
    assert one > 2 * whole


def test_more_devices_share_a_layers_work_stages_do_not_and_both_pay_for_their_links() -> None:
    shape = PassShape(((0, 2048),))
    one, eight, staged = (
        RooflineModel(LLAMA2_70B, H20, parallelism=each)
        for each in (Parallelism(), Parallelism(tensor=8), Parallelism(pipeline=8))
    )
    assert one.pass_s(shape) / 8 < eight.pass_s(shape) < one.pass_s(shape) / 4
    assert staged.stages == 8
    message = 2048 * 8192 * 2
    moved_s = 160 * (2 * 7 / 8 * message / 450e9 + 10e-6)
    assert eight.pass_s(shape) == pytest.approx(one.pass_s(shape) / 8 + moved_s)
    assert staged.pass_s(shape) == pytest.approx(one.pass_s(shape) + 7 * (message / 450e9 + 10e-6))
    far = RooflineModel(LLAMA2_70B, H20, parallelism=Parallelism(pipeline=8, is_pipeline_on_network=True))
    assert far.pass_s(shape) - staged.pass_s(shape) == pytest.approx(7 * message * (1 / 50e9 - 1 / 450e9))


def test_what_a_pass_always_costs_is_added_to_each() -> None:
    bare, slower = (
        RooflineModel(SMOLLM2_135M, H100, parallelism=each)
        for each in (Parallelism(), Parallelism(pass_s=0.005))
    )
    shape = PassShape(((0, 8),), 2, 30)
    assert slower.pass_s(shape) - bare.pass_s(shape) == pytest.approx(0.005)
    assert slower.pass_s(PassShape()) == 0


def test_it_holds_to_what_all_models_do() -> None:
    model = RooflineModel(LLAMA2_70B, A100_SXM, parallelism=Parallelism(tensor=4, pipeline=2, pass_s=1e-3))
    assert_steps_are_their_passes(model)
    assert_operators_are_their_pass(model)
    assert_more_takes_longer(model)


def test_heads_and_layers_that_cannot_be_cut_so_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel = 5: must divide llama3-70b's 64 heads"):
        RooflineModel(LLAMA3_70B, H100, parallelism=Parallelism(tensor=5))
    with pytest.raises(ConfigError, match="pipeline_parallel = 81: must be 1 to the 80 layers"):
        RooflineModel(LLAMA3_70B, H100, parallelism=Parallelism(pipeline=81))
    assert RooflineModel(LLAMA3_70B, H100, parallelism=Parallelism(tensor=16)).stages == 1
