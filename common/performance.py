"""How long an instance's steps take, as it has learned from its own: words that load reports carry.

Aladdin, section 3. Prefill (eq. 2) is linear in the chunk's tokens, with one term more for attention over the
tokens before them, which a chunk of a long prompt has and the paper's whole prompts do not. Decode (eq. 3) is
``(k₂ · l_ave + c₂) · b + c₃``: linear in the batch's context ``l_ave · b`` and in its size. How the
coefficients are fitted is ``scheduler.policy.fitting``'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from common.laws import chunk_features, prompt_s, seconds_of, step_features

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
        return seconds_of(self.coefficients, features)


def pass_features(load: PassLoad) -> tuple[float, float, float, float, float, float]:
    """Those of its chunk and of its step, whose fixed parts are one where it has both."""
    tokens, pairs, _ = chunk_features(load.chunk_tokens, load.chunk_pairs)
    context, sequences, _ = step_features(load.sequences, load.context_tokens)
    has_chunk = load.chunk_tokens > 0
    return tokens, pairs, float(has_chunk), context, sequences, float(not has_chunk)


class PromptTime(msgspec.Struct, frozen=True, array_like=True):
    """What an instance needs for prompts, in chunks of its size."""

    chunk_time: FittedTime
    chunk_tokens: int

    def seconds(self, tokens: int) -> float:
        return prompt_s(self.chunk_time, tokens, self.chunk_tokens)
