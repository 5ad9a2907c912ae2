"""How prompts become chunks: TetriInfer 3.3.1 (order within a window) and 3.3.3 (fixed chunks).

Prompts are taken in arrival order into a scheduling window (PrefillSchedBatch), ordered inside it by the
policy, and only when the window is used up is the next one taken: so shortest-job-first starves nobody.
From the ordered window, prompts are sliced and merged into chunks of a fixed number of tokens.
"""

from collections.abc import Callable, Sequence

from common.config import PrefillOrder

PROMPT_ORDERS: dict[PrefillOrder, Callable[[int], int]] = {
    "fcfs": lambda prompt_tokens: 0,
    "sjf": lambda prompt_tokens: prompt_tokens,
    "ljf": lambda prompt_tokens: -prompt_tokens,
}
"""Sort key of each policy; the sort is stable, so equals stay in arrival order."""


def order_window(prompt_tokens: Sequence[int], order: PrefillOrder) -> list[int]:
    """Indices of the window's prompts in the order in which they are computed."""
    key = PROMPT_ORDERS[order]
    return sorted(range(len(prompt_tokens)), key=lambda index: key(prompt_tokens[index]))


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
