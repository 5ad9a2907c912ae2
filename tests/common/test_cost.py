"""The cost formulas against numbers computed by hand, and how they must move with their arguments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cost import (
    DISAGGREGATION_LINK,
    LINK_ASSUMPTIONS,
    OFFLOADING_LINK,
    LinkAssumptions,
    Utilisation,
    Work,
    attention_work,
    disaggregated_throughput,
    exchanged_bytes,
    fewest_devices,
    homogeneous_throughput,
    implied_mfu,
    is_compute_bound,
    kv_token_bytes,
    largest_batch,
    link_implied_mfu,
    minimum_link_bytes_s,
    model_work,
    roofline_s,
    weight_bytes,
)
from common.devices import A100, DEVICES, H20, H100, DeviceSpec
from common.shapes import LLAMA3_70B, LLAMA_13B, LLAMA_33B, LLAMA_65B, SHAPES, SMOLLM2_135M, ModelShape

TINY = ModelShape(
    name="tiny",
    layers=2,
    hidden_size=8,
    heads=4,
    kv_heads=2,
    head_dim=2,
    intermediate_size=16,
    vocab_size=10,
    parameters=1000,
    lookup_parameters=100,
)

shapes = st.sampled_from(list(SHAPES.values()))
devices = st.sampled_from(list(DEVICES.values()))
batches = st.integers(1, 4096)
contexts = st.integers(1, 200_000)
element_sizes = st.sampled_from((1, 2))
shares = st.floats(0.05, 1.0)


def times(shape: ModelShape, batch: int, context: int) -> dict[str, float]:
    return {
        "model_s": roofline_s(model_work(shape, batch, 2), H100, devices=2),
        "attention_s": roofline_s(attention_work(shape, batch, context, 2), H20, devices=4),
    }


def test_a_tiny_model_costs_what_one_computes_by_hand() -> None:
    assert kv_token_bytes(TINY, 2) == 2 * 2 * 2 * 2 * 2
    assert weight_bytes(TINY, 2) == 2000
    assert model_work(TINY, 3, 2) == Work(2 * 900 * 3, 2 * (900 + 2 * 3 * 8 * 2))
    assert attention_work(TINY, 3, 5, 2) == Work(4 * 3 * 5 * 16, 3 * 5 * 32 + 2 * 3 * 16 * 2)
    assert Work(flops=6.0, bytes_moved=3.0).intensity == 2.0


def test_the_roofline_is_the_larger_of_both_times() -> None:
    assert roofline_s(Work(989e12, 1.0), H100) == pytest.approx(1.0)
    assert roofline_s(Work(1.0, 3350e9), H100) == pytest.approx(1.0)
    assert roofline_s(Work(989e12, 6700e9), H100, devices=2) == pytest.approx(1.0)
    assert roofline_s(Work(1.0, 3350e9), H100, utilisation=Utilisation(memory=0.5)) == pytest.approx(2.0)
    assert roofline_s(Work(989e12, 1.0), H100, utilisation=Utilisation(compute=0.25)) == pytest.approx(4.0)
    assert is_compute_bound(Work(300.0, 1.0), H100)
    assert not is_compute_bound(Work(290.0, 1.0), H100)


def test_the_exchange_is_what_each_paper_counts() -> None:
    assert exchanged_bytes(TINY, 3, 2, OFFLOADING_LINK) == 4 * 2 * 8 * 3 * 2
    assert exchanged_bytes(TINY, 3, 2, DISAGGREGATION_LINK) == (2 + 2 / 2) * 2 * 8 * 3 * 2


def test_the_least_bandwidth_follows_each_paper_s_formula() -> None:
    def needed(assumptions: LinkAssumptions, slack: float | None = None) -> float:
        return minimum_link_bytes_s(
            TINY, 3, 2, model_s=1.0, attention_s=2.0, assumptions=assumptions, slack=slack
        )

    assert needed(OFFLOADING_LINK) == pytest.approx(384 / 1.0)
    assert needed(DISAGGREGATION_LINK) == pytest.approx(288 / (0.2 * 3.0))
    assert needed(DISAGGREGATION_LINK, slack=0.4) == pytest.approx(288 / (0.4 * 3.0))


def test_parameters_are_the_published_ones() -> None:
    billions = {shape.name: shape.parameters / 1e9 for shape in SHAPES.values()}
    assert billions == {
        "llama-13b": pytest.approx(13.016, abs=1e-3),
        "llama-33b": pytest.approx(32.529, abs=1e-3),
        "llama-65b": pytest.approx(65.286, abs=1e-3),
        "llama3-70b": pytest.approx(70.554, abs=1e-3),
        "llama2-7b": pytest.approx(6.738, abs=1e-3),
        "llama2-70b": pytest.approx(68.977, abs=1e-3),
        "internlm-20b": pytest.approx(20.089, abs=1e-3),
        "qwen-72b": pytest.approx(72.286, abs=1e-3),
        "codellama-34b": pytest.approx(33.744, abs=1e-3),
        "llama3-8b": pytest.approx(8.030, abs=1e-3),
        "opt-13b": pytest.approx(12.853, abs=1e-3),
        "opt-66b": pytest.approx(65.720, abs=1e-3),
        "opt-175b": pytest.approx(174.604, abs=1e-3),
        "bloom-176b": pytest.approx(176.247, abs=1e-3),
        "smollm2-135m": pytest.approx(0.134515, abs=1e-6),
    }
    assert {shape.name for shape in SHAPES.values() if shape.feed_forward_matrices == 2} == {
        "opt-13b",
        "opt-66b",
        "opt-175b",
        "bloom-176b",
    }
    assert LLAMA_65B.parameters - LLAMA_65B.multiplied_parameters == 32000 * 8192
    assert SMOLLM2_135M.multiplied_parameters == SMOLLM2_135M.parameters


def test_llama3_70b_on_the_papers_devices() -> None:
    assert kv_token_bytes(LLAMA3_70B, 2) == 327_680
    assert kv_token_bytes(LLAMA_33B, 2) == 4 * 60 * 6656
    assert largest_batch(LLAMA3_70B, 8192, 2, H100, holds_weights=False) == 29
    assert largest_batch(LLAMA3_70B, 8192, 2, H100, holds_weights=True) == 0
    assert fewest_devices(LLAMA3_70B, 2, H100) == 2
    assert largest_batch(LLAMA3_70B, 8192, 2, H100, devices=2, holds_weights=True) == 7


def test_an_entry_of_table_3_implies_its_mfu() -> None:
    """4.90 GB/s = 2edL · MFU · 312 TFLOPS / N with N = 12.852 billion."""
    expected = 4.90e9 * 12.852024e9 / (2 * 2 * 5120 * 40 * 312e12)
    assert link_implied_mfu(4.90e9, LLAMA_13B, 2, A100, 1) == pytest.approx(expected, rel=1e-6)
    assert link_implied_mfu(4.90e9, LLAMA_13B, 2, A100, 2) == pytest.approx(expected / 2, rel=1e-6)


def test_the_implied_mfu_is_the_formula_read_backwards() -> None:
    model_s = roofline_s(model_work(LLAMA_13B, 512, 2), A100, utilisation=Utilisation(compute=0.4))
    needed = minimum_link_bytes_s(
        LLAMA_13B, 512, 2, model_s=model_s, attention_s=1.0, assumptions=OFFLOADING_LINK
    )
    assert link_implied_mfu(needed, LLAMA_13B, 2, A100, 1) == pytest.approx(0.4)
    assert implied_mfu(model_work(LLAMA_13B, 512, 2).flops, model_s, A100) == pytest.approx(0.4)


def test_throughput_per_dollar_counts_every_device_and_the_exchange() -> None:
    found = disaggregated_throughput(LLAMA3_70B, 8192, 2, H100, H20, (2, 4), is_staggered=False)
    assert found is not None
    assert found.price_usd_h == pytest.approx(40.64)
    assert found.batch == 143
    exchange_s = exchanged_bytes(LLAMA3_70B, 143, 2) / 100e9
    assert found.step_s == pytest.approx(sum(times(LLAMA3_70B, 143, 8192).values()) + exchange_s)
    assert found.tokens_usd == pytest.approx(143 / found.step_s * 3600 / 40.64)


def test_what_does_not_fit_has_no_throughput() -> None:
    assert disaggregated_throughput(LLAMA3_70B, 8192, 2, H100, H20, (1, 4), is_staggered=False) is None
    assert disaggregated_throughput(LLAMA3_70B, 400_000, 2, H100, H20, (2, 1), is_staggered=False) is None
    assert homogeneous_throughput(LLAMA3_70B, 8192, 2, H100, 1) is None


@given(shapes, batches, contexts, element_sizes)
def test_bytes_are_proportional_to_the_element(shape: ModelShape, batch: int, context: int, e: int) -> None:
    assert kv_token_bytes(shape, 2 * e) == 2 * kv_token_bytes(shape, e)
    assert weight_bytes(shape, 2 * e) == 2 * weight_bytes(shape, e)
    small, large = (attention_work(shape, batch, context, size) for size in (e, 2 * e))
    assert large.bytes_moved == pytest.approx(2 * small.bytes_moved)
    assert large.flops == small.flops


@given(shapes, devices, batches, contexts, shares, shares)
def test_a_step_never_gets_shorter_with_more_work_or_longer_with_more_devices(
    shape: ModelShape, device: DeviceSpec, batch: int, context: int, compute: float, memory: float
) -> None:
    reached = Utilisation(compute, memory)
    attention = roofline_s(attention_work(shape, batch, context, 2), device, utilisation=reached)
    for larger in (
        attention_work(shape, batch + 1, context, 2),
        attention_work(shape, batch, context + 1, 2),
    ):
        assert roofline_s(larger, device, utilisation=reached) > attention
    model = roofline_s(model_work(shape, batch, 2), device, utilisation=reached)
    assert roofline_s(model_work(shape, batch + 1, 2), device, utilisation=reached) > model
    both = roofline_s(model_work(shape, batch, 2), device, devices=2, utilisation=reached)
    assert both == pytest.approx(model / 2)
    assert implied_mfu(model_work(shape, batch, 2).flops, model, device) <= compute * (1 + 1e-9)


@given(shapes, batches, contexts)
def test_attention_s_intensity_stays_below_its_group_size(
    shape: ModelShape, batch: int, context: int
) -> None:
    """2G/e FLOPs per byte in the limit of long contexts, whatever the batch."""
    assert attention_work(shape, batch, context, 2).intensity < shape.heads / shape.kv_heads


@given(shapes, st.integers(1, 2048), contexts, st.sampled_from(LINK_ASSUMPTIONS), shares)
def test_a_link_needs_more_for_larger_batches_and_less_for_longer_contexts_and_more_slack(
    shape: ModelShape, batch: int, context: int, assumptions: LinkAssumptions, slack: float
) -> None:
    def needed(batch: int, context: int, slack: float) -> float:
        given_times = times(shape, batch, context)
        return minimum_link_bytes_s(shape, batch, 2, assumptions=assumptions, slack=slack, **given_times)

    here = needed(batch, context, slack)
    assert needed(batch + 1, context, slack) >= here * (1 - 1e-9)
    assert needed(batch, context + 1, slack) <= here
    assert needed(batch, context, 2 * slack) == pytest.approx(here / 2)


@given(shapes, devices, contexts, st.integers(1, 16), st.booleans())
def test_the_largest_batch_fits_and_one_more_does_not(
    shape: ModelShape, device: DeviceSpec, context: int, count: int, holds_weights: bool
) -> None:
    batch = largest_batch(shape, context, 2, device, devices=count, holds_weights=holds_weights)
    weights = weight_bytes(shape, 2) if holds_weights else 0
    one = context * kv_token_bytes(shape, 2)
    assert batch == 0 or weights + batch * one <= count * device.memory_bytes
    assert weights + (batch + 1) * one > count * device.memory_bytes


@given(shapes, devices, devices, contexts, st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_throughput_is_its_batch_over_its_step_and_no_pool_works_more_than_the_step(
    shape: ModelShape, first: DeviceSpec, other: DeviceSpec, context: int, a: int, b: int, is_staggered: bool
) -> None:
    found = disaggregated_throughput(shape, context, 2, first, other, (a, b), is_staggered=is_staggered)
    if found is None:
        return
    assert found.tokens_s == pytest.approx(found.batch / found.step_s)
    held = largest_batch(shape, context, 2, other, devices=b, holds_weights=False)
    assert held - 1 <= found.batch <= held
    attention = attention_work(shape, found.batch, context, 2)
    assert found.step_s >= roofline_s(attention, other, devices=b) * (1 - 1e-9)
    model = model_work(shape, found.batch, 2)
    assert found.step_s >= roofline_s(model, first, devices=a) * (1 - 1e-9)


def test_every_device_names_its_sources_and_has_plausible_units() -> None:
    for name, device in DEVICES.items():
        assert device.name == name
        assert device.figures_source
        assert device.price_source
        assert device.network_source
        assert 1e13 < device.peak_flop_s < 1e16
        assert 1e10 < device.memory_bytes < 1e12
        assert 1e11 < device.memory_bytes_s < 1e13
        assert 1e9 < device.network_bytes_s < device.memory_bytes_s
