"""How prompts become chunks: TetriInfer 3.3.1 (order within a window) and 3.3.3 (fixed chunks).

Prompts are taken in arrival order into a scheduling window (PrefillSchedBatch), ordered inside it by the
policy, and only when the window is used up is the next one taken: so shortest-job-first starves nobody.
From the ordered window, prompts are sliced and merged into chunks of a fixed number of tokens.

Within a window a long prompt that has begun is finished before shorter ones that came later: DistServe's
convoy (4.3, left to future work there). ``order_by_rest`` looks again at every chunk's border at all prompts:
the one with least left goes first, and waiting counts as having less left, so that none waits for ever.
"""

from collections.abc import Callable, Sequence

from common.config import PrefillOrder

PROMPT_ORDERS: dict[PrefillOrder, Callable[[int], int]] = {
    "fcfs": lambda prompt_tokens: 0,
    "sjf": lambda prompt_tokens: prompt_tokens,
    "ljf": lambda prompt_tokens: -prompt_tokens,
    "srpt": lambda prompt_tokens: prompt_tokens,
}
"""Sort key of each policy; the sort is stable, so equals stay in arrival order."""


def order_window(prompt_tokens: Sequence[int], order: PrefillOrder) -> list[int]:
    """Indices of the window's prompts in the order in which they are computed."""
    key = PROMPT_ORDERS[order]
    return sorted(range(len(prompt_tokens)), key=lambda index: key(prompt_tokens[index]))


def order_by_rest(
    remaining_tokens: Sequence[int], waited_s: Sequence[float], aging_tokens_per_s: float
) -> list[int]:
    """Indices, shortest remaining time first, with aging: a prompt is overtaken by shorter ones for at most
    its own tokens ÷ ``aging_tokens_per_s``. Equals stay in arrival order."""
    rest = [
        tokens - aging_tokens_per_s * waited
        for tokens, waited in zip(remaining_tokens, waited_s, strict=True)
    ]
    return sorted(range(len(rest)), key=rest.__getitem__)


def fill_chunk(remaining_tokens: Sequence[int], chunk_tokens: int) -> list[int]:
    """Tokens of each prompt, taken in order, that go into the next chunk of ``chunk_tokens``.

    The chunk is full unless the prompts run out. Prompts after the last one that takes part are left off.
    """
    slices: list[int] = []
    room = chunk_tokens
    for tokens in remaining_tokens:
        if room == 0:
            break
        taken = min(tokens, room)
        slices.append(taken)
        room -= taken
    return slices
