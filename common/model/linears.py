"""A linear layer as a callable bound to its weight, in the form that runs fastest here.

``weights = "model"`` keeps the checkpoint's values; on a CPU they are reordered once for oneDNN where its
private operators exist and agree with ``F.linear`` (tested at load, plain otherwise).

``weights = "int8"`` rounds weights to one byte with a scale per output row, and each token's activations to
one byte with a scale per token, for VNNI/AMX products: decode waits for a quarter of fp32's memory traffic.
A token's result does not depend on the tokens beside it. It costs about 1 % of error in each product.
"""

import functools
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F

from common.errors import ModelError

Linear = Callable[[torch.Tensor], torch.Tensor]
WeightForm = Literal["model", "int8"]

UINT8_ZERO = 128
SMALLEST_SCALE = 1e-8


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None, form: WeightForm) -> Linear:
    """``x [..., in] → [..., out]`` for ``weight`` [out, in]. Raises ModelError where int8 cannot run."""
    weight = weight.contiguous()
    if form == "int8":
        if weight.device.type != "cpu" or not can_multiply_int8():
            raise ModelError('weights = "int8": needs a CPU and oneDNN\'s quantized linear, use "model"')
        return _int8_linear(weight, bias)
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


def _int8_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    row_scales = (weight.float().abs().amax(dim=1) / 127).clamp_(min=SMALLEST_SCALE)
    rounded = (weight.float() / row_scales[:, None]).round_().to(torch.int8)
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
        output = product.mul_(scales).to(x.dtype)
        return output if bias is None else output + bias

    return run


@functools.cache
def can_prepack(dtype: torch.dtype) -> bool:
    """Whether oneDNN's private operators are there and compute what F.linear does."""
    return _agrees(_packed_linear, dtype, 1e-4 if dtype == torch.float32 else 0.1)


@functools.cache
def can_multiply_int8() -> bool:
    """Whether oneDNN's quantized linear is there and comes as close as rounding allows."""
    return _agrees(_int8_linear, torch.float32, 0.5)


def _agrees(
    bind: Callable[[torch.Tensor, torch.Tensor | None], Linear], dtype: torch.dtype, tolerance: float
) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 32, generator=generator).to(dtype) for n in (48, 5))
    try:
        output = bind(weight, None)(x)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.allclose(output.float(), F.linear(x, weight).float(), atol=tolerance, rtol=tolerance)
