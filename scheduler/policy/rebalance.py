"""Which running sequence moves from one attention worker to another.

Request-level partition (Lamina 2, section 5): a worker holds some sequences whole, and its attention takes
time in proportion to their context. A layer is over when its slowest worker is, so what counts is the most
context that any worker holds. New sequences are placed by that; afterwards they grow and end as they like.

A move is worth it where the most context shrinks by a fifth of it and by some tokens (hysteresis), and where
the sequence may last long enough to pay for its bytes: how long it will last is unknown, how long at most is
not. Every move lessens the sum of squares of the pools' context, so that moves alone come to an end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

MIN_GAIN_SHARE = 0.2
"""Of the most context on one worker."""
STEPS_TO_PAY = 32
"""Steps in which a move must have been worth it: it writes the sequence's KV once, over a link that may be so
many times slower than the worker's memory, and every step then reads ``gain`` tokens less."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """What a worker holds: so many tokens of context, of so many sequences. ``is_open``: it takes more."""

    context_tokens: int
    sequences: int
    free_blocks: int
    total_blocks: int
    is_open: bool


@dataclass(frozen=True, slots=True)
class Resident:
    """A sequence that could move now. It needs ``blocks`` there, in the end at most ``longest_blocks``, and
    takes part in at most ``max_steps`` more."""

    pool: int
    context_tokens: int
    blocks: int
    longest_blocks: int
    max_steps: int


@dataclass(frozen=True, slots=True)
class Move:
    """``resident``: its index."""

    resident: int
    pool: int


def can_pay(pools: Mapping[int, PoolLoad], min_gain_tokens: int) -> bool:
    """Whether a look at the residents can find anything: a worker is to be left, or contexts are so far apart
    that half of that, the most that a move can gain, is enough."""
    if not all(load.is_open for load in pools.values()):
        return True
    contexts = [load.context_tokens for load in pools.values()]
    most, least = max(contexts), min(contexts)
    return most - least >= 2 * max(min_gain_tokens, MIN_GAIN_SHARE * most)


def steps_before_pay(pools: Mapping[int, PoolLoad], min_gain_tokens: int) -> int:
    """After at most so many steps, in each of which every sequence may grow by a token, a look finds nothing
    either; 0: it may find something now."""
    if can_pay(pools, min_gain_tokens):
        return 0
    contexts = [load.context_tokens for load in pools.values()]
    most, least = max(contexts), min(contexts)
    left = 2 * max(min_gain_tokens, MIN_GAIN_SHARE * most) - (most - least)
    return max(0, ceil(left / max(1, *(load.sequences for load in pools.values()))) - 1)


def choose_departure(pools: Mapping[int, PoolLoad], residents: Sequence[Resident]) -> Move | None:
    """The longest sequence of a worker that is to be left, for which another has room."""
    leaving = [index for index, each in enumerate(residents) if not pools[each.pool].is_open]
    for index in sorted(leaving, key=lambda index: -residents[index].context_tokens):
        pool = _least_loaded(pools, residents[index])
        if pool is not None:
            return Move(index, pool)
    return None


def choose_balancing(
    pools: Mapping[int, PoolLoad], residents: Sequence[Resident], min_gain_tokens: int
) -> Move | None:
    """The sequence of the worker with the most context whose move lessens that most, if it is worth it:
    by ``min_gain_tokens``, at least one."""
    open_pools = [pool for pool, load in pools.items() if load.is_open]
    if len(open_pools) < 2:
        return None
    fullest = max(open_pools, key=lambda pool: pools[pool].context_tokens)
    most_tokens = pools[fullest].context_tokens
    best = None
    best_gain: float = max(min_gain_tokens, MIN_GAIN_SHARE * most_tokens)
    for index, resident in enumerate(residents):
        pool = _least_loaded(pools, resident) if resident.pool == fullest else None
        if pool is None:
            continue
        tokens = resident.context_tokens
        gain = most_tokens - max(most_tokens - tokens, pools[pool].context_tokens + tokens)
        if gain >= best_gain and resident.max_steps * gain >= STEPS_TO_PAY * tokens:
            best, best_gain = Move(index, pool), float(gain)
    return best


def _least_loaded(pools: Mapping[int, PoolLoad], resident: Resident) -> int | None:
    """Of the other workers that have room for it, and for one block more of everybody there."""
    return min(
        (
            pool
            for pool, load in pools.items()
            if load.is_open
            and pool != resident.pool
            and resident.blocks + load.sequences <= load.free_blocks
            and resident.longest_blocks <= load.total_blocks
        ),
        key=lambda pool: pools[pool].context_tokens,
        default=None,
    )
