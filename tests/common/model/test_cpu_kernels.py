"""The compiled kernels against torch's operators: the same numbers, whatever the shapes and strides."""

import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import llvmlite.binding as llvm
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.model import kernels, linears
from common.model.attention import LocalAttention
from common.model.cpu import panels
from common.model.cpu.library import compile_kernels
from common.model.interface import SequenceChunk
from common.model.linears import Linear, compiled_rows, linear_of
from common.model.precision import WeightForm
from common.spec import AttentionSpec
from tests.common.model.conftest import MakeTiny

CACHE = Path("~/.cache/lamella")
close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
FORMS = st.sampled_from([torch.float32, torch.bfloat16])


def is_near(
    compiled: torch.Tensor, expected: torch.Tensor, roundings: int = 3, most: float | None = None
) -> None:
    """Of bf16, within so many roundings of numbers up to ``most`` (None: of that size): torch's operators
    round on their way."""
    if compiled.dtype is torch.float32:
        close(compiled, expected)
        return
    if most is None:
        most = expected.float().abs().max().item()
    torch.testing.assert_close(compiled, expected, atol=roundings * most / 256, rtol=0)


@pytest.fixture(scope="module", autouse=True)
def both_ways() -> Iterator[None]:
    """Kernels are there to be switched on, and off again for the tests of other modules."""
    compile_kernels(CACHE)
    yield
    kernels.use(None)


