"""Best fit under latency objectives (Aladdin, 4.2): what a decode instance's load is, and what it refuses.

The paper's constraints. Where sequences are decoded: (b) a step over the batch with half of what is still to
be drawn keeps the time between tokens; (e) the KV of all it holds fits at every step until the last has
ended, each giving its own back at its expected end. Where prompts are computed: (c) the new ones are done
within the time to the first token; (d) if that is beside decodes, which stand still meanwhile, none of these
falls behind its pace.
"""

from collections.abc import Iterable
from math import hypot

from common.laws import largest_context, prompt_s, queue_s
from common.performance import FittedTime

GAMMA = 0.5
"""The share of what is still to be drawn that counts as context: 0 promises the next token's time, 1 the last
one's (the paper's γ)."""
THETA = 0.9
"""Kept free against predictions that were too low (the paper's θ)."""
TOKENS_A_SEQUENCE = 1000.0
"""The norm adds sequences and thousands of tokens."""
Growth = tuple[float, float]
"""Of a sequence: the tokens of KV that it has, and those that it is still expected to draw."""


def weighted_load(requests: int, context_tokens: int, coming_tokens: float) -> float:
    """The paper's capacity_norm: of the batch's size and its weighted context."""
    return hypot(requests, (context_tokens + GAMMA * coming_tokens) / TOKENS_A_SEQUENCE)


def peak_tokens(sequences: Iterable[Growth]) -> float:
    """The most KV at once if all draw at one pace: the largest element of the sum of the paper's vectors w.
    It is reached where one of them ends."""
    held_tokens = peak = 0.0
    last_to_end_first = sorted(sequences, key=lambda each: -each[1])
    for present, (tokens, coming) in enumerate(last_to_end_first, start=1):
        held_tokens += tokens
        peak = max(peak, held_tokens + present * coming)
    return peak


def prompt_refusal_of(
    prompt_tokens: int,
    *,
    pending_tokens: int,
    chunk_time: FittedTime | None,
    chunk_tokens: int,
    ttft_s: float,
    spare_s: float | None,
) -> str | None:
    """Why an instance should not compute the prompt after those that wait there; None: it may. ``spare_s``:
    for how long its decodes can stand still, None where it has none. One that has not measured its chunks yet
    is trusted with anything."""
    if chunk_time is None:
        return None
    waited_s = queue_s(chunk_time, pending_tokens, chunk_tokens)
    taken_s = waited_s + prompt_s(chunk_time, prompt_tokens, chunk_tokens)
    if taken_s > ttft_s:
        return f"(c) {taken_s:.3g} s of prompts, of {ttft_s:g} s"
    if spare_s is not None and taken_s > THETA * spare_s:
        return f"(d) {taken_s:.3g} s of prompts, where decodes have {spare_s:.3g} s to spare"
    return None


def refusal_of(
    newcomer: Growth,
    *,
    requests: int,
    context_tokens: float,
    coming_tokens: float,
    sequences: tuple[Growth, ...] | None,
    capacity_tokens: int,
    step_time: FittedTime | None,
    tpot_s: float,
) -> str | None:
    """Why an instance with so much should not take the newcomer, too; None: it may. Where ``sequences``
    are not known one by one, all count as if they had grown to their ends at once. An instance that has not
    measured its steps yet is trusted with anything that fits."""
    context, coming, batch = context_tokens + newcomer[0], coming_tokens + newcomer[1], requests + 1
    if context + coming > capacity_tokens:
        peak = context + coming if sequences is None else peak_tokens((*sequences, newcomer))
        if peak > capacity_tokens:
            return f"(e) {peak:.0f} tokens of KV, of {capacity_tokens}"
    if step_time is None:
        return None
    allowed = THETA * largest_context(step_time, batch, tpot_s)
    weighted = context + GAMMA * coming
    if weighted > allowed:
        return f"(b) {weighted:.0f} tokens of context for {batch}, of which {allowed:.0f} keep {tpot_s:g} s"
    return None
