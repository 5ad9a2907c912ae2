"""A linear layer as a callable bound to its weight, in the form that runs fastest here.

- ``"model"`` keeps the checkpoint's values. On a CPU compiled kernels read those in float32 where they take
  all rows; others are reordered once for oneDNN where its private operators exist and agree with ``F.linear``
  (tested at load, plain otherwise).
- ``"bf16"``, for CPUs that multiply bf16 slowly: values rounded to bf16, products in the activations' dtype.
  Compiled kernels read bf16, torch's operator does so for one row, itself rounded to bf16; what these do not
  compute reads the same values unpacked and reordered.
- ``"int8"`` is weight-only: one byte a weight and a scale per output row. Compiled kernels read the bytes;
  with torch's operator few rows do, themselves rounded to bf16, and more read the same values as above.
- ``"w8a8"`` rounds each token's activations to a byte as well, with a scale per token, for VNNI/AMX products.
  A token's result does not depend on the tokens beside it. It costs about 1 % of error in each product.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from common.errors import ModelError
from common.model.cpu.jobs import MOST_PARTS, MULTIPLY_BYTES, MULTIPLY_FLOATS, MULTIPLY_HALVES
from common.model.kernels import compiled, most_threads
from common.model.precision import WeightForm

Linear = Callable[[torch.Tensor], torch.Tensor]

PART_BYTES = 1 << 17
"""A product is shared between cores in parts of at least as much, read again for each block of rows: some
10 µs."""
INT8_ROWS = 8
"""Up to as many rows torch's operator reads the bytes: measured 60 against 66 ms of linears at 8 rows, 86
against 72 at 12 (docs/benchmarks.md)."""
UINT8_ZERO = 128
WEIGHT_BYTES: dict[WeightForm, int] = {"model": 4, "bf16": 2, "int8": 1}
"""As compiled kernels read them."""
SMALLEST_SCALE = 1e-8


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None, form: WeightForm) -> Linear:
    """``x [..., in] → [..., out]`` for ``weight`` [out, in]. Raises ModelError where the form cannot run."""
    weight = weight.contiguous()
    if form == "model":
        if weight.device.type == "cpu" and compiled_rows(form, weight.dtype):
            return _with_bias(_compiled(MULTIPLY_FLOATS, weight), bias)
        return _linear_in_own_dtype(weight, bias)
    if weight.device.type != "cpu":
        raise ModelError(f'weights = "{form}": needs device = "cpu", use "model"')
    if form == "bf16":
        return _bf16_linear(weight, bias)
    if form == "int8":
        return _int8_linear(weight, bias)
    if not can_multiply_bytes():
        raise ModelError('weights = "w8a8": needs oneDNN\'s quantized linear, use "int8" or "model"')
    return _w8a8_linear(weight, bias)


def compiled_rows(form: WeightForm, dtype: torch.dtype) -> float:
    """Up to so many of ``dtype`` are multiplied by compiled kernels, which are the same for any number: as
    long as these are as quick as oneDNN on the threads that there are."""
    if form == "w8a8" or compiled() is None or dtype is not torch.float32:
        return 0
    from common.model.cpu.panels import quick_rows

    return quick_rows(WEIGHT_BYTES[form], most_threads())


def _linear_in_own_dtype(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    if weight.device.type == "cpu" and can_prepack(weight.dtype):
        return _packed_linear(weight, bias)
    return functools.partial(F.linear, weight=weight, bias=bias)


def _packed_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    pointwise = torch.ops.mkldnn._linear_pointwise.default

    def run(x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = pointwise(x, packed, bias, "none", [], "")
        return output

    return run


def _bf16_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    rounded = weight.to(torch.bfloat16)

    def many_rows() -> Linear:
        return _linear_in_own_dtype(rounded.to(weight.dtype), bias)

    limit = compiled_rows("bf16", weight.dtype)
    if limit:
        return _by_compiled_rows(limit, _with_bias(_compiled(MULTIPLY_HALVES, rounded), bias), many_rows)

    def one_row(x: torch.Tensor) -> torch.Tensor:
        product = torch.mv(rounded, x.to(torch.bfloat16).view(-1))
        return product.to(x.dtype).view(*x.shape[:-1], -1)

    return _by_rows(1, _with_bias(one_row, bias), many_rows())


def _by_compiled_rows(limit: float, few: Linear, many: Callable[[], Linear]) -> Linear:
    """``many`` takes a second copy of the weight: none is made where ``few`` takes all rows."""
    return few if limit == math.inf else _by_rows(limit, few, many())


def _compiled(kind: int, weight: torch.Tensor, scales: torch.Tensor | None = None) -> Linear:
    """By ``weight`` [out, in] as it is, of float32 rows, where ``compiled_rows`` are some."""
    kernels = compiled()
    assert kernels is not None
    from common.model.cpu.crew import own_crew
    from common.model.cpu.panels import BLOCK_ROWS, panels_of

    outs, ins = weight.shape
    panels = panels_of(weight)
    size, weight_address = panels.nbytes, panels.data_ptr()
    scales_address = 0 if scales is None else scales.data_ptr()
    held = panels, scales

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        output = torch.empty(*x.shape[:-1], outs)
        rows = x.numel() // ins
        read = size * math.ceil(rows / BLOCK_ROWS)
        parts = max(2, min(MOST_PARTS, read // PART_BYTES))
        addresses = kind, weight_address, x.data_ptr(), output.data_ptr()
        own_crew(kernels).run((*addresses, outs, ins, rows, scales_address), parts, held)
        return output

    return run


def _int8_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    rounded, row_scales = _rounded_to_bytes(weight)
    # The operator wants scales in the activations' bf16; many rows must see the very same weights.
    scales = row_scales.to(torch.bfloat16)

    def many_rows() -> Linear:
        return _linear_in_own_dtype((rounded * scales.float()[:, None]).to(weight.dtype), bias)

    limit = compiled_rows("int8", weight.dtype)
    if limit:
        few = _compiled(MULTIPLY_BYTES, rounded, scales.float())
        return _by_compiled_rows(limit, _with_bias(few, bias), many_rows)
    multiply = torch.ops.aten._weight_int8pack_mm.default

    def few_rows(x: torch.Tensor) -> torch.Tensor:
        rows = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
        product: torch.Tensor = multiply(rows, rounded, scales)
        return product.to(x.dtype).view(*x.shape[:-1], -1)

    return _by_rows(INT8_ROWS, _with_bias(few_rows, bias), many_rows())


def _w8a8_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    rounded, row_scales = _rounded_to_bytes(weight)
    packed = torch.ops.onednn.qlinear_prepack(rounded, None)
    zero_points = torch.zeros(weight.shape[0], dtype=torch.int64)
    multiply = torch.ops.onednn.qlinear_pointwise.default

    def run(x: torch.Tensor) -> torch.Tensor:
        scales = x.abs().amax(dim=-1, keepdim=True).float().mul_(1 / 127).clamp_(min=SMALLEST_SCALE)
        # Truncation after adding a half is rounding; 128 is the zero of unsigned bytes.
        bytes_x = torch.div(x, scales).add_(UINT8_ZERO + 0.5).to(torch.uint8)
        product: torch.Tensor = multiply(
            bytes_x,
            1.0,
            UINT8_ZERO,
            packed,
            row_scales,
            zero_points,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return product.mul_(scales).to(x.dtype)

    return _with_bias(run, bias)


def _rounded_to_bytes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] int8 and the [out] float32 scales that undo it."""
    row_scales = (weight.float().abs().amax(dim=1) / 127).clamp_(min=SMALLEST_SCALE)
    return (weight.float() / row_scales[:, None]).round_().to(torch.int8), row_scales