def by_both(compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(compiled, torch)"""
    kernels.use_compiled(CACHE)
    compiled = compute()
    kernels.use(None)
    return compiled, compute()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 40), FORMS, st.integers(0, 1 << 30))
def test_rms_norm(rows: int, width: int, form: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = (torch.randn(1, rows, width) * 5).to(form), torch.randn(width).to(form)
    compiled, expected = by_both(lambda: kernels.rms_norm(x, [width], weight, 1e-5))
    is_near(compiled, expected)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 40), FORMS, st.integers(0, 1 << 30))
def test_add_rms_norm(rows: int, width: int, form: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    left, right, weight = (
        each.to(form)
        for each in (torch.randn(1, rows, width) * 5, torch.randn(1, rows, width), torch.randn(width))
    )
    compute = partial(kernels.add_rms_norm, left, right, [width], weight, 1e-5)
    (total, compiled), (expected_total, expected) = (
        each.unbind() for each in by_both(lambda: torch.stack(compute()))
    )
    assert torch.equal(total, expected_total)
    is_near(compiled, expected)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 20),
    st.integers(0, 7),
    FORMS,
    st.integers(0, 1 << 30),
)
def test_rotate_heads_within_a_wider_output(
    tokens: int, heads: int, half: int, first: int, form: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(1, tokens, first + heads * 2 * half + 3).to(form)
    cos, sin = torch.randn(2, 1, 1, tokens, 2 * half).to(form)
    compiled, expected = by_both(lambda: kernels.rotate_heads(x, cos, sin, first, heads))
    assert compiled.shape == (1, tokens, heads, 2 * half)
    # Two products are rounded, then their sum, which may be small.
    is_near(compiled, expected, most=float(x.abs().max() * torch.cat([cos, sin]).abs().max()))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 20), st.booleans(), st.integers(0, 1 << 30))
def test_rotate_also_of_views(tokens: int, heads: int, half: int, is_part: bool, seed: int) -> None:
    torch.manual_seed(seed)
    width = 2 * half
    wide = torch.randn(1, tokens, heads * width * (2 if is_part else 1))
    x = wide[:, :, : heads * width].reshape(1, tokens, heads, width).transpose(1, 2)
    if is_part and tokens > 1:
        x = wide.as_strided((1, heads, tokens, width), (wide.numel(), width, wide.shape[2], 1))
    cos, sin = torch.randn(2, 1, 1, tokens, width)
    compiled, expected = by_both(lambda: kernels.rotate(x, cos, sin))
    close(compiled, expected)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), FORMS, st.integers(0, 1 << 30))
def test_silu_multiply_of_two_halves(rows: int, width: int, form: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    both = (torch.randn(1, rows, 2 * width) * 20).to(form)
    compiled, expected = by_both(lambda: kernels.silu_multiply(both[..., :width], both[..., width:]))
    if form is torch.float32:
        torch.testing.assert_close(compiled, expected, atol=1e-4, rtol=1e-5)
    else:
        is_near(compiled, expected)
    assert compiled.isfinite().all()
    at_once, _ = by_both(lambda: kernels.silu_multiply_halves(both))
    torch.testing.assert_close(at_once, compiled)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["model", "bf16", "int8"]),
    st.integers(1, 40),
    st.integers(1, 300),
    st.integers(1, 300),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.integers(0, 9),
)
def test_linears_by_weights_of_each_form(
    form: WeightForm, rows: int, outs: int, ins: int, has_bias: bool, threads: int, seed: int
) -> None:
    """As torch multiplies many rows by the same weights."""
    torch.manual_seed(seed)
    weight, x = torch.randn(outs, ins), torch.randn(1, 40, ins)
    bias = torch.randn(outs) if has_bias else None
    kernels.use(None)
    expected = linear_of(weight, bias, form)(x)[:, :rows]
    kernels.use_compiled(CACHE, threads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = linear_of(weight, bias, form)(x[:, :rows])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", ["model", "bf16", "int8"])
def test_a_row_s_products_are_the_same_to_the_bit_beside_any_others(
    form: WeightForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 20, 61)
    kernels.use_compiled(CACHE, threads=2)
    monkeypatch.setattr(panels, "quick_rows", lambda *_: math.inf)
    linear = linear_of(torch.randn(83, 61), None, form)
    alone = torch.cat([linear(x[:, row : row + 1]) for row in range(20)], dim=1)
    for rows in range(1, 21):
        assert torch.equal(linear(x[:, :rows]), alone[:, :rows])
    assert linear(x[:, :0]).shape == (1, 0, 83)


@pytest.mark.parametrize("form", ["bf16", "int8"])
@pytest.mark.parametrize("limit", [1, panels.FEW_ROWS, 32])
def test_rows_are_multiplied_by_torch_from_where_on_that_is_quicker(
    form: WeightForm, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(83, 61), torch.randn(1, limit + 1, 61)
    by_torch: list[int] = []
    bind = linears._linear_in_own_dtype

    def counted(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        run = bind(weight, bias)

        def run_counted(x: torch.Tensor) -> torch.Tensor:
            by_torch.append(x.shape[1])
            return run(x)

        return run_counted

    monkeypatch.setattr(linears, "_linear_in_own_dtype", counted)
    monkeypatch.setattr(panels, "quick_rows", lambda *_: limit)
    kernels.use_compiled(CACHE, threads=1)
    linear = linear_of(weight, None, form)
    close(linear(x[:, :-1]), linear(x)[:, :-1], atol=1e-4)
    assert by_torch == [limit + 1]


@pytest.mark.parametrize(
    ("lanes", "weight_bytes", "threads", "rows"),
    [
        (8, 2, 2, math.inf),
        (8, 4, 2, math.inf),
        (8, 1, 3, panels.FEW_ROWS),
        (8, 4, 3, 0),
        (16, 2, 1, math.inf),
        (16, 1, 2, 32),
        (16, 2, 4, panels.FEW_ROWS),
        (16, 4, 1, 0),
        (4, 2, 1, panels.FEW_ROWS),
        (4, 4, 1, 0),
    ],
)
def test_compiled_kernels_take_as_many_rows_as_they_were_measured_to_be_quick_for(
    lanes: int, weight_bytes: int, threads: int, rows: float
) -> None:
    assert panels.quick_rows(weight_bytes, threads, lanes) == rows


@pytest.mark.parametrize("is_compiled", [True, False])
def test_float32_weights_are_compiled_only_where_that_takes_no_second_copy(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panels, "quick_rows", lambda *_: math.inf if is_compiled else 0)
    kernels.use_compiled(CACHE, threads=2)
    bound: list[torch.Tensor] = []
    bind = linears._linear_in_own_dtype

    def watched(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        bound.append(weight)
        return bind(weight, bias)

    monkeypatch.setattr(linears, "_linear_in_own_dtype", watched)
    weight, x = torch.randn(83, 61), torch.randn(1, 40, 61)
    close(linear_of(weight, None, "model")(x), x @ weight.T, atol=1e-4)
    assert (not bound) == is_compiled
    assert compiled_rows("model", torch.float32) == (math.inf if is_compiled else 0)
    linear_of(weight.bfloat16(), None, "model")
    assert bound[-1].dtype is torch.bfloat16, "bf16 beside bf16 is oneDNN's"


OTHER_REGISTERS = """
import sys
import torch
from common.model.cpu import panels

panels.LANES, panels.BLOCK_ROWS = map(int, sys.argv[1:])
panels.PANEL = panels.VECTORS * panels.LANES
from common.model.cpu.products import multiply_bytes, multiply_floats, multiply_halves

torch.manual_seed(0)
shapes = [(5, 7, 1, 1), (83, 61, 2, 3), (64, 40, 3, 2), (70, 9, 7, 2), (129, 20, 17, 5)]
shapes += [(33, 11, panels.BLOCK_ROWS - 1, 1), (65, 13, panels.BLOCK_ROWS, 2)]
for outs, ins, rows, parts in shapes:
    x, scales = torch.randn(rows, ins), torch.rand(outs)
    floats = torch.randn(outs, ins)
    halves, bytes_ = floats.bfloat16(), torch.randint(-127, 128, (outs, ins)).to(torch.int8)
    for multiply, weight, factors in (
        (multiply_floats, floats, None),
        (multiply_halves, halves, None),
        (multiply_bytes, bytes_, scales),
    ):
        memory, laid = torch.full((rows * outs + 64,), torch.nan), panels.panels_of(weight)
        output = memory[: rows * outs].view(rows, outs)
        addresses = laid.data_ptr(), x.data_ptr(), output.data_ptr()
        scale = 0 if factors is None else factors.data_ptr()
        for part in range(parts):
            multiply(*addresses, outs, ins, rows, scale, part, parts)
        expected = x @ weight.float().T * (1.0 if factors is None else factors)
        torch.testing.assert_close(output, expected, atol=1e-3, rtol=1e-4)
        assert memory[rows * outs :].isnan().all()
print("same")
"""


@pytest.mark.parametrize(("lanes", "block_rows"), [(4, 6), (4, 8), (8, 6), (16, 14)])
def test_products_are_the_same_by_registers_of_any_size(lanes: int, block_rows: int) -> None:
    """This machine's have one; what is laid out for others runs here by more instructions."""
    command = [sys.executable, "-c", OTHER_REGISTERS, str(lanes), str(block_rows)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "same\n", done.stderr


@pytest.mark.parametrize(
    ("triple", "features", "registers"),
    [
        ("x86_64-unknown-linux-gnu", {"avx512f": True, "avx2": True}, (16, 32)),
        ("x86_64-unknown-linux-gnu", {"avx512f": False, "avx2": True}, (8, 16)),
        ("x86_64-unknown-linux-gnu", {}, (4, 16)),
        ("aarch64-unknown-linux-gnu", {"neon": True}, (4, 32)),
    ],
)
def test_panels_are_as_wide_as_the_processor_s_registers(
    triple: str, features: dict[str, bool], registers: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llvm, "get_default_triple", lambda: triple)
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: features)
    assert panels.registers_here() == registers


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([(4, 4), (6, 2), (3, 1)]),
    st.sampled_from([None, 5, 40]),
    st.sampled_from([None, 3.0]),
    st.booleans(),
    FORMS,
)
def test_decode_attention(
    seed: int,
    block_size: int,
    heads: tuple[int, int],
    window: int | None,
    softcap: float | None,
    has_chunk: bool,
    form: torch.dtype,
) -> None:
    """Sequences of any length in blocks in any order, the history of some empty, several steps; beside a
    prompt's chunk, too. In bf16 it is about as near to what fp32 makes of the same numbers as torch's is."""
    chance = random.Random(seed)
    rows, per_row = chance.randint(1, 5), 1 + 60 // block_size
    blocks = list(range(rows * per_row))
    chance.shuffle(blocks)
    tables = [tuple(blocks[row * per_row : (row + 1) * per_row]) for row in range(rows)]
    starts = [chance.choice([0, 1, chance.randint(0, 50)]) for _ in range(rows)]
    spec = AttentionSpec(heads[0], heads[1], 8, 0.4, window=window, softcap=softcap)
    chunk = 3 if has_chunk else 1

    def outputs(computed: torch.dtype) -> torch.Tensor:
        """Of numbers as ``form`` has them."""
        torch.manual_seed(seed)

        def made(*shape: int) -> torch.Tensor:
            return torch.randn(shape).to(form).to(computed)

        pool = KVPool(
            KVLayout(1, heads[1], 8, block_size, computed.itemsize),
            len(blocks),
            computed,
            torch.device("cpu"),
        )
        pool.tensor.view(computed).copy_(made(pool.nbytes // computed.itemsize))
        attention = LocalAttention(pool, (spec,))
        results = []
        tokens = rows - 1 + chunk
        place = torch.full((tokens, heads[0], 8), torch.nan, dtype=computed)
        for step in range(3):
            chunks = [
                SequenceChunk(table, start + step, 1) for table, start in zip(tables, starts, strict=True)
            ]
            chunks[-1] = SequenceChunk(tables[-1], starts[-1] + step, chunk)
            attention.begin(chunks, place if step == 1 else None)
            attention.send_q(0, made(tokens, heads[0], 8) * 3)
            attention.send_kv(0, made(tokens, heads[1] * 2, 8)[:, : heads[1]], made(tokens, heads[1], 8))
            output = attention.receive(0)
            is_compiled = kernels.compiled() is not None and not has_chunk
            assert (output is place) == (step == 1 and is_compiled)
            results.append(output.float())
        return torch.stack(results)

    compiled, by_torch = by_both(lambda: outputs(form))
    expected = outputs(torch.float32)
    if form is torch.float32:
        close(compiled, by_torch)
    off, torch_off = ((each - expected).abs().max().item() for each in (compiled, by_torch))
    assert off <= max(1.5 * torch_off, 2 * expected.abs().max().item() / 256)


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("block", [-1, 4])
def test_a_block_that_is_not_of_the_pool_is_refused(is_compiled: bool, block: int) -> None:
    if is_compiled:
        kernels.use_compiled(CACHE)
    try:
        pool = KVPool(KVLayout(1, 1, 8, 4, 4), 4, torch.float32, torch.device("cpu"))
        attention = LocalAttention(pool, (AttentionSpec(1, 1, 8, 1.0),))
        with pytest.raises(ValueError, match="leaves the pool of 4 blocks"):
            attention.begin([SequenceChunk((2, block), 5, 1)])
    finally:
        kernels.use(None)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gpt2", "phi3"])
def test_a_models_steps_give_the_same_logits(family: str, tiny: MakeTiny) -> None:
    program = tiny(family).program
    spec = program.spec

    def logits() -> torch.Tensor:
        layout = KVLayout(spec.layers, spec.kv_heads, spec.head_dim, 4, 4)
        pool = KVPool(layout, 16, torch.float32, torch.device("cpu"))
        attention = LocalAttention(pool, program.attention_specs)
        results = []
        for start, tokens in ((0, [5, 9, 2, 7]), (4, [3]), (5, [8]), (6, [1])):
            attention.begin([SequenceChunk((2, 0, 5), start, len(tokens))])
            positions = torch.arange(start, start + len(tokens))
            rows = torch.arange(len(tokens))
            results.append(program.run(torch.tensor(tokens), positions, attention, rows))
        return torch.cat(results)

    compiled, expected = by_both(logits)
    close(compiled, expected)


@settings(max_examples=10, deadline=None)
@given(st.integers(65, 90), FORMS, st.integers(0, 1 << 30))
def test_decode_attention_of_many_rows(rows: int, form: torch.dtype, seed: int) -> None:
    spec, layout = AttentionSpec(4, 2, 8, 0.4), KVLayout(1, 2, 8, 4, form.itemsize)

    def output() -> torch.Tensor:
        torch.manual_seed(seed)
        pool = KVPool(layout, 2 * rows, form, torch.device("cpu"))
        pool.tensor.view(form).normal_()
        attention = LocalAttention(pool, (spec,))
        attention.begin([SequenceChunk((row, rows + row), row % 8, 1) for row in range(rows)])
        attention.send_q(0, torch.randn(rows, 4, 8).to(form))
        attention.send_kv(0, *torch.randn(2, rows, 2, 8).to(form))
        return attention.receive(0).clone()

    is_near(*by_both(output))


def test_what_is_not_of_the_pool_s_dtype_is_refused() -> None:
    kernels.use_compiled(CACHE)
    try:
        pool = KVPool(KVLayout(1, 1, 8, 4, 2), 4, torch.bfloat16, torch.device("cpu"))
        attention = LocalAttention(pool, (AttentionSpec(1, 1, 8, 1.0),))
        q = torch.ones(1, 1, 8, dtype=torch.bfloat16)
        attention.begin([SequenceChunk((2,), 1, 1)])
        with pytest.raises(ValueError, match=r"float32 beside a pool of .*bfloat16"):
            attention.send_q(0, q.float())
        attention.begin([SequenceChunk((2,), 1, 1)], torch.empty(1, 1, 8))
        attention.send_q(0, q)
        with pytest.raises(ValueError, match=r"an output of \(1, 1, 8\) in .*float32"):
            attention.send_kv(0, q, q)
    finally:
        kernels.use(None)


def test_a_layer_s_small_operators_are_few_calls(tiny: MakeTiny) -> None:
    """Of LLaMA: no product, sum or turned copy is left between the linears of a slice."""
    programs = tiny("llama").directory.parent / "cache" / "programs"
    source = next(programs.glob("llama-*/slices.py")).read_text()
    slices = [part for part in source.split("\n\n\ndef ") if part.startswith("slice_")]
    middle = [part for part in slices if "received" in part.split("\n")[1] and "send_q" in part]
    assert middle
    for part in middle:
        assert part.count("kernels.add_rms_norm(") == part.count("kernels.rotate_heads(") == 2
        assert part.count("kernels.silu_multiply_halves(") == 1
        assert not any(word in part for word in ("torch.", "transpose", " * ", " + "))


def test_kernels_are_kept_where_the_cache_is_and_found_again(tmp_path: Path) -> None:
    stages: list[str] = []
    directory = compile_kernels(tmp_path, stages.append)
    assert directory.parent == tmp_path / "kernels"
    assert compile_kernels(tmp_path, stages.append) == directory
    assert stages == ["compiling kernels"]


ALONE = """
import sys
from pathlib import Path
import torch
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.model import kernels
from common.model.attention import LocalAttention
from common.model.interface import SequenceChunk
from common.spec import AttentionSpec

kernels.use_compiled(Path(sys.argv[1]).expanduser())
pool = KVPool(KVLayout(1, 1, 64, 256, 4), 2, torch.float32, torch.device("cpu"))
attention = LocalAttention(pool, (AttentionSpec(3, 1, 64, 0.1, softcap=9.0),))
for start in range(300):
    attention.begin([SequenceChunk((1, 0), start, 1)])
    attention.send_q(0, torch.ones(1, 3, 64))
    attention.send_kv(0, torch.ones(1, 1, 64), torch.full((1, 1, 64), 7.0))
    assert torch.allclose(attention.receive(0), torch.tensor(7.0))
assert "numba" not in sys.modules
print("computed")
"""


def test_a_process_that_only_computes_needs_no_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(CACHE)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "computed\n"), done.stderr
