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
BLOCK_ROWS = 6 if _REGISTERS == 16 else 8
"""Rows whose sums stay in registers, beside a panel's weights of one input. More are computed in blocks as
even as can be: of five and more no block has as few rows as ``STREAMS`` knows."""
FEW_ROWS = 12
"""As many rows take no longer than by oneDNN wherever that was measured (docs/benchmarks.md)."""
TAKES_ALL = LANES == 8
"""Whether passes of any number of rows hardly do, with one thread or two (AVX2; of other registers it was not
measured)."""


def panels_of(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` [outs, ins] as [panels, ins, PANEL] in its dtype. Of two bytes each, an output's lie beside
    those of the one ``LANES`` further: as the halves of a word each comes to its register at once."""
    outs, ins = weight.shape
    panels = MOST_STREAMS * math.ceil(outs / (MOST_STREAMS * PANEL))
    filled = F.pad(weight, (0, 0, 0, panels * PANEL - outs)).view(panels, VECTORS, LANES, ins)
    order = (0, 3, 2, 1) if weight.itemsize == 2 else (0, 3, 1, 2)
    return filled.permute(order).reshape(panels, ins, PANEL).contiguous()
