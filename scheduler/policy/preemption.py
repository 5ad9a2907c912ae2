"""Whether a preempted sequence's KV waits in the host's memory or is computed again, and when it comes back.

Copied out, its stream pauses; given up, its gateway places it anew, and its prompt with all that it has drawn
goes through prefill and another hand-over. The comparison is of the one sequence's seconds: it counts neither
the wait in prefill's queue, nor that the others of the batch stand still while this engine copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.kv.blocks import blocks_for
from common.performance import PromptTime
from scheduler.policy.decode_admission import Growing

STEPS_BEFORE_GROWTH = 32
"""Who comes back stays for so many steps at least: two copies are to buy more than a token."""


@dataclass(frozen=True, slots=True)
class Rates:
    """As measured; None: not yet."""

    copy_bytes_per_s: float | None = None
    pull_bytes_per_s: float | None = None
    prompt_time: PromptTime | None = None


def is_swap_cheaper(tokens: int, kv_bytes: int, rates: Rates) -> bool:
    """For a sequence of ``tokens`` with ``kv_bytes`` of KV. What was never measured is tried: a copy within a
    machine is seldom the slower way."""
    if rates.copy_bytes_per_s is None or rates.prompt_time is None:
        return True
    pull_s = kv_bytes / rates.pull_bytes_per_s if rates.pull_bytes_per_s else 0.0
    return 2 * kv_bytes / rates.copy_bytes_per_s < rates.prompt_time.seconds(tokens) + pull_s


@dataclass(frozen=True, slots=True)
class Holder:
    """A sequence that grows, and the blocks that it has."""

    growing: Growing
    blocks: int


def blocks_to_return(swapped: Growing, present: Sequence[Holder], block_size: int) -> int:
    """That have to be free for a swapped sequence to come back: for it and everybody present, with what they
    draw next. Alone it comes back if it fits at all, so nobody stays away for ever."""
    if not present:
        return blocks_for(swapped.tokens, block_size)
    steps = STEPS_BEFORE_GROWTH
    lacking = sum(max(0, each.growing.blocks(steps, block_size) - each.blocks) for each in present)
    return swapped.blocks(steps, block_size) + lacking
