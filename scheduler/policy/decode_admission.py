"""When a decode instance takes one more sequence in (TetriInfer 3.4).

Greedy takes whoever fits now, and preempts when they have grown too large. The other two look at what
sequences are expected to grow to, so as never to come to that: reserve-static wants the newcomer's whole KV
free now, reserve-dynamic wants everybody's KV to fit at the moment at which the first of them is expected to
end and gives its own back. Whoever would be alone is taken in if it fits at all: so nobody waits for ever.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.config import DecodeAdmission
from common.kv.blocks import blocks_for


@dataclass(frozen=True, slots=True)
class Growing:
    """A sequence of ``tokens`` that is expected to draw ``coming_tokens`` more, at least one."""

    tokens: int
    coming_tokens: int

    def blocks(self, steps: int, block_size: int) -> int:
        """After so many steps."""
        return blocks_for(self.tokens + min(steps, self.coming_tokens), block_size)


@dataclass(frozen=True, slots=True)
class Pool:
    """``free``: blocks of it, of ``block_size`` tokens each."""

    free: int
    block_size: int


def fits_now(pool: Pool, newcomer: Growing, present: Sequence[Growing]) -> bool:
    """Greedy: its blocks are free, and one more for every sequence that is there."""
    needed = blocks_for(newcomer.tokens, pool.block_size)
    return needed + len(present) <= pool.free


def fits_to_its_end(pool: Pool, newcomer: Growing, present: Sequence[Growing]) -> bool:
    """Reserve-static."""
    whole = newcomer.blocks(newcomer.coming_tokens, pool.block_size)
    return fits_now(pool, newcomer, present) and whole <= pool.free


def fits_until_one_ends(pool: Pool, newcomer: Growing, present: Sequence[Growing]) -> bool:
    """Reserve-dynamic."""
    size = pool.block_size
    steps = min(each.coming_tokens for each in (newcomer, *present))
    growth = sum(each.blocks(steps, size) - each.blocks(0, size) for each in present)
    return fits_now(pool, newcomer, present) and newcomer.blocks(steps, size) + growth <= pool.free


ADMISSIONS: dict[DecodeAdmission, Callable[[Pool, Growing, Sequence[Growing]], bool]] = {
    "greedy": fits_now,
    "reserve_static": fits_to_its_end,
    "reserve_dynamic": fits_until_one_ends,
}


def can_admit(admission: DecodeAdmission, pool: Pool, newcomer: Growing, present: Sequence[Growing]) -> bool:
    if not present:
        return blocks_for(newcomer.tokens, pool.block_size) <= pool.free
    return ADMISSIONS[admission](pool, newcomer, present)
