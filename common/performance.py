"""How long an instance's steps take, as it has learned from its own: words that load reports carry.

Aladdin, section 3. Prefill (eq. 2) is linear in the chunk's tokens, with one term more for attention over the
tokens before them, which a chunk of a long prompt has and the paper's whole prompts do not. Decode (eq. 3) is
``(k₂ · l_ave + c₂) · b + c₃``: linear in the batch's context ``l_ave · b`` and in its size. How the
coefficients are fitted is ``scheduler.policy.fitting``'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

TOKENS, PAIRS = 1e3, 1e6
"""Units of the features: coefficients are then of one size, about a step's seconds."""
CHUNK_FEATURES = ("thousand tokens", "million pairs", "chunk")
DEFAULT_CHUNK_TOKENS = 512
"""Of a chunk where nothing was profiled, or set (``instance.chunk_tokens``): as on the papers' devices."""
DEFAULT_LAYERWISE_MIN_TOKENS = 512
"""Of a prompt that is handed over layer by layer, where nothing was measured, or set: Splitwise's on its
H100s (4.4)."""
STEP_FEATURES = ("thousand tokens of context", "sequence", "step")


PASS_FEATURES = (
    "thousand tokens",
    "million pairs",
    "pass with a chunk",
    "thousand tokens of context",
    "sequence",
    "pass of decodes alone",
)


@dataclass(frozen=True, slots=True)
class PassLoad:
    """What one run of the model computes: of prompts and of decodes. ``chunk_pairs``: as ``pairs_of``;
    ``context_tokens``: of all ``sequences`` that are decoded."""

    chunk_tokens: int = 0
    chunk_pairs: int = 0
    sequences: int = 0
    context_tokens: int = 0

    @property
    def is_shared(self) -> bool:
        return self.chunk_tokens > 0 and self.sequences > 0

    def with_also(self, other: "PassLoad") -> "PassLoad":
        """Both in one pass."""
        return PassLoad(
            self.chunk_tokens + other.chunk_tokens,
            self.chunk_pairs + other.chunk_pairs,
            self.sequences + other.sequences,
            self.context_tokens + other.context_tokens,
        )


class FittedTime(msgspec.Struct, frozen=True, array_like=True):
    """``relative_error``: of what was predicted before each of the newest of ``samples`` steps, the mean.
    With no samples it is a profile's: whoever tells it has measured too few steps of its own."""

    coefficients: tuple[float, ...]
    relative_error: float
    samples: int

    def seconds(self, features: Sequence[float]) -> float:
        """Never under 0: the fit knows nothing of what lies outside what it has seen."""
        pairs = zip(self.coefficients, features, strict=True)
        return max(0.0, sum([coefficient * feature for coefficient, feature in pairs]))


def chunk_features(tokens: int, pairs: int) -> tuple[float, float, float]:
    """Of a prefill chunk. ``pairs``: over its tokens, how many came before each in its own sequence."""
    return tokens / TOKENS, pairs / PAIRS, 1.0


def pairs_of(start: int, tokens: int) -> int:
    """Of positions ``start``..``start + tokens``: how many positions precede each, summed."""
    return tokens * start + tokens * (tokens - 1) // 2


def step_features(batch: int, context_tokens: int) -> tuple[float, float, float]:
    """Of a decode step over ``context_tokens`` in all."""
    return context_tokens / TOKENS, float(batch), 1.0


def pass_features(load: PassLoad) -> tuple[float, float, float, float, float, float]:
    """Those of its chunk and of its step, whose fixed parts are one where it has both."""
    tokens, pairs, _ = chunk_features(load.chunk_tokens, load.chunk_pairs)
    context, sequences, _ = step_features(load.sequences, load.context_tokens)
    has_chunk = load.chunk_tokens > 0
    return tokens, pairs, float(has_chunk), context, sequences, float(not has_chunk)


def prompt_s(fitted: FittedTime, tokens: int, chunk_tokens: int, computed_tokens: int = 0) -> float:
    """Seconds to compute the rest of a prompt alone, in chunks."""
    rest = max(0, tokens - computed_tokens)
    chunks = -(-rest // chunk_tokens)
    token_part, pair_part, _ = chunk_features(rest, pairs_of(computed_tokens, rest))
    return fitted.seconds((token_part, pair_part, float(chunks)))


class PromptTime(msgspec.Struct, frozen=True, array_like=True):
    """What an instance needs for prompts, in chunks of its size."""

    chunk_time: FittedTime
    chunk_tokens: int

    def seconds(self, tokens: int) -> float:
        return prompt_s(self.chunk_time, tokens, self.chunk_tokens)


def queue_s(fitted: FittedTime, tokens: int, chunk_tokens: int) -> float:
    """Seconds to compute ``tokens`` of prompts that wait, in chunks of ``chunk_tokens``, as far as that
    depends on their number alone: how long each of them is, and so its attention over itself, is not known of
    a queue."""
    per_token, _, per_chunk = fitted.coefficients
    return max(0.0, per_token * tokens / TOKENS + per_chunk * -(-tokens // chunk_tokens))


def largest_context(fitted: FittedTime, batch: int, tpot_s: float) -> float:
    """Tokens of context that a batch may have in all for a step of ``tpot_s`` (Aladdin, eq. 4); 0 where the
    batch alone is too slow, infinite where context costs nothing measurable."""
    per_token, per_sequence, base = fitted.coefficients
    left_s = tpot_s - per_sequence * batch - base
    if left_s <= 0:
        return 0.0
    return TOKENS * left_s / per_token if per_token > 0 else float("inf")
