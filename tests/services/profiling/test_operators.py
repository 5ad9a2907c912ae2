"""`lamella profile --operators`: a tiny model's operators measured for real, and what the estimator makes of
them."""

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from common.config import ModelConfig
from common.devices import DEVICES
from common.errors import ConfigError
from common.model import program
from common.model.linears import Linear, linear_of
from common.model.precision import WeightForm
from common.shapes import SMOLLM2_135M, ModelShape, gpt_shape, llama_shape
from services.analysis.model_shape import read_shape
from services.cli import app
from services.profiling.operators.profiling import OperatorsRequest, profile_operators
from services.profiling.operators.sizes import (
    Effort,
    Limits,
    chunk_cases,
    message_sizes,
    shard_of,
    step_cases,
    token_counts,
)
from services.profiling.operators.token_layers import PassEnds, Weights, layers_of
from services.simulator.performance.files import PerformanceFileError
from services.simulator.performance.operators import OperatorModel
from services.simulator.performance.regression import fit
from services.simulator.performance.roofline import Parallelism, reductions_s, transfers_s
from services.simulator.performance.sources import OperatorsSource, VidurSource, open_source
from services.simulator.performance.vidur import VidurOperators
from services.simulator.performance.vidur_files import TOKEN_OPERATORS, files_in, median_column, read_vidur
from services.simulator.shape import PassShape
from tests.common.model.conftest import MakeTiny
from tests.services.simulator.performance.conftest import assert_steps_are_their_passes

LIMITS = Limits(tokens=32, context=64, batch=4)
FP32 = ModelConfig(dtype="fp32", kernels="torch", threads=1)


def request_of(shape: ModelShape, *degrees: int, has_messages: bool = False) -> OperatorsRequest:
    effort = Effort(rounds=1, limit_s=60.0)
    return OperatorsRequest(shape, degrees, FP32, 16, LIMITS, effort, has_messages)


@pytest.fixture(scope="module")
def shape(tiny: MakeTiny) -> ModelShape:
    return read_shape(str(tiny("llama").directory))


