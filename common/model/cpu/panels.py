"""How weights lie for compiled products: in panels, whose outputs fill some of the processor's registers.

A panel holds, input after input, the weights of ``PANEL`` outputs; the last ones are filled up with zeros. Of
processors that keep a word's lower half first, as all do that torch is built for.
"""

import math

import llvmlite.binding as llvm
import torch
import torch.nn.functional as F

VECTORS = 2
"""Of outputs, in a panel."""
STREAMS = {1: 4, 2: 2}
"""How many panels are read at once, each a part of the weight away from the next, for so many rows; one for
more."""
MOST_STREAMS = max(STREAMS.values())


def registers_here() -> tuple[int, int]:
    """How many float32 a register of this processor holds, and how many registers it has."""
    if not llvm.get_default_triple().startswith(("x86_64", "i686")):
        return 4, 32
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return 16, 32
    return (8, 16) if features.get("avx2") else (4, 16)


LANES, _REGISTERS = registers_here()
PANEL = VECTORS * LANES
BLOCK_ROWS = 6 if _REGISTERS == 16 else 14 if LANES == 16 else 8
"""Rows whose sums stay in registers, beside a panel's weights of one input; of Arm's it was not measured.
More are computed in blocks as even as can be: of five and more none has as few as ``STREAMS`` knows."""
FEW_ROWS = 12
"""As many rows take no longer than by oneDNN wherever that was measured (docs/benchmarks.md)."""
WEIGHTS_AT_ONCE = 1 << 20
"""Are laid into panels, bf16 by words: a third to half of the time that their halves take one by one."""


def quick_rows(weight_bytes: int, threads: int, lanes: int = LANES) -> float:
    """Up to so many rows are multiplied here with weights of so many bytes, where oneDNN takes longer or
    hardly less: measured with AVX2 and AVX-512 on one thread and two (docs/benchmarks.md; int8 as bf16), else
    ``FEW_ROWS``. Of float32 weights all or none: what is left to oneDNN takes another copy, as large as
    the first."""
    if lanes == 8 and threads <= 2:
        return math.inf
    if weight_bytes == 4:
        return 0
    return {1: math.inf, 2: 32}.get(threads, FEW_ROWS) if lanes == 16 else FEW_ROWS


def panels_of(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` [outs, ins], float32, bf16 or int8, as [panels, ins, PANEL]. Of bf16, an output's lie beside
    those of the one ``LANES`` further: as the halves of a word each comes to its register at once."""
    outs, ins = weight.shape
    panels = MOST_STREAMS * math.ceil(outs / (MOST_STREAMS * PANEL))
    if outs < panels * PANEL:
        weight = F.pad(weight, (0, 0, 0, panels * PANEL - outs))
    if weight.itemsize != 2:
        return weight.view(panels, PANEL, ins).transpose(1, 2).contiguous()
    halves = weight.view(torch.int16).view(panels, VECTORS, LANES, ins)
    laid = torch.empty(panels, ins, LANES, dtype=torch.int32)
    step = max(1, WEIGHTS_AT_ONCE // (PANEL * ins))
    for first in range(0, panels, step):
        low, high = halves[first : first + step].to(torch.int32).unbind(1)
        words = low.bitwise_and_(0xFFFF).bitwise_or_(high.bitwise_left_shift_(16))
        laid[first : first + step] = words.transpose(1, 2)
    return laid.view(weight.dtype)
