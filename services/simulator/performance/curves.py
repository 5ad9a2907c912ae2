"""A function of tokens as a table that grows when asked for more: a look-up, or the sum of many, is constant
time whatever it was that the table was made from."""

from collections.abc import Callable
from functools import partial

import numpy as np

from services.simulator.performance.files import FloatArray

FIRST_CELLS = 128
SURFACE_TOKENS = 544
"""That a chunk's curves cover at first: passes of 512 tokens ask for no more."""
FIRST_CURVES = 8
"""Of a surface: a fit's look-up (``regression``) costs little more for many values than for one."""


class TokenCurve:
    """Linear between its values at every ``grid`` tokens from 0 on, which ``evaluate`` gives for an array of
    tokens. A value under 0 is a time's extrapolation gone wrong: it is 0. ``cells``: that it has at least.
    ``values``: the first ones, where somebody has asked already."""

    __slots__ = ("_cells", "_cumulative", "_evaluate", "_grid", "_limit", "_values")

    def __init__(
        self,
        evaluate: Callable[[FloatArray], FloatArray],
        grid: int,
        cells: int = FIRST_CELLS,
        values: FloatArray | None = None,
    ) -> None:
        self._evaluate = evaluate
        self._grid = grid
        self._cells = cells
        self._values: list[float] = []
        self._cumulative: list[float] = []
        self._limit = -1.0
        if values is None:
            self._grow(0)
        else:
            self._fill(values)

    def at(self, tokens: float) -> float:
        if tokens >= self._limit:
            self._grow(2 * tokens)
        grid, values = self._grid, self._values
        index = int(tokens // grid)
        value = values[index]
        return value + (values[index + 1] - value) * (tokens - index * grid) / grid

    def total(self, tokens: float, steps: int) -> float:
        """Of ``at`` at ``tokens``, ``tokens`` + 1, … of ``steps`` in all."""
        if tokens + steps >= self._limit:
            self._grow(2 * (tokens + steps))
        first = int(tokens)
        fraction = tokens - first
        return self._before(first + steps, fraction) - self._before(first, fraction)

    def _before(self, count: int, fraction: float) -> float:
        """The sum at ``fraction``, 1 + ``fraction``, … of ``count`` in all. A cell's values are an arithmetic
        series: the mean of it lies (grid - 1) / 2 + ``fraction`` into the cell."""
        grid, values = self._grid, self._values
        index, rest = count // grid, count % grid
        value = values[index]
        slope = (values[index + 1] - value) / grid
        whole = self._cumulative[index] + fraction * (value - values[0])
        return whole + rest * (value + slope * ((rest - 1) / 2 + fraction))

    def _grow(self, tokens: float) -> None:
        """To cover ``tokens``, and the cell after."""
        cells = max(self._cells, int(tokens // self._grid) + 2)
        self._fill(self._evaluate(np.arange(cells + 1, dtype=np.float64) * self._grid))

    def _fill(self, values: FloatArray) -> None:
        """At 0, ``grid``, …"""
        values = np.maximum(0.0, values)
        rises = np.diff(values)
        sums = self._grid * values[:-1] + rises * (self._grid - 1) / 2
        self._values = values.tolist()
        self._cumulative = np.concatenate(([0.0], np.cumsum(sums))).tolist()
        self._limit = float((len(values) - 1) * self._grid)


class BatchCurves:
    """A curve over the mean context for each batch that is asked for."""

    __slots__ = ("_curves", "_evaluate", "_grid")

    def __init__(self, evaluate: Callable[[int, FloatArray], FloatArray], grid: int) -> None:
        self._evaluate = evaluate
        self._grid = grid
        self._curves: dict[int, TokenCurve] = {}

    def of(self, sequences: int) -> TokenCurve:
        curve = self._curves.get(sequences)
        if curve is None:
            curve = TokenCurve(partial(self._evaluate, sequences), self._grid)
            self._curves[sequences] = curve
        return curve


class ChunkSurface:
    """Over a chunk's tokens and those before it: a curve for every ``before_grid`` tokens before, and linear
    between two of them."""

    __slots__ = ("_before_grid", "_curves", "_evaluate", "_token_grid")

    def __init__(
        self,
        evaluate: Callable[[FloatArray, FloatArray], FloatArray],
        *,
        before_grid: int,
        token_grid: int,
    ) -> None:
        """``evaluate``: of tokens before, and of tokens."""
        self._evaluate = evaluate
        self._before_grid, self._token_grid = before_grid, token_grid
        self._curves: list[TokenCurve] = []

    def at(self, before: float, tokens: float) -> float:
        grid = self._before_grid
        index = int(before // grid)
        rest = before - index * grid
        low = self._after(index).at(tokens)
        if not rest:
            return low
        return low + (self._after(index + 1).at(tokens) - low) * rest / grid

    def _after(self, index: int) -> TokenCurve:
        if index >= len(self._curves):
            self._grow(index)
        return self._curves[index]

    def _grow(self, index: int) -> None:
        """To have that curve: all that come new are asked for at once."""
        known = len(self._curves)
        new = max(FIRST_CURVES, 2 * known, index + 1) - known
        cells = SURFACE_TOKENS // self._token_grid
        before = np.arange(known, known + new, dtype=np.float64) * self._before_grid
        tokens = np.arange(cells + 1, dtype=np.float64) * self._token_grid
        values = self._evaluate(np.repeat(before, cells + 1), np.tile(tokens, new)).reshape(new, cells + 1)
        for place in range(new):
            curve = TokenCurve(
                partial(self._evaluate_after, float(before[place])), self._token_grid, cells, values[place]
            )
            self._curves.append(curve)

    def _evaluate_after(self, before: float, tokens: FloatArray) -> FloatArray:
        return self._evaluate(np.full(len(tokens), before), tokens)
