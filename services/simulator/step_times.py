"""Sums of many successive steps' seconds in a few looks: they are straight lines over the steps' numbers,
with few bends, as contexts grow by a token a step."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

TOLERANCE = 1e-7
"""Of a step's seconds: nearer to a line than that counts as on it."""


class _Piece(NamedTuple):
    """Steps from ``first`` on, the first of which takes ``first_s`` and each after it ``rise_s`` more."""

    first: int
    before_s: float
    first_s: float
    rise_s: float


@dataclass(slots=True)
class StepTimes:
    """Of ``steps`` ≥ 1 in all; ``seconds_of`` is asked for a step by its number."""

    seconds_of: Callable[[int], float]
    steps: int
    _pieces: list[_Piece] = field(default_factory=list)
    _all_s: float = 0.0

    def __post_init__(self) -> None:
        last = self.steps - 1
        self._add(0, last, self.seconds_of(0), self.seconds_of(last))

    def until(self, steps: int) -> float:
        """Seconds of so many of the first."""
        if steps >= self.steps:
            return self._all_s
        place = bisect_right(self._pieces, steps, key=lambda piece: piece.first) - 1
        piece = self._pieces[place]
        count = steps - piece.first
        return piece.before_s + count * piece.first_s + piece.rise_s * (count * (count - 1) / 2)

    def done_by(self, seconds: float) -> int:
        """The most of the first that have ended by then."""
        least, most = 0, self.steps
        while least < most:
            middle = (least + most + 1) // 2
            if self.until(middle) <= seconds:
                least = middle
            else:
                most = middle - 1
        return least

    def _add(self, first: int, last: int, first_s: float, last_s: float) -> None:
        if last - first > 1:
            middle = (first + last) // 2
            middle_s = self.seconds_of(middle)
            straight_s = first_s + (last_s - first_s) * (middle - first) / (last - first)
            if abs(middle_s - straight_s) > TOLERANCE * middle_s:
                self._add(first, middle, first_s, middle_s)
                self._add(middle + 1, last, self.seconds_of(middle + 1), last_s)
                return
        count = last - first + 1
        rise_s = (last_s - first_s) / (last - first) if last > first else 0.0
        self._pieces.append(_Piece(first, self._all_s, first_s, rise_s))
        self._all_s += count * (first_s + last_s) / 2
