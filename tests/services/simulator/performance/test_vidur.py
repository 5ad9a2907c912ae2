"""Vidur's estimator: its rules on a made profile, and its own profiles with held-out error."""

from pathlib import Path

import numpy as np
import pytest

from common.errors import ConfigError
from common.shapes import CODELLAMA_34B, LLAMA2_70B
from services.simulator.performance.files import PerformanceFileError
from services.simulator.performance.operators import OperatorModel
from services.simulator.performance.vidur import ROW_TILE, VidurOperators
from services.simulator.performance.vidur_files import (
    KV_SAVE,
    TOKEN_OPERATORS,
    VidurFiles,
    VidurProfile,
    read_vidur,
)
from services.simulator.shape import PassShape
from tests.services.simulator.performance.conftest import (
    assert_more_takes_longer,
    assert_operators_are_their_pass,
    assert_steps_are_their_passes,
    mean_error,
    small_llama,
    write_csv,
)

SHAPE = small_llama(intermediate_size=2816, vocab_size=1000)
TOKENS = (1, 8, 16, 64, 512, 2048, 4096)
OPERATOR_MS, TOKEN_MS = 0.002, 1e-4
DECODE_MS, PREFILL_MS, REDUCTION_MS, TRANSFER_MS, SAVE_MS = 1e-5, 1e-7, 0.03, 0.5, 1e-3


def median(name: str) -> str:
    return f"time_stats.{name}.median"


def write_profile(folder: Path, *, saves: bool = False) -> VidurFiles:
    widths = {"n_head": 8, "n_kv_head": 2, "n_embd": 1024, "n_expanded_embd": 2816}
    mlp = [
        {
            **{median(name): OPERATOR_MS + TOKEN_MS * tokens for name in TOKEN_OPERATORS},
            **widths,
            "num_tokens": tokens,
            "num_tensor_parallel_workers": 2,
        }
        for tokens in TOKENS
    ]
    common = {"n_embd": 1024, "n_q_head": 8, "n_kv_head": 2, "num_tensor_parallel_workers": 2}
    attention: list[dict[str, object]] = []
    for context in (0, 1024, 4096):
        for chunk in (64, 256, 1024):
            ms = PREFILL_MS * (chunk * chunk + chunk * context)
            case = {"batch_size": 1, "prefill_chunk_size": chunk, "kv_cache_size": context}
            row = {median("attn_prefill"): ms, median("attn_decode"): "", **common, **case}
            attention.append({**row, "is_prefill": "True"})
        for batch in (1, 4, 16):
            ms = 0.001 + DECODE_MS * batch * context
            case = {"batch_size": batch, "prefill_chunk_size": 0, "kv_cache_size": context}
            row = {median("attn_prefill"): "", median("attn_decode"): ms, **common, **case}
            attention.append({**row, "is_prefill": "False"})
    if saves:
        attention = [{**row, median(KV_SAVE): SAVE_MS} for row in attention]
    links = {"num_workers": 2, "devices_per_node": 2}
    return VidurFiles(
        write_csv(folder / "mlp.csv", mlp),
        write_csv(folder / "attention.csv", attention),
        write_csv(
            folder / "all_reduce.csv",
            [{median("all_reduce"): REDUCTION_MS, "size": size, **links} for size in (2048, 8 << 20)],
        ),
        write_csv(
            folder / "send_recv.csv",
            [{median("send_recv"): TRANSFER_MS, "size": size, **links} for size in (2048, 8 << 20)],
        ),
    )


@pytest.fixture
def profile(tmp_path: Path) -> VidurProfile:
    return read_vidur(write_profile(tmp_path), SHAPE, 2)


def rows_ms(tokens: int) -> float:
    return SHAPE.layers * (9 * (OPERATOR_MS + TOKEN_MS * tokens) + 2 * (REDUCTION_MS + 0.02))


def test_a_pass_is_layers_of_operators_and_two_reductions_at_the_next_tile(profile: VidurProfile) -> None:
    model = OperatorModel(VidurOperators(profile), row_rounding=ROW_TILE)
    decode_ms = SHAPE.layers * (0.001 + DECODE_MS * 2048)
    assert model.pass_s(PassShape((), 1, 2048)) == pytest.approx((rows_ms(8) + decode_ms) / 1e3)
    prefill_ms = SHAPE.layers * PREFILL_MS * 1024**2
    assert model.pass_s(PassShape(((0, 1024),))) == pytest.approx((rows_ms(1024) + prefill_ms) / 1e3)


def test_several_at_once_are_equivalent_to_one_and_a_tenth_longer_where_kv_is_shared(
    profile: VidurProfile,
) -> None:
    operators = VidurOperators(profile)
    model = OperatorModel(operators, row_rounding=ROW_TILE)
    batch_ms = 1.1 * SHAPE.layers * (0.001 + DECODE_MS * 4 * 1024)
    assert model.pass_s(PassShape((), 4, 4 * 1024)) == pytest.approx((rows_ms(8) + batch_ms) / 1e3)
    chunks = ((0, 192), (0, 256))
    assert operators.equivalent_chunk(chunks) == (0, 320)
    chunks_ms = 1.1 * SHAPE.layers * PREFILL_MS * 320**2
    assert model.pass_s(PassShape(chunks)) == pytest.approx((rows_ms(448) + chunks_ms) / 1e3, rel=1e-3)
    without = OperatorModel(VidurOperators(profile, batch_factor=1.0), row_rounding=ROW_TILE)
    plain_ms = rows_ms(8) + batch_ms / 1.1
    assert without.pass_s(PassShape((), 4, 4 * 1024)) == pytest.approx(plain_ms / 1e3)


