"""What became of every request, a column each: kept while a run goes on, and read when it is over."""

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from common.ids import RequestId

Outcome = Literal["open", "done", "rejected", "failed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""``rejected``: nobody took it in; ``failed``: it broke and could not go on."""
NEVER = float("nan")
NOBODY = -1

FLOATS = (
    "arrival_s",
    "queue_s",
    "first_token_s",
    "second_token_s",
    "end_s",
    "slowest_gap_s",
)
INTEGERS = ("prompt_tokens", "output_tokens", "drawn_tokens", "attempts", "prefill", "decode", "outcome")


def _column() -> "array[float]":
    return array("d")


def _counts() -> "array[int]":
    return array("q")


def request_id_of(number: int) -> RequestId:
    return RequestId(f"r{number}")


@dataclass(slots=True)
class Records:
    """A request's row is its number. Times are NEVER until they have come; ``queue_s``: before its first
    chunk, in all its attempts. ``prefill`` and ``decode``: numbers of the instances that it was placed on
    last. ``drawn_tokens``: those that its client has. ``errors``: codes of those rejected or failed."""

    arrival_s: "array[float]" = field(default_factory=_column)
    queue_s: "array[float]" = field(default_factory=_column)
    first_token_s: "array[float]" = field(default_factory=_column)
    second_token_s: "array[float]" = field(default_factory=_column)
    end_s: "array[float]" = field(default_factory=_column)
    slowest_gap_s: "array[float]" = field(default_factory=_column)
    prompt_tokens: "array[int]" = field(default_factory=_counts)
    output_tokens: "array[int]" = field(default_factory=_counts)
    drawn_tokens: "array[int]" = field(default_factory=_counts)
    attempts: "array[int]" = field(default_factory=_counts)
    prefill: "array[int]" = field(default_factory=_counts)
    decode: "array[int]" = field(default_factory=_counts)
    outcome: "array[int]" = field(default_factory=_counts)
    errors: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.arrival_s)

    def begin(self, arrival_s: float, prompt_tokens: int, output_tokens: int) -> int:
        """The new request's number."""
        self.arrival_s.append(arrival_s)
        self.queue_s.append(0.0)
        for column in (self.first_token_s, self.second_token_s, self.end_s, self.slowest_gap_s):
            column.append(NEVER)
        self.prompt_tokens.append(prompt_tokens)
        self.output_tokens.append(output_tokens)
        self.drawn_tokens.append(0)
        self.attempts.append(1)
        self.prefill.append(NOBODY)
        self.decode.append(NOBODY)
        self.outcome.append(0)
        return len(self.arrival_s) - 1

    def end(self, number: int, outcome: Outcome, now: float) -> None:
        self.outcome[number] = OUTCOMES.index(outcome)
        self.end_s[number] = now

    def columns(self) -> dict[str, NDArray[np.float64] | NDArray[np.int64]]:
        """Views: nothing may be added while one is held."""
        found: dict[str, NDArray[np.float64] | NDArray[np.int64]] = {}
        for name in FLOATS:
            found[name] = np.frombuffer(getattr(self, name), np.float64)
        for name in INTEGERS:
            found[name] = np.frombuffer(getattr(self, name), np.int64)
        return found

    def digest(self) -> str:
        """Equal exactly where every time and count is: what two runs of one seed must share."""
        digest = hashlib.sha256()
        for name in (*FLOATS, *INTEGERS):
            digest.update(name.encode())
            digest.update(getattr(self, name).tobytes())
        return digest.hexdigest()
