"""The compiled kernels against torch's operators: the same numbers, whatever the shapes and strides."""

import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.model import kernels
from common.model.attention import LocalAttention
from common.model.cpu.library import compile_kernels
from common.model.interface import SequenceChunk
from common.spec import AttentionSpec
from tests.common.model.conftest import MakeTiny

pytestmark = pytest.mark.usefixtures("both_ways")

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