def test_a_mixed_pass_is_both_attentions_over_the_rows_of_all(profile: VidurProfile) -> None:
    model = OperatorModel(VidurOperators(profile), row_rounding=ROW_TILE)
    attention_ms = SHAPE.layers * (PREFILL_MS * (256**2 + 256 * 1024) + 1.1 * (0.001 + DECODE_MS * 16 * 1024))
    expected_ms = rows_ms(256 + 16) + attention_ms
    assert model.pass_s(PassShape(((1024, 256),), 16, 16 * 1024)) == pytest.approx(expected_ms / 1e3)


def test_a_pipeline_sends_between_its_stages(profile: VidurProfile) -> None:
    one, four = (OperatorModel(VidurOperators(profile, pipeline_parallel=stages)) for stages in (1, 4))
    shape = PassShape(((0, 512),))
    assert four.stages == 4
    assert four.pass_s(shape) - one.pass_s(shape) == pytest.approx(3 * TRANSFER_MS / 1e3)
    with pytest.raises(ConfigError, match="must divide the 4 layers"):
        VidurOperators(profile, pipeline_parallel=3)


def test_saving_kv_counts_where_it_was_measured(profile: VidurProfile, tmp_path: Path) -> None:
    saving = read_vidur(write_profile(tmp_path, saves=True), SHAPE, 2)
    models = [OperatorModel(VidurOperators(each)) for each in (profile, saving)]
    without, with_saves = (model.pass_s(PassShape((), 3, 600)) for model in models)
    assert with_saves - without == pytest.approx(SHAPE.layers * SAVE_MS / 1e3)


def test_it_holds_to_what_all_models_do(profile: VidurProfile) -> None:
    model = OperatorModel(VidurOperators(profile, pipeline_parallel=2), row_rounding=ROW_TILE)
    assert_steps_are_their_passes(model)
    assert_operators_are_their_pass(model)
    assert_more_takes_longer(model)


def test_what_breaks_a_rule_is_named(tmp_path: Path) -> None:
    files = write_profile(tmp_path)
    other = small_llama(intermediate_size=4096, vocab_size=1000, name="wider")
    with pytest.raises(
        PerformanceFileError, match=r"mlp.csv: column n_expanded_embd, row 2: 2816: wider has 4096"
    ):
        read_vidur(files, other, 2)
    with pytest.raises(
        PerformanceFileError, match=r"num_tensor_parallel_workers: has no row with 8\.0; has 2"
    ):
        read_vidur(files, SHAPE, 8)
    with pytest.raises(ConfigError, match="all_reduce is needed for tensor parallelism over 2"):
        read_vidur(VidurFiles(files.mlp, files.attention), SHAPE, 2)
    no_transfers = read_vidur(VidurFiles(files.mlp, files.attention, files.all_reduce), SHAPE, 2)
    with pytest.raises(ConfigError, match="send_recv is needed for a pipeline"):
        VidurOperators(no_transfers, pipeline_parallel=2)


def published(shared: Path) -> VidurFiles:
    profiling = shared / "data/vidur/profiling"
    node = profiling / "network/a100_pairwise_nvlink"
    return VidurFiles(
        profiling / "compute/a100/codellama/CodeLlama-34b-Instruct-hf/mlp.csv.gz",
        profiling / "compute/a100/attention_tp2_embd8192_q64_kv8.csv.gz",
        node / "all_reduce.csv.gz",
        node / "send_recv.csv.gz",
    )


def test_decode_attention_of_an_a100_is_the_published(shared_directory: Path) -> None:
    profile = read_vidur(published(shared_directory), CODELLAMA_34B, 2)
    operators = VidurOperators(profile, batch_factor=1.0)
    layer_ms = 1e3 * operators.decode_attention_s(128, np.array([1024.0, 2048.0])) / CODELLAMA_34B.layers
    assert layer_ms == pytest.approx([0.192, 0.349], abs=5e-4)


def test_held_out_operators_are_predicted_within_nine_percent_by_lines(shared_directory: Path) -> None:
    errors = read_vidur(published(shared_directory), CODELLAMA_34B, 2).held_out()
    assert {error.operator for error in errors} >= {*TOKEN_OPERATORS, "attn_prefill", "attn_decode"}
    assert max(error.mape for error in errors) < 0.09
    assert mean_error(errors) < 0.04


def test_real_profiles_hold_to_what_all_models_do(shared_directory: Path) -> None:
    profile = read_vidur(published(shared_directory), CODELLAMA_34B, 2)
    model = OperatorModel(VidurOperators(profile, pipeline_parallel=2), row_rounding=ROW_TILE)
    assert_steps_are_their_passes(model)
    assert_operators_are_their_pass(model)
    assert_more_takes_longer(model, noise=0.05)
    with pytest.raises(PerformanceFileError, match="another model's profile"):
        read_vidur(published(shared_directory), LLAMA2_70B, 2)


def test_forest_and_lines_agree_on_a_real_profile(shared_directory: Path) -> None:
    pytest.importorskip("sklearn")
    profile = read_vidur(published(shared_directory), CODELLAMA_34B, 2)
    lines, forest = (
        OperatorModel(VidurOperators(profile, regression=each), row_rounding=ROW_TILE)
        for each in ("linear", "forest")
    )
    for shape in (
        PassShape((), 24, 24 * 1300),
        PassShape(((0, 1225),)),
        PassShape(((1024, 488),), 24, 24 * 900),
    ):
        assert forest.pass_s(shape) == pytest.approx(lines.pass_s(shape), rel=0.05)
