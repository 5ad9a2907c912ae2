"""What a mixed instance computes next, where prompts and decodes both wait.

``prefill_first`` is vLLM's original rule (Vidur 4.5): prompts run as soon as they are there and decodes wait.
``chunked`` is mixed continuous batching (Splitwise II; Sarathi, Vidur 4.5): every pass takes the decodes, a
token each, and what is left of its tokens is a chunk of prompts. ``splitwise`` fills a pass the other way
round, as splitwise-sim's machines do: prompts come first, and decodes go along where all of them fit beside
these; where they do not, they sit out, four passes in a row at the most (each batch of a pipeline). ``orca``
is Vidur's Orca+, over pages of KV: every pass takes the decodes and as many whole prompts as fit beside them.
``static`` is FasterTransformer's: a batch of prompts, computed first, with memory for all that they may draw;
the next when its last has ended.

Under all, whoever waits grows older until nobody comes before it, or every batch ends and they take turns:
so none waits for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from common.config import MixedPolicy
from common.messages import Phase

MAX_PREEMPTIONS = 2
"""Of one request for prompts. Each makes it older, and one so old gives way to none any more."""
MAX_PASSED_OVER = 4
"""Passes in a row that decodes sit out for prompts (splitwise-sim)."""


@dataclass(slots=True)
class PassChoice:
    """Whose work the next run of one engine's model takes, of ``pass_tokens``. Decodes wait ``max_wait_s``
    and one chunk at the longest, or by ``splitwise`` for ``MAX_PASSED_OVER`` chunks."""

    policy: MixedPolicy
    pass_tokens: int
    max_wait_s: float
    _step_since_s: float = -inf
    _passed_over: int = 0

    def takes_prompts(self, step_since_s: float, now: float) -> bool:
        """Whether a chunk, whatever it is, comes before or beside a step that has waited since then."""
        return self.policy not in ("prefill_first", "static") or now - step_since_s < self.max_wait_s

    def choose(self, chunk_tokens: int, sequences: int, step_since_s: float, now: float) -> tuple[Phase, ...]:
        """Where a chunk of prompts waits and, since ``step_since_s``, a step of ``sequences``."""
        if self.policy == "splitwise":
            return self._fill(chunk_tokens + sequences, step_since_s)
        if self.policy in ("chunked", "orca"):
            return ("prefill", "decode")
        return ("prefill",) if self.takes_prompts(step_since_s, now) else ("decode",)

    def _fill(self, tokens: int, step_since_s: float) -> tuple[Phase, ...]:
        if step_since_s != self._step_since_s:
            # Another step than the one that was passed over.
            self._step_since_s, self._passed_over = step_since_s, 0
        if tokens <= self.pass_tokens or self._passed_over >= MAX_PASSED_OVER:
            return ("prefill", "decode")
        self._passed_over += 1
        return ("prefill",)


def prompt_tokens_beside(policy: MixedPolicy, chunk_tokens: int, decoding: int) -> int:
    """Of the next chunk, at least 1, where so many sequences are decoded: with these it fills the pass."""
    return max(1, chunk_tokens - decoding) if policy in ("chunked", "orca") else chunk_tokens


def choose_to_give_way(relief_blocks: Sequence[int], ages: Sequence[int], missing_blocks: int) -> list[int]:
    """Indices of the decodes that are preempted for a prompt (Splitwise IV-B), latest arrival first.

    ``relief_blocks``, in arrival order, is what each one holds, ``ages`` how often it has been given up
    before. The oldest sequence stays, so somebody always ends. Empty where the prompt would lack room still.
    """
    victims: list[int] = []
    for index in range(len(relief_blocks) - 1, 0, -1):
        if missing_blocks <= 0:
            break
        if ages[index] < MAX_PREEMPTIONS:
            victims.append(index)
            missing_blocks -= relief_blocks[index]
    return [] if missing_blocks > 0 else victims
