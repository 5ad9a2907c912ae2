"""How long prompts and outputs are: fixed, ranges, lognormals, and TetriInfer's five workloads.

A length specification is written as ``128``, ``64:256`` (uniform, both ends included), or
``lognormal:MEDIAN:SIGMA:LOW:HIGH`` (the logarithm is normal around ln MEDIAN; draws outside LOW..HIGH are
drawn again).

Workloads (TetriInfer 5.1, Figure 1): a prompt is heavy above 512 tokens, an output above 128. The paper
samples ShareGPT; the constants here are each class's log-mean and deviation in a ShareGPT sample of 10,000
conversations, tokenized for Llama 2 and cut at a context of 4,096 (Vidur's repository carries such samples).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from common.errors import ConfigError

HEAVY_PROMPT_TOKENS = 512
"""A prompt of more tokens is heavy (TetriInfer 5.1)."""
HEAVY_OUTPUT_TOKENS = 128
"""An output of more tokens is heavy (TetriInfer 5.1)."""
MOST_TOKENS = 1_000_000_000
"""Of a prompt or an output: more is no request."""

Workload = str


class FixedLength(msgspec.Struct, frozen=True, tag="fixed"):
    tokens: int

    def draw(self, generator: np.random.Generator) -> int:
        return self.tokens


class UniformLength(msgspec.Struct, frozen=True, tag="uniform"):
    lowest_tokens: int
    highest_tokens: int

    def draw(self, generator: np.random.Generator) -> int:
        return int(generator.integers(self.lowest_tokens, self.highest_tokens, endpoint=True))


class LogNormalLength(msgspec.Struct, frozen=True, tag="lognormal"):
    """Truncated by drawing again, which keeps the shape inside the bounds."""

    median_tokens: float
    sigma: float
    lowest_tokens: int
    highest_tokens: int

    def draw(self, generator: np.random.Generator) -> int:
        while True:
            tokens = round(math.exp(generator.normal(math.log(self.median_tokens), self.sigma)))
            if self.lowest_tokens <= tokens <= self.highest_tokens:
                return tokens


Length = FixedLength | UniformLength | LogNormalLength


def scale_length(length: Length, factor: float) -> Length:
    """``factor`` times as long. Bounds are rounded inwards: what was disjoint stays so."""
    match length:
        case FixedLength(tokens):
            return FixedLength(max(1, round(tokens * factor)))
        case UniformLength(lowest_tokens, highest_tokens):
            return UniformLength(*_scale_bounds(lowest_tokens, highest_tokens, factor))
        case LogNormalLength(median_tokens, sigma, lowest_tokens, highest_tokens):
            lowest, highest = _scale_bounds(lowest_tokens, highest_tokens, factor)
            # A median outside the bounds would be drawn again for ever.
            median = min(max(median_tokens * factor, lowest), highest)
            return LogNormalLength(median, sigma, lowest, highest)


def _scale_bounds(lowest_tokens: int, highest_tokens: int, factor: float) -> tuple[int, int]:
    lowest = max(1, math.ceil(lowest_tokens * factor))
    return lowest, max(lowest, math.floor(highest_tokens * factor))


@dataclass(frozen=True, slots=True)
class LengthPair:
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class LengthMix:
    """Kinds of requests with the share of each; shares add up to one."""

    kinds: tuple[tuple[float, Length, Length], ...]

    def draw(self, generator: np.random.Generator) -> LengthPair:
        if len(self.kinds) == 1:
            chosen = self.kinds[0]
        else:
            shares = [share for share, _, _ in self.kinds]
            chosen = self.kinds[int(generator.choice(len(self.kinds), p=shares))]
        _, prompt, output = chosen
        return LengthPair(prompt.draw(generator), output.draw(generator))

    def scaled(self, factor: float) -> "LengthMix":
        return LengthMix(
            tuple(
                (share, scale_length(prompt, factor), scale_length(output, factor))
                for share, prompt, output in self.kinds
            )
        )

    def draw_all(self, seed: int) -> Iterator[LengthPair]:
        """Endless, and the same for the same seed."""
        generator = np.random.default_rng(seed)
        while True:
            yield self.draw(generator)


def parse_length(key: str, text: str) -> Length:
    """Read a length specification; ConfigError names ``key`` (the option it came from)."""
    try:
        if text.startswith("lognormal:"):
            return _parse_lognormal(key, text)
        numbers = [int(part) for part in text.split(":")]
    except ValueError:
        raise ConfigError(key, text, "must be N, LOW:HIGH or lognormal:MEDIAN:SIGMA:LOW:HIGH") from None
    if len(numbers) == 1 and 1 <= numbers[0] <= MOST_TOKENS:
        return FixedLength(numbers[0])
    if len(numbers) == 2 and 1 <= numbers[0] <= numbers[1] <= MOST_TOKENS:
        return UniformLength(numbers[0], numbers[1])
    rule = f"must be N >= 1, or LOW:HIGH with 1 <= LOW <= HIGH, of at most {MOST_TOKENS:,}"
    raise ConfigError(key, text, rule)


def _parse_lognormal(key: str, text: str) -> LogNormalLength:
    _, median, sigma, lowest, highest = text.split(":")
    length = LogNormalLength(float(median), float(sigma), int(lowest), int(highest))
    if not (1 <= length.lowest_tokens <= length.median_tokens <= length.highest_tokens <= MOST_TOKENS):
        raise ConfigError(key, text, f"must have 1 <= LOW <= MEDIAN <= HIGH <= {MOST_TOKENS:,}")
    if not 0.0 < length.sigma <= 10.0:
        raise ConfigError(key, text, "must have 0 < SIGMA <= 10")
    return length


def describe_length(length: Length) -> str:
    """The specification that would be parsed into it."""
    match length:
        case FixedLength(tokens):
            return str(tokens)
        case UniformLength(lowest_tokens, highest_tokens):
            return f"{lowest_tokens}:{highest_tokens}"
        case LogNormalLength(median_tokens, sigma, lowest_tokens, highest_tokens):
            return f"lognormal:{median_tokens:g}:{sigma:g}:{lowest_tokens}:{highest_tokens}"


LIGHT_PROMPT = LogNormalLength(31.0, 1.2, 4, HEAVY_PROMPT_TOKENS)
HEAVY_PROMPT = LogNormalLength(1230.0, 0.53, HEAVY_PROMPT_TOKENS + 1, 3072)
LIGHT_OUTPUT = LogNormalLength(47.0, 0.8, 4, HEAVY_OUTPUT_TOKENS)
HEAVY_OUTPUT = LogNormalLength(355.0, 0.51, HEAVY_OUTPUT_TOKENS + 1, 1024)

WORKLOADS: dict[Workload, LengthMix] = {
    "lpld": LengthMix(((1.0, LIGHT_PROMPT, LIGHT_OUTPUT),)),
    "lphd": LengthMix(((1.0, LIGHT_PROMPT, HEAVY_OUTPUT),)),
    "hpld": LengthMix(((1.0, HEAVY_PROMPT, LIGHT_OUTPUT),)),
    "hphd": LengthMix(((1.0, HEAVY_PROMPT, HEAVY_OUTPUT),)),
    "mixed": LengthMix(
        (
            (0.20, LIGHT_PROMPT, LIGHT_OUTPUT),
            (0.67, LIGHT_PROMPT, HEAVY_OUTPUT),
            (0.03, HEAVY_PROMPT, LIGHT_OUTPUT),
            (0.10, HEAVY_PROMPT, HEAVY_OUTPUT),
        )
    ),
}
"""By name: light or heavy prefill, light or heavy decode, and ShareGPT's own mixture of the four."""


def is_of_workload(lengths: LengthPair, workload: Workload) -> bool:
    """Whether a trace's request belongs to a workload; every request belongs to ``mixed``."""
    if workload == "mixed":
        return True
    prompt = "hp" if lengths.prompt_tokens > HEAVY_PROMPT_TOKENS else "lp"
    output = "hd" if lengths.output_tokens > HEAVY_OUTPUT_TOKENS else "ld"
    return prompt + output == workload


def fit_context(lengths: LengthPair, context_tokens: int) -> LengthPair:
    """Cut a request to ``context_tokens`` in all: the prompt gives way first, down to one token."""
    output_tokens = min(lengths.output_tokens, max(1, context_tokens - 1))
    return LengthPair(min(lengths.prompt_tokens, context_tokens - output_tokens), output_tokens)
