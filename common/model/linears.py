"""A linear layer as a callable bound to its weight, in the form that runs fastest here.

``weights = "model"`` keeps the checkpoint's values; on a CPU they are reordered once for oneDNN where its
private operators exist and agree with ``F.linear`` (tested at load, plain otherwise). ``"int8"`` keeps one
byte a weight and a scale a row, for decode on machines that wait for memory.
"""

import functools
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F

Linear = Callable[[torch.Tensor], torch.Tensor]
WeightForm = Literal["model", "int8"]


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None, form: WeightForm) -> Linear:
    """``x [..., in] → [..., out]`` for ``weight`` [out, in]."""
    if form == "int8" and weight.device.type == "cpu":
        return _int8_linear(weight, bias)
    if weight.device.type == "cpu" and can_prepack(weight.dtype):
        return _packed_linear(weight, bias)
    return _plain_linear(weight, bias)


def _plain_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    weight = weight.contiguous()

    def run(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias)

    return run


def _packed_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    pointwise = torch.ops.mkldnn._linear_pointwise.default

    def run(x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = pointwise(x, packed, bias, "none", [], "")
        return output

    return run


def _int8_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    scales = (weight.float().abs().amax(dim=1) / 127).clamp_(min=1e-8)
    quantized = (weight.float() / scales[:, None]).round_().to(torch.int8).contiguous()
    scales = scales.to(weight.dtype)
    multiply = torch.ops.aten._weight_int8pack_mm.default

    def run(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        output: torch.Tensor = multiply(rows, quantized, scales).view(*x.shape[:-1], -1)
        return output if bias is None else output + bias

    return run


@functools.cache
def can_prepack(dtype: torch.dtype) -> bool:
    """Whether oneDNN's private operators are there and compute what F.linear does."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 32, generator=generator).to(dtype) for n in (48, 5))
    try:
        output = _packed_linear(weight, None)(x)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    return torch.allclose(output.float(), F.linear(x, weight).float(), atol=tolerance, rtol=tolerance)
