"""Rows of nothing beside a batch's own, where products are quicker with a whole number of tiles.

With AMX oneDNN's bf16 products take 16 rows at once: 229 take a tenth longer than 240. Without AMX every row
more takes as long as any. Either way a number of rows that a process has not had before costs oneDNN 3 to 15
ms of making kernels for it (docs/benchmarks.md). Attention never sees the rows beside.
"""

import torch

from common.model.interface import AttentionIO
from common.model.precision import has_amx

TILE_ROWS = 16
LEAST_ROWS = 33
"""Fewer are bound by the weights: their time is the same or grows with what is beside them."""
MOST_OWN_ROWS = 64
"""Of more the kernels are a small part of what a pass takes."""


def rows_beside(rows: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many to add to a batch of ``rows``."""
    if rows < LEAST_ROWS or dtype is not torch.bfloat16 or device.type != "cpu" or not has_amx():
        return 0
    return -rows % TILE_ROWS


def own_rows(most: int, dtype: torch.dtype, device: torch.device, compiled: float = 0) -> list[int]:
    """The numbers of rows, up to ``most``, that batches have with those beside and whose kernels are worth
    making before they come: whole tiles, and few, of more than ``compiled`` (``linears.compiled_rows``). The
    last ones made are kept longest."""
    if device.type != "cpu":
        return []
    beside = rows_beside(LEAST_ROWS, dtype, device)
    tiles = range(LEAST_ROWS + beside, most + 1, TILE_ROWS) if beside else ()
    few = range(1, min(most, LEAST_ROWS - 1 if beside else MOST_OWN_ROWS) + 1)
    return [rows for rows in (*tiles, *few) if rows > compiled]


def with_rows(values: torch.Tensor, beside: int) -> torch.Tensor:
    """``values`` [T], and zeros behind them."""
    return torch.cat((values, values.new_zeros(beside)))


class AttentionOfRows:
    """``attention`` of the first ``rows`` of a batch; the others' output is zero."""

    def __init__(self, attention: AttentionIO, rows: int, beside: int) -> None:
        self._attention = attention
        self._rows = rows
        self._beside = beside
        self._output: torch.Tensor | None = None

    def send_q(self, layer: int, q: torch.Tensor) -> None:
        self._attention.send_q(layer, q[: self._rows])

    def send_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self._attention.send_kv(layer, k[: self._rows], v[: self._rows])

    def receive(self, layer: int) -> torch.Tensor:
        """The same memory every time: a layer's is used up when the next one's is asked for."""
        own = self._attention.receive(layer)
        output = self._output
        if output is None:
            output = self._output = own.new_zeros(self._rows + self._beside, *own.shape[1:])
        output[: self._rows] = own
        return output