@pytest.fixture(scope="module")
def measured(shape: ModelShape, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole, and as a shard of two; with messages between two processes."""
    directory = tmp_path_factory.mktemp("operators")
    heard: dict[str, float] = {}
    files = profile_operators(
        request_of(shape, 1, 2, has_messages=True), directory, lambda text, part: heard.update({text: part})
    )
    assert heard == {"a shard of 1": 1.0, "a shard of 2": 1.0, "messages": 1.0}
    names = {"mlp", "attention", "sequences", "all_reduce", "all_gather", "send_recv"}
    assert {path.stem for path in files} == names
    return directory


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def copy_with(measured: Path, directory: Path, name: str, column: str, value: str, row: int = 0) -> Path:
    """The same files, but for one cell."""
    for path in measured.iterdir():
        rows = rows_of(path)
        if path.stem == name:
            rows[row][column] = value
        with (directory / path.name).open("w", newline="") as stream:
            writer = csv.DictWriter(stream, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    return directory


class RecordedWeights(Weights):
    """Keeps the sizes of all products."""

    def __init__(self) -> None:
        super().__init__(torch.float32, torch.device("cpu"), "model")
        self.products: Counter[tuple[int, int]] = Counter()

    def linear(self, outs: int, ins: int, *, has_bias: bool = False) -> Linear:
        self.products[outs, ins] += 1
        return super().linear(outs, ins, has_bias=has_bias)


def products_of(shape: ModelShape, degree: int) -> Counter[tuple[int, int]]:
    """(columns, rows) of the matrices of a shard's layers and of its output matrix."""
    weights, shard = RecordedWeights(), shard_of(shape, degree)
    layers_of(shard, weights)
    PassEnds(shard, weights)
    return weights.products


def test_the_products_are_those_of_the_real_model(
    shape: ModelShape, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: Counter[tuple[int, int]] = Counter()

    def recorded(weight: torch.Tensor, bias: torch.Tensor | None, form: WeightForm) -> Linear:
        outs, ins = weight.shape
        bound[outs, ins] += 1
        return linear_of(weight, bias, form)

    monkeypatch.setattr(program, "linear_of", recorded)
    directory = tiny("llama").directory
    program.load_program(directory, "float32", torch.device("cpu"), directory.parent / "cache")
    assert products_of(shape, 1) == bound


def test_a_shard_of_two_has_half_the_columns_or_half_the_rows() -> None:
    shape = llama_shape(
        "odd", layers=2, hidden_size=48, heads=6, kv_heads=2, intermediate_size=64, vocab_size=97
    )
    whole = {(48, 48): 4, (32, 48): 2, (128, 48): 2, (48, 64): 2, (97, 48): 1}
    half = {(24, 48): 2, (16, 48): 2, (48, 24): 2, (64, 48): 2, (48, 32): 2, (49, 48): 1}
    assert products_of(shape, 1) == Counter(whole)
    assert products_of(shape, 2) == Counter(half)
    with pytest.raises(ConfigError, match=r"tensor_parallel = 2: must divide smollm2-135m's 9 heads"):
        shard_of(SMOLLM2_135M, 2)


def test_every_size_and_degree_has_a_row_with_times(measured: Path, shape: ModelShape) -> None:
    mlp = rows_of(measured / "mlp.csv")
    for degree in ("1", "2"):
        own = [row for row in mlp if row["num_tensor_parallel_workers"] == degree]
        assert [int(row["num_tokens"]) for row in own] == [*token_counts(LIMITS)]
    for row in mlp:
        assert row["dtype"] == "float32"
        assert int(row["n_embd"]) == shape.hidden_size
        for name in TOKEN_OPERATORS:
            least, median, most = (
                float(row[f"time_stats.{name}.{kind}"]) for kind in ("min", "median", "max")
            )
            assert 0 < least <= median <= most
    attention = rows_of(measured / "attention.csv")
    cases = [
        (
            row["is_prefill"],
            *(int(row[each]) for each in ("batch_size", "kv_cache_size", "prefill_chunk_size")),
        )
        for row in attention
        if row["num_tensor_parallel_workers"] == "2"
    ]
    prefills = [("True", 1, before, tokens) for before, tokens in chunk_cases(LIMITS)]
    steps = [("False", batch, each, 0) for batch, each in step_cases(shard_of(shape, 2), LIMITS, 4)]
    assert cases == [*prefills, *steps]
    reductions = rows_of(measured / "all_reduce.csv")
    states = message_sizes(LIMITS.tokens * shape.hidden_size * 4)
    assert [(row["num_workers"], int(row["size"])) for row in reductions] == [("2", size) for size in states]


@pytest.mark.parametrize("degree", [1, 2])
def test_a_pass_is_the_sum_of_what_was_measured(measured: Path, shape: ModelShape, degree: int) -> None:
    """At measured sizes lines go through the very medians: embedding, layers, ends, messages of shards, of
    which smaller ones than were measured take no less than nothing."""

    def median(name: str, operator: str, **case: object) -> float:
        wanted = {column: str(value) for column, value in case.items()}
        [row] = [
            row
            for row in rows_of(measured / f"{name}.csv")
            if all(row[column] == value for column, value in wanted.items())
        ]
        return float(row[median_column(operator)])

    source = OperatorsSource(directory=measured)
    opened = open_source(source, shape, None, Parallelism(tensor=degree))
    tokens, own = 32, {"num_tensor_parallel_workers": degree}
    layer_ms = sum(median("mlp", name, num_tokens=tokens, **own) for name in TOKEN_OPERATORS)
    attention = {"is_prefill": True, "prefill_chunk_size": tokens, "kv_cache_size": 0, **own}
    layer_ms += median("attention", "attn_prefill", **attention)
    saves = [
        float(row[median_column("attn_kv_cache_save")])
        for row in rows_of(measured / "attention.csv")
        if max(int(row["batch_size"]), int(row["prefill_chunk_size"])) == tokens
        and row["num_tensor_parallel_workers"] == str(degree)
    ]
    layer_ms += float(np.median(saves))
    ends_ms = median("mlp", "embedding", num_tokens=tokens, **own)
    ends_ms += sum(
        median("sequences", name, num_sequences=1, **own) for name in ("output_matrix", "sampling")
    )
    if degree == 2:
        profile = read_vidur(files_in(measured), shape, degree)
        assert profile.reduction is not None
        assert profile.gather is not None
        rows = np.array([[float(tokens)], [1.0]])
        layer_ms += 2 * max(0.0, fit("linear", profile.reduction).predict(rows)[0])
        ends_ms += max(0.0, fit("linear", profile.gather).predict(rows)[1])
    expected_s = (shape.layers * layer_ms + ends_ms) / 1e3
    assert opened.model.pass_s(PassShape(((0, tokens),))) == pytest.approx(expected_s, rel=1e-6)


def test_layers_add_as_much_each_and_steps_are_their_passes(measured: Path, shape: ModelShape) -> None:
    three, six, nine = (
        open_source(OperatorsSource(directory=measured), replace(shape, layers=layers), None, Parallelism())
        for layers in (3, 6, 9)
    )
    for pass_shape in (PassShape(((0, 32),)), PassShape((), 4, 160), PassShape(((16, 16),), 2, 96)):
        taken = [each.model.pass_s(pass_shape) for each in (three, six, nine)]
        assert 0 < taken[0] < taken[1]
        assert taken[2] - taken[1] == pytest.approx(taken[1] - taken[0], rel=1e-9)
    assert_steps_are_their_passes(three.model)
    errors = {error.operator: error for error in three.held_out()}
    assert {"embedding", "output_matrix", "sampling", "attn_prefill", "attn_decode"} <= errors.keys()
    assert errors["mlp_up_proj"].samples == len(token_counts(LIMITS))
    assert all(0 <= error.mape < float("inf") for error in errors.values())


def test_a_forest_says_nothing_beyond_what_was_measured(measured: Path, shape: ModelShape) -> None:
    """Its means lie between the least and the most of each operator."""
    pytest.importorskip("sklearn")
    source = OperatorsSource(directory=measured, regression="forest")
    model = open_source(source, shape, None, Parallelism()).model
    profile = read_vidur(files_in(measured), shape, 1)
    assert profile.embedding is not None
    for pass_shape, attention in (
        (PassShape(((0, 32),)), [profile.prefill]),
        (PassShape((), 4, 160), [profile.decode]),
    ):
        least_ms, most_ms = (
            shape.layers * sum(bound(each.values) for each in (*profile.operators, *attention))
            + sum(bound(each.values) for each in (profile.embedding, *profile.sequences))
            for bound in (np.min, np.max)
        )
        assert least_ms / 1e3 <= model.pass_s(pass_shape) <= most_ms / 1e3


def test_chunks_of_one_pass_have_the_pairs_of_all(measured: Path, shape: ModelShape) -> None:
    operators = VidurOperators(read_vidur(files_in(measured), shape, 1), are_contexts_summed=False)
    before, tokens = operators.equivalent_chunk(((1024, 300), (0, 400)))
    assert (tokens, before * tokens) == pytest.approx((500, 1024 * 300))


def test_vidurs_rules_read_the_same_files(measured: Path, shape: ModelShape) -> None:
    """At the next multiple of eight tokens, and with a launch before each reduction."""
    files = files_in(measured)
    source = VidurSource(
        mlp=files.mlp, attention=files.attention, all_reduce=files.all_reduce, batch_factor=1.0
    )
    theirs, ours = (
        open_source(each, shape, None, Parallelism(tensor=2)).model
        for each in (source, OperatorsSource(directory=measured))
    )
    launches_s = shape.layers * 2 * 0.02e-3
    tokens = PassShape(((0, 32),))
    profile = read_vidur(files, shape, 2)
    assert profile.gather is not None
    # No gathering was as small as a single sequence's: a line below nothing counts for 0.
    at_end_ms = sum(
        max(0.0, fit("linear", each).predict(np.array([[1.0]]))[0])
        for each in (*profile.sequences, profile.gather)
    )
    assert theirs.pass_s(tokens) == pytest.approx(ours.pass_s(tokens) + launches_s - at_end_ms / 1e3)


def test_messages_that_were_not_measured_go_by_the_devices_links(measured: Path, shape: ModelShape) -> None:
    parallelism, tokens = Parallelism(tensor=2, pipeline=3), 32
    source = OperatorsSource(directory=measured, communication="roofline")
    with pytest.raises(ConfigError, match="device must be named"):
        open_source(source, shape, None, parallelism)
    device = DEVICES["a100"]
    by_links = open_source(source, shape, device, parallelism).model
    profile = read_vidur(files_in(measured), shape, 2, are_messages_measured=False)
    nothing = VidurOperators(profile, pipeline_parallel=3, launch_ms=0.0, batch_factor=1.0, links={})
    pass_shape = PassShape(((0, tokens),))
    taken_s = by_links.pass_s(pass_shape) - OperatorModel(nothing, head_grid=1).pass_s(pass_shape)
    lines = [each(shape, device, parallelism, 4) for each in (reductions_s, transfers_s)]
    assert taken_s == pytest.approx(sum(fixed_s + tokens * each_s for fixed_s, each_s in lines), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "column", "value", "said"),
    [
        (
            "mlp",
            median_column("mlp_act"),
            "soon",
            r"mlp.csv: column .*mlp_act.median, row 2: 'soon': must",
        ),
        ("mlp", "dtype", "fp3", r"mlp.csv: column dtype, row 2: 'fp3': must be one of bfloat16, float32"),
        ("mlp", "n_embd", "33", r"mlp.csv: column n_embd, row 2: 33: llama has 32: another model's"),
        (
            "attention",
            median_column("attn_prefill"),
            "",
            r"attention.csv: column .*attn_prefill.*, row 2",
        ),
        (
            "sequences",
            median_column("sampling"),
            "-1",
            r"sequences.csv: column .*sampling.*, row 2: '-1'",
        ),
        ("sequences", "vocab_size", "98", r"sequences.csv: column vocab_size, row 2: 98: llama has 97"),
        ("all_gather", "size", "nan", r"all_gather.csv: column size, row 2: 'nan': must be a number over 0"),
    ],
)
def test_files_that_are_none_are_refused_by_file_column_and_row(
    measured: Path, shape: ModelShape, tmp_path: Path, name: str, column: str, value: str, said: str
) -> None:
    degree = 2 if name == "all_gather" else 1
    source = OperatorsSource(directory=copy_with(measured, tmp_path, name, column, value))
    with pytest.raises(PerformanceFileError, match=said):
        open_source(source, shape, None, Parallelism(tensor=degree))


def test_what_was_not_measured_is_named(measured: Path, shape: ModelShape, tmp_path: Path) -> None:
    source = OperatorsSource(directory=measured)
    with pytest.raises(PerformanceFileError, match=r"parallel_workers: has no row with 4\.0; has 1, 2"):
        open_source(source, shape, None, Parallelism(tensor=4))
    with pytest.raises(PerformanceFileError, match=r"mlp\.csv: cannot be read"):
        open_source(OperatorsSource(directory=tmp_path), shape, None, Parallelism())
    alone = copy_with(measured, tmp_path, "", "", "")
    (alone / "all_reduce.csv").unlink()
    with pytest.raises(ConfigError, match="all_reduce is needed for tensor parallelism over 2"):
        open_source(OperatorsSource(directory=alone), shape, None, Parallelism(tensor=2))


def test_gpts_have_no_gates_and_no_rotation(tmp_path: Path) -> None:
    """And what an earlier profile of the folder had beside these is gone."""
    (tmp_path / "all_reduce.csv").write_text("stale")
    shape = gpt_shape("made", layers=2, hidden_size=32, heads=4, vocab_size=97, positions=64)
    profile_operators(request_of(shape, 2), tmp_path, lambda text, part: None)
    assert {path.stem for path in tmp_path.iterdir()} == {"mlp", "attention", "sequences"}
    profile = read_vidur(files_in(tmp_path), shape, 2, are_messages_measured=False)
    assert {each.operator for each in profile.operators} == {
        *(name for name in TOKEN_OPERATORS if name != "attn_rope"),
        "attn_kv_cache_save",
    }
    assert products_of(shape, 2)[64, 32] == shape.layers


def test_the_command_writes_the_files_and_says_how_far_they_are_off(tiny: MakeTiny, tmp_path: Path) -> None:
    config = tmp_path / "lamella.toml"
    config.write_text('[model]\ndtype = "fp32"\nthreads = 1\n[instance]\nblock_size = 16\n')
    sizes = ["--max-tokens", "32", "--max-context", "64", "--max-batch", "2", "--rounds", "1"]
    model, output = str(tiny("llama").directory), tmp_path / "operators"
    asked = ["profile", "--operators", "--model", model, "--config", str(config), *sizes]
    asked.append("--no-communication")
    found = CliRunner().invoke(app, [*asked, "--output", str(output)])
    assert found.exit_code == 0, found.output
    assert "llama, a shard of 1" in found.output
    assert "output_matrix" in found.output
    assert f'performance = {{ kind = "operators", directory = "{output}" }}' in found.output
    assert isinstance(CliRunner().invoke(app, asked).exception, ConfigError)
    taken = tmp_path / "file"
    taken.touch()
    refused = CliRunner().invoke(app, [*asked, "--output", str(taken)])
    assert str(refused.exception) == f"--output = {str(taken)!r}: cannot be made: {taken} is no directory"
    for alone in (["--output", str(output)], ["--tp", "2"], ["--no-communication"]):
        refused = CliRunner().invoke(app, ["profile", *alone])
        assert isinstance(refused.exception, ConfigError)
        assert str(refused.exception).startswith(f"{alone[0]} = ")
        assert "is of --operators" in str(refused.exception)
        assert "PosixPath" not in str(refused.exception)
