"""Lengths that are known beforehand, for experiments: what a perfect predictor would be worth.

They stand in a file of JSON lines. ``{"prompt": DIGEST, "output_tokens": N}`` is of one prompt, by the digest
of its token ids; ``lamella predictor train`` writes such lines. ``{"output_tokens": N}`` is of the next
request that is asked about whose prompt is not in the file.
"""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from common.errors import ConfigError, UnknownRequest
from common.lengths import LengthDistribution, certain
from common.messages import PredictLength


class KnownLength(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line. ``is_cut``: the output was cut short at that length. ``temperature``: at which it was drawn."""

    output_tokens: int
    prompt: str | None = None
    is_cut: bool = False
    temperature: float = 0.0


def digest_of(prompt_ids: Sequence[int]) -> str:
    """Of the token ids, in decimal and with commas between them: BLAKE2b of 16 bytes, in hexadecimal."""
    return hashlib.blake2b(",".join(map(str, prompt_ids)).encode(), digest_size=16).hexdigest()


def read_lengths(file: Path, key: str = "predictor.lengths_file") -> list[KnownLength]:
    """Every line of a file of known lengths. Raises ConfigError, with the line."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as exc:
        raise ConfigError(key, str(file), f"cannot be read ({exc.strerror})") from exc
    known = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            known.append(msgspec.json.decode(line, type=KnownLength))
        except msgspec.DecodeError as exc:
            raise ConfigError(key, str(file), f"line {number} is no known length: {exc}") from exc
        if known[-1].output_tokens < 1:
            raise ConfigError(key, str(file), f"line {number}: output_tokens must be at least 1")
    return known


@dataclass(slots=True, init=False)
class OraclePredictor:
    """Each line without a prompt is used once."""

    by_prompt: dict[str, int]
    in_order: deque[int]

    def __init__(self, known: Sequence[KnownLength]) -> None:
        self.by_prompt = {each.prompt: each.output_tokens for each in known if each.prompt is not None}
        self.in_order = deque(each.output_tokens for each in known if each.prompt is None)

    async def predict(self, question: PredictLength) -> LengthDistribution:
        tokens = self.by_prompt.get(digest_of(question.prompt_ids))
        if tokens is None:
            if not self.in_order:
                raise UnknownRequest(
                    f"the length of request {question.request_id} is not in the oracle's file"
                )
            tokens = self.in_order.popleft()
        return certain(tokens)

    def learn(self, prompt_tokens: int, output_tokens: int, *, is_cut: bool) -> None:
        """It knows already."""

    def close(self) -> None:
        """Holds nothing."""
