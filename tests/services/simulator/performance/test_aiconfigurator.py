"""Operators put together from kernel tables: by hand, and NVIDIA's own."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.devices import A100_SXM
from common.errors import ConfigError
from common.shapes import LLAMA2_7B, LLAMA2_70B, LLAMA3_8B, ModelShape
from services.simulator.performance.aiconfigurator import (
    KernelOperators,
    NodeLinks,
    ProductTable,
    read_kernels,
)
from services.simulator.performance.files import PerformanceFileError, read_table
from services.simulator.performance.operators import OperatorModel
from services.simulator.performance.roofline import Parallelism, RooflineModel
from services.simulator.performance.vidur import LAUNCH_MS
from services.simulator.shape import PassShape
from tests.services.simulator.performance.conftest import (
    assert_more_takes_longer,
    assert_operators_are_their_pass,
    assert_steps_are_their_passes,
    small_llama,
    write_csv,
)

SHAPE = small_llama(intermediate_size=2048, vocab_size=4096)
PRODUCT_MS, DECODE_MS, PREFILL_MS, REDUCTION_MS = 1e-9, 1e-6, 1e-7, 1e-8


def write_tables(folder: Path) -> Path:
    sizes = (256, 1024, 4096)
    write_csv(
        folder / "x_gemm_perf.csv",
        [
            {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": PRODUCT_MS * n * k * (100 + m)}
            for m in (1, 64, 4096)
            for n in sizes
            for k in sizes
        ],
    )
    dtypes = {"head_dim": 128, "attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
    heads = {"num_heads": 4, "num_key_value_heads": 1, **dtypes}
    write_csv(
        folder / "x_context_attention_perf.csv",
        [
            {"batch_size": b, "isl": isl, **heads, "step": 0, "latency": PREFILL_MS * b * isl * isl}
            for b in (1, 2, 4)
            for isl in (16, 512, 8192)
        ],
    )
    write_csv(
        folder / "x_generation_attention_perf.csv",
        [
            {"batch_size": b, "isl": 1, **heads, "step": step, "latency": DECODE_MS * b * (step + 1)}
            for b in (1, 16, 64)
            for step in (1, 511, 8191)
        ],
    )
    write_csv(
        folder / "x_custom_allreduce_perf.csv",
        [
            {
                "num_gpus": 2,
                "message_size": size,
                "backend": backend,
                "latency": scale * REDUCTION_MS * size,
            }
            for size in (128, 1 << 20)
            for backend, scale in (("vllm_graph", 1), ("vllm_eager", 50))
        ],
    )
    return folder


def model_of(folder: Path, shape: ModelShape, tensor: int, pipeline: int = 1) -> OperatorModel:
    tables = read_kernels(folder, shape, tensor)
    parallelism = Parallelism(tensor=tensor, pipeline=pipeline)
    return OperatorModel(KernelOperators(tables, shape, A100_SXM, parallelism=parallelism))


def test_a_pass_is_products_attention_reductions_and_what_moves_through_memory(tmp_path: Path) -> None:
    model = model_of(write_tables(tmp_path), SHAPE, 2)
    # A GPU's share: query, key and value 512 + 256 wide, output from 512, gates 2 x 1024, down from 1024.
    multiplied = 1024 * (768 + 512 + 2048 + 1024)
    moved_ms = 1e3 * 2 * (8 * 1024 + 3 * 1024) * 16 / (2.039e12 * 0.8)
    layer_ms = PRODUCT_MS * multiplied * 116 + 2 * REDUCTION_MS * 16 * 2048 + moved_ms
    layer_ms += DECODE_MS * 16 * 700
    head_ms = PRODUCT_MS * 2048 * 1024 * 116
    found = model.pass_s(PassShape((), 16, 16 * 700))
    assert found == pytest.approx((4 * layer_ms + head_ms) / 1e3, rel=1e-6)


def write_links(folder: Path) -> NodeLinks:
    """Of a node whose reductions of rows take 1 ms each, and transfers 2 ms in it and 5 ms out of it."""
    row_bytes = 2 * SHAPE.hidden_size
    sizes = [rows * row_bytes for rows in (1, 4096)]
    cases = {"all_reduce": ((2, 2, 1.0),), "send_recv": ((2, 2, 2.0), (2, 1, 5.0))}
    for name, measured in cases.items():
        write_csv(
            folder / f"{name}.csv",
            [
                {
                    f"time_stats.{name}.median": each_ms * size / row_bytes,
                    "size": size,
                    "num_workers": workers,
                    "devices_per_node": in_node,
                }
                for size in sizes
                for workers, in_node, each_ms in measured
            ],
        )
    return NodeLinks(folder / "all_reduce.csv", folder / "send_recv.csv")


@pytest.mark.parametrize(("is_on_network", "transfer_ms"), [(False, 2.0), (True, 5.0)])
def test_the_links_of_another_node_are_in_place_of_its_own(
    tmp_path: Path, is_on_network: bool, transfer_ms: float
) -> None:
    folder = write_tables(tmp_path)
    tables = read_kernels(folder, SHAPE, 2, write_links(tmp_path), is_pipeline_on_network=is_on_network)
    parallelism = Parallelism(tensor=2, pipeline=2, is_pipeline_on_network=is_on_network)
    found = KernelOperators(tables, SHAPE, A100_SXM, parallelism=parallelism).row_operators_s(
        np.array([16.0])
    )
    assert found["all_reduce"] == pytest.approx(SHAPE.layers * 2 * (16 * 1.0 + LAUNCH_MS) / 1e3)
    assert found["send_recv"] == pytest.approx(16 * transfer_ms / 1e3)
    assert [each.operator for each in tables.held_out(folds=2)][2:] == ["all_reduce", "send_recv"]


def test_where_heads_were_not_measured_fewer_of_a_larger_batch_stand_for_them(tmp_path: Path) -> None:
    tables = read_kernels(write_tables(tmp_path), SHAPE, 1)
    operators = KernelOperators(tables, SHAPE, A100_SXM, parallelism=Parallelism())
    prefill_s = operators.prefill_attention_s(np.zeros(1), np.array([512.0]))
    assert prefill_s == pytest.approx(4 * PREFILL_MS * 2 * 512**2 / 1e3)
    found = operators.decode_attention_s(8, np.array([1000.0]))
    assert found == pytest.approx(4 * DECODE_MS * 16 * 1000 / 1e3)


def test_a_batch_that_was_not_measured_is_on_the_line_between_the_next(tmp_path: Path) -> None:
    three = replace(SHAPE, heads=12, kv_heads=3)
    operators = KernelOperators(
        read_kernels(write_tables(tmp_path), three, 1), three, A100_SXM, parallelism=Parallelism()
    )
    prefill_s = operators.prefill_attention_s(np.zeros(1), np.array([512.0]))
    assert prefill_s == pytest.approx(4 * PREFILL_MS * 3 * 512**2 / 1e3)
    many = replace(SHAPE, heads=20, kv_heads=5)
    with pytest.raises(PerformanceFileError, match=r"batch_size: has no row with 5\.0; has 1, 2, 4"):
        read_kernels(tmp_path, many, 1)


def test_a_chunk_takes_the_share_of_squares_that_it_adds(tmp_path: Path) -> None:
    model = model_of(write_tables(tmp_path), SHAPE, 2)
    alone, after = (model.pass_s(PassShape(((before, 512),))) for before in (0, 1536))
    added_ms = 4 * PREFILL_MS * (2048**2 - 1536**2 - 512**2)
    assert after - alone == pytest.approx(added_ms / 1e3, rel=1e-3)


def test_products_between_measured_sizes_take_their_time_a_multiplication(tmp_path: Path) -> None:
    write_tables(tmp_path)
    table = read_table(tmp_path / "x_gemm_perf.csv", ("m", "n", "k", "latency"))
    found = ProductTable(table).over_rows(2000, 3000).predict(np.array([[0.0], [32], [4096], [10_000]]))
    assert found == pytest.approx(
        [0, PRODUCT_MS * 6e6 * 132, PRODUCT_MS * 6e6 * 4196, PRODUCT_MS * 6e6 * 10_100]
    )


def test_it_holds_to_what_all_models_do(tmp_path: Path) -> None:
    model = model_of(write_tables(tmp_path), SHAPE, 2, pipeline=2)
    assert model.stages == 2
    assert_steps_are_their_passes(model)
    assert_operators_are_their_pass(model)
    assert_more_takes_longer(model)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(PerformanceFileError, match=r"\*gemm_perf.csv: must be one file; there is none"):
        read_kernels(tmp_path, SHAPE, 1)
    write_tables(tmp_path)
    wide = replace(SHAPE, name="wide", heads=16, kv_heads=4)
    with pytest.raises(PerformanceFileError, match="column num_gpus: has no row with 4"):
        read_kernels(tmp_path, wide, 4)
    with pytest.raises(PerformanceFileError, match="column head_dim: has no row with 64"):
        read_kernels(tmp_path, replace(SHAPE, head_dim=64), 1)
    with pytest.raises(PerformanceFileError, match="has no 8 heads with 1 KV heads, nor fewer"):
        read_kernels(tmp_path, replace(SHAPE, kv_heads=1), 1)
    with pytest.raises(ConfigError, match="must divide made's 8 heads"):
        read_kernels(tmp_path, SHAPE, 3)


def test_decode_attention_of_an_a100_is_the_published_and_vidurs_within_six_percent(
    shared_directory: Path,
) -> None:
    tables = read_kernels(shared_directory / "data/aiconfigurator/a100_sxm", LLAMA2_70B, 2)
    operators = KernelOperators(tables, LLAMA2_70B, A100_SXM, parallelism=Parallelism(tensor=2))
    layer_ms = 1e3 * operators.decode_attention_s(128, np.array([1024.0, 2048.0])) / LLAMA2_70B.layers
    assert layer_ms == pytest.approx([0.197, 0.361], abs=5e-4)
    assert layer_ms == pytest.approx([0.192, 0.349], rel=0.06)


@pytest.mark.parametrize(("shape", "tensor"), [(LLAMA2_70B, 2), (LLAMA3_8B, 1), (LLAMA2_7B, 1)])
def test_real_tables_hold_to_what_all_models_do_and_are_near_the_roofline(
    shared_directory: Path, shape: ModelShape, tensor: int
) -> None:
    folder = shared_directory / "data/aiconfigurator/a100_sxm"
    model = model_of(folder, shape, tensor)
    assert_steps_are_their_passes(model)
    assert_operators_are_their_pass(model)
    assert_more_takes_longer(model)
    for error in read_kernels(folder, shape, tensor).held_out():
        assert error.mape < 0.09
    roofline = RooflineModel(shape, A100_SXM, parallelism=Parallelism(tensor=tensor))
    for each in (PassShape(((0, 2048),)), PassShape((), 32, 32 * 1000)):
        assert roofline.pass_s(each) == pytest.approx(model.pass_s(each), rel=0.25)
