"""Products of compiled kernels, whatever their weights are, and whose they are: some rows' or all."""

import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import llvmlite.binding as llvm
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.model import kernels, linears
from common.model.cpu import panels
from common.model.linears import Linear, compiled_rows, linear_of
from common.model.precision import WeightForm

pytestmark = pytest.mark.usefixtures("both_ways")

CACHE = Path("~/.cache/lamella")
close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)


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
