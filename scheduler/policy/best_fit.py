"""Best fit under latency objectives (Aladdin, 4.2): what a decode instance's load is, and what it refuses.

Of the paper's constraints, those of an instance that decodes only: (b) a step over the batch with half of
what is still to be drawn keeps the time between tokens; (e) the KV of all it holds, grown to its expected
end, fits. (c) and (d) bind where prompts are computed beside decodes; elsewhere prompts
are the prefill rule's.
"""

from math import hypot

from common.performance import FittedTime, largest_context

GAMMA = 0.5
"""The share of what is still to be drawn that counts as context: 0 promises the next token's time, 1 the last
one's (the paper's γ)."""
THETA = 0.9
"""Kept free against predictions that were too low (the paper's θ)."""
TOKENS_A_SEQUENCE = 1000.0
"""The norm adds sequences and thousands of tokens."""


def weighted_load(requests: int, context_tokens: int, coming_tokens: float) -> float:
    """The paper's capacity_norm: of the batch's size and its weighted context."""
    return hypot(requests, (context_tokens + GAMMA * coming_tokens) / TOKENS_A_SEQUENCE)


def refusal_of(
    *,
    requests: int,
    context_tokens: float,
    coming_tokens: float,
    capacity_tokens: int,
    step_time: FittedTime | None,
    tpot_s: float,
) -> str | None:
    """Why an instance should not hold so much, the new request included; None: it may. One that has not
    measured its steps yet is trusted with anything that fits."""
    grown = context_tokens + coming_tokens
    if grown > capacity_tokens:
        return f"(e) {grown:.0f} tokens of KV, of {capacity_tokens}"
    if step_time is None:
        return None
    allowed = THETA * largest_context(step_time, requests, tpot_s)
    weighted = context_tokens + GAMMA * coming_tokens
    if weighted > allowed:
        return (
            f"(b) {weighted:.0f} tokens of context for {requests}, of which {allowed:.0f} keep {tpot_s:g} s"
        )
    return None
