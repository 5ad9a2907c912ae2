"""How prompts become batches: TetriInfer 3.3.1 (order within a window) and 3.3.3 (fixed chunks), or batches
of whole prompts near the length that saturates the device (DistServe 4.3).

Prompts are taken in arrival order into a scheduling window (PrefillSchedBatch), ordered inside it by the
policy, and only when the window is used up is the next one taken: so shortest-job-first starves nobody.
From the ordered window, prompts are sliced and merged into chunks of a fixed number of tokens, or are taken
whole.

Within a window a long prompt that has begun is finished before shorter ones that came later: DistServe's
convoy (4.3, left to future work there). ``order_by_rest`` looks again at every chunk's border at all prompts:
the one with least left goes first, and waiting counts as having less left, so that none waits for ever.
"""

from collections.abc import Callable, Sequence

from common.config import PrefillBatching, PrefillOrder

FillBatch = Callable[[Sequence[int], int], list[int]]
"""(remaining tokens of each prompt, in order; tokens of a batch) -> tokens of each that go in. The first
always takes part; those after the last that does are left off."""

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


def fill_whole(remaining_tokens: Sequence[int], pass_tokens: int) -> list[int]:
    """Whole prompts, in order, as many as ``pass_tokens`` hold; one that is longer is computed alone
    (Orca, Vidur 4.5)."""
    slices: list[int] = []
    room = pass_tokens
    for tokens in remaining_tokens:
        if slices and tokens > room:
            break
        slices.append(tokens)
        room -= tokens
    return slices


def fill_saturated(remaining_tokens: Sequence[int], saturation_tokens: int) -> list[int]:
    """Whole prompts, in order, whose tokens come as near to ``saturation_tokens`` as they do.

    One that saturates the device by itself is computed alone: together they would only wait for each other.
    """
    return list(remaining_tokens[: _prompts_together(remaining_tokens, saturation_tokens)])


def fill_saturated_with_borders(remaining_tokens: Sequence[int], saturation_tokens: int) -> list[int]:
    """As ``fill_saturated``, but of a longer prompt ``saturation_tokens`` at a time: others may pass."""
    together = _prompts_together(remaining_tokens, saturation_tokens)
    return [min(tokens, saturation_tokens) for tokens in remaining_tokens[:together]]


def _prompts_together(remaining_tokens: Sequence[int], saturation_tokens: int) -> int:
    """How many of the first prompts make a batch; none is passed over for one that would fit better."""
    total = 0
    for count, tokens in enumerate(remaining_tokens):
        lacking, excess = saturation_tokens - total, total + tokens - saturation_tokens
        if count and (tokens >= saturation_tokens or excess > lacking or lacking <= 0):
            return count
        total += tokens
    return len(remaining_tokens)


def fill_batch_of(batching: PrefillBatching, order: PrefillOrder) -> FillBatch:
    """The policy that is configured. Only with ``srpt`` does anybody pass one that has begun."""
    if batching == "chunks":
        return fill_chunk
    return fill_saturated_with_borders if order == "srpt" else fill_saturated
