"""How weights lie for products of few rows: in panels, whose outputs fill some of the processor's registers.

A panel holds, input after input, the weights of ``PANEL`` outputs; the last ones are filled up with zeros.
"""

import math

import llvmlite.binding as llvm
import torch
import torch.nn.functional as F

VECTORS = 2
"""Of outputs, in a panel."""
MOST_STREAMS = 4
"""So many panels are read at once, each a part of the weight away from the next."""


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
BLOCK_ROWS = 6 if _REGISTERS == 16 else 8
"""Rows whose sums stay in registers, beside a panel's weights of one input."""
MOST_ROWS = None if LANES == 8 else 32
"""Up to as many rows are multiplied so. None: all, as oneDNN takes no less time for any number of them (AVX2,
docs/benchmarks.md). Of other registers only few rows are known, by an older kernel."""


def panels_of(weight: torch.Tensor) -> torch.Tensor:
    """Of ``weight`` [outs, ins]: [panels, ins, PANEL] of what it is of. Of two bytes each, an output's lie
    beside those of the one ``LANES`` further: as the halves of a word each comes to its register at once."""
    outs, ins = weight.shape
    panels = MOST_STREAMS * math.ceil(outs / (MOST_STREAMS * PANEL))
    filled = F.pad(weight, (0, 0, 0, panels * PANEL - outs)).view(panels, VECTORS, LANES, ins)
    order = (0, 3, 2, 1) if weight.itemsize == 2 else (0, 3, 1, 2)
    return filled.permute(order).reshape(panels, ins, PANEL).contiguous()