def _by_rows(limit: float, few: Linear, many: Linear) -> Linear:
    def run(x: torch.Tensor) -> torch.Tensor:
        return few(x) if x.numel() <= limit * x.shape[-1] else many(x)

    return run


def _with_bias(linear: Linear, bias: torch.Tensor | None) -> Linear:
    return linear if bias is None else lambda x: linear(x).add_(bias)


@functools.cache
def can_prepack(dtype: torch.dtype) -> bool:
    """Whether oneDNN's private operators are there and compute what F.linear does."""
    return _agrees(_packed_linear, dtype, 1e-4 if dtype == torch.float32 else 0.1)


@functools.cache
def can_multiply_bytes() -> bool:
    """Whether oneDNN's quantized linear is there and comes as close as rounding allows."""
    return _agrees(_w8a8_linear, torch.float32, 0.5)


def _agrees(
    bind: Callable[[torch.Tensor, torch.Tensor | None], Linear], dtype: torch.dtype, tolerance: float
) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 32, generator=generator).to(dtype) for n in (48, 5))
    try:
        output = bind(weight, None)(x)
    except (RuntimeError, AttributeError):  # torch lacks the operator, or it refuses this processor
        return False
    return torch.allclose(output.float(), F.linear(x, weight).float(), atol=tolerance, rtol=tolerance)
