"""How fast this machine is just now: what a fixed piece of work takes on one core.

A virtual machine computes at another pace every few minutes, by what its neighbours do (40 % within an hour
was measured, of all passes alike). Whoever compares times of two hours needs the pace of each.
"""

import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SIDE, MATRICES = 1024, 64
"""128 MiB of weights, as those of a small model: more than caches of a core hold."""
ROWS = (8, 256)
"""As in a decode step, which waits for memory, and in a chunk of a prompt, which computes."""


class Probe:
    """``seconds`` of it: medians over ``repeats``, of both kinds of rows together."""

    def __init__(self) -> None:
        import torch

        made = torch.Generator().manual_seed(0)

        def matrix(rows: int) -> "Tensor":
            return torch.randn(rows, SIDE, generator=made).bfloat16()

        self._weights = [matrix(SIDE) for _ in range(MATRICES)]
        self._inputs = [matrix(rows) for rows in ROWS]

    def seconds(self, repeats: int = 15) -> float:
        """Some 70 ms each, on a core of 2023's servers."""
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return sum(self._median_s(each, repeats) for each in self._inputs)
        finally:
            torch.set_num_threads(threads)

    def _median_s(self, rows: "Tensor", repeats: int) -> float:
        from torch.nn.functional import linear

        taken_s = []
        for _ in range(repeats):
            began_s = time.perf_counter()
            for weights in self._weights:
                linear(rows, weights)
            taken_s.append(time.perf_counter() - began_s)
        return statistics.median(taken_s)
