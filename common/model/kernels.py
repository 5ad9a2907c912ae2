"""Operators that a model's slices call: compiled for few rows where that is on, torch's otherwise.

Both forms compute the same; the compiled ones cost a call of 1 to 4 µs instead of 12 to 25. They take fp32 or
bf16 on the host, of at most ``FEW_ROWS`` rows, compute in fp32 and round once. Off until ``use_compiled``:
whoever never decodes needs no numba.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from common.model.cpu.library import KernelLibrary, Operators

FEW_ROWS = 64

_compiled: "KernelLibrary | None" = None
_most_threads = 1


def use_compiled(cache_directory: Path, threads: int | None = None) -> None:
    """Compiles the kernels, or loads them from the cache; of the whole process. ``threads``: those that call
    them compute on so many at most; None: on all cores of this machine."""
    global _most_threads
    from common.model.cpu.library import load_kernels

    _most_threads = len(os.sched_getaffinity(0)) if threads is None else threads
    use(load_kernels(cache_directory))


def use(library: "KernelLibrary | None") -> None:
    """These kernels from now on; None leaves everything to torch."""
    global _compiled
    _compiled = library


def compiled() -> "KernelLibrary | None":
    """None while torch computes everything."""
    return _compiled


def most_threads() -> int:
    """On which whoever calls compiled kernels computes."""
    return _most_threads


def compiled_for(x: torch.Tensor, rows: int) -> "Operators | None":
    """Those that take ``x``, where it is of few rows and they are on."""
    if _compiled is None or rows > FEW_ROWS or not x.is_cpu:
        return None
    return _compiled.operators.get(x.dtype)


def rms_norm(x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As ``F.rms_norm`` over the last dimension."""
    width = shape[-1]
    rows = x.numel() // width
    operators = compiled_for(x, rows)
    if operators is None or weight.dtype != x.dtype:
        return F.rms_norm(x, list(shape), weight, eps)
    x = x.contiguous()
    output = torch.empty_like(x)
    operators.rms_norm(x.data_ptr(), weight.data_ptr(), output.data_ptr(), rows, width, eps)
    return output


def add_rms_norm(
    left: torch.Tensor, right: torch.Tensor, shape: Sequence[int], weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum, and its RMSNorm over the last dimension."""
    width = shape[-1]
    rows = left.numel() // width
    operators = compiled_for(left, rows)
    if operators is None or not left.dtype == right.dtype == weight.dtype:
        total = left + right
        return total, F.rms_norm(total, list(shape), weight, eps)
    left, right = left.contiguous(), right.contiguous()
    total, output = torch.empty_like(left), torch.empty_like(left)
    addresses = left.data_ptr(), right.data_ptr(), weight.data_ptr(), total.data_ptr(), output.data_ptr()
    operators.add_rms_norm(*addresses, rows, width, eps)
    return total, output


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``x`` [1, heads, tokens, width] by tables [1, 1, tokens, width], the sines signed:
    ``x · cos + cat(x₂, x₁) · sin``."""
    _, heads, tokens, width = x.shape
    has_rows = x.stride(3) == 1 and (heads == 1 or x.stride(1) == width)
    operators = compiled_for(x, tokens)
    if operators is None or not has_rows or not _are_tables(x, cos, sin):
        half = width // 2
        swapped = torch.cat([x[..., half:], x[..., :half]], -1)
        return torch.addcmul(x * cos, swapped, sin)
    output = torch.empty(tokens, heads, width, dtype=x.dtype)
    operators.rotate(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), output.data_ptr(), tokens, heads, width, x.stride(2)
    )
    return output.transpose(0, 1).unsqueeze(0)


def _are_tables(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """As ``rotate`` reads them beside ``x``."""
    return cos.is_contiguous() and sin.is_contiguous() and cos.dtype == sin.dtype == x.dtype


def silu_multiply(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) · up``, [1, tokens, width] each."""
    width = gate.shape[-1]
    rows = gate.numel() // width
    has_rows = gate.dim() == 3 and gate.shape[0] == 1 and gate.stride(2) == up.stride(2) == 1
    operators = compiled_for(gate, rows)
    if operators is None or not has_rows or up.dtype != gate.dtype:
        return F.silu(gate) * up
    output = torch.empty(1, rows, width, dtype=gate.dtype)
    operators.silu_multiply(
        gate.data_ptr(), up.data_ptr(), output.data_ptr(), rows, width, gate.stride(1), up.stride(1)
    )
    return output


def rotate_heads(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, first: int, heads: int
) -> torch.Tensor:
    """``rotate`` of ``heads`` that lie side by side in ``x`` [1, tokens, …] from ``first`` on → [1, tokens,
    heads, width]."""
    tokens, width = x.shape[1], cos.shape[3]
    operators = compiled_for(x, tokens)
    if operators is None or x.stride(2) != 1 or not _are_tables(x, cos, sin):
        wide = x.narrow(2, first, heads * width).view(1, tokens, heads, width).transpose(1, 2)
        return rotate(wide, cos, sin).transpose(1, 2)
    output = torch.empty(1, tokens, heads, width, dtype=x.dtype)
    operators.rotate(
        x.data_ptr() + first * x.element_size(),
        cos.data_ptr(),
        sin.data_ptr(),
        output.data_ptr(),
        tokens,
        heads,
        width,
        x.stride(1),
    )
    return output


def silu_multiply_halves(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) · up`` of ``x`` [1, tokens, 2 · width], the gate first."""
    width = x.shape[2] // 2
    tokens = x.shape[1]
    operators = compiled_for(x, tokens)
    if operators is None:
        return F.silu(x.narrow(2, 0, width)) * x.narrow(2, width, width)
    x = x.contiguous()
    output = torch.empty(1, tokens, width, dtype=x.dtype)
    gate = x.data_ptr()
    up = gate + width * x.element_size()
    operators.silu_multiply(gate, up, output.data_ptr(), tokens, width, 2 * width, 2 * width)
    return output
