"""When a decode instance takes one more sequence in (TetriInfer 3.4; LightLLM, Vidur 4.5).

Greedy takes whoever fits now, and preempts when they have grown too large. The others look at what sequences
are expected to grow to, so as never to come to that: reserve-static wants the newcomer's whole KV free now,
reserve-dynamic wants everybody's KV to fit at the moment at which the first of them is expected to end and
gives its own back, and reserve-peak at every such moment, until the last has ended: it alone keeps what it
promises, if lengths are as expected and all draw as often. Whoever would be alone is taken in if it fits at
all: so nobody waits for ever.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from common.config import DecodeAdmission
from common.kv.blocks import blocks_for


class Growing(NamedTuple):
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


def wanted_now(newcomer: Growing, present: Sequence[Growing], block_size: int) -> int:
    """Greedy: its blocks, and one more for every sequence that is there."""
    return newcomer.blocks(0, block_size) + len(present)


def wanted_to_its_end(newcomer: Growing, present: Sequence[Growing], block_size: int) -> int:
    """Reserve-static."""
    whole = newcomer.blocks(newcomer.coming_tokens, block_size)
    return max(whole, wanted_now(newcomer, present, block_size))


def wanted_until_one_ends(newcomer: Growing, present: Sequence[Growing], block_size: int) -> int:
    """Reserve-dynamic."""
    steps = min(each.coming_tokens for each in (newcomer, *present))
    growth = sum(each.blocks(steps, block_size) - each.blocks(0, block_size) for each in present)
    return max(newcomer.blocks(steps, block_size) + growth, wanted_now(newcomer, present, block_size))


def wanted_until_all_end(newcomer: Growing, present: Sequence[Growing], block_size: int) -> int:
    """Reserve-peak: what all hold beyond what they do now, at the worst of their ends."""
    held = sum([each.blocks(0, block_size) for each in present])
    peak = peak_blocks((newcomer, *present), block_size)
    return max(peak - held, wanted_now(newcomer, present, block_size))


def peak_blocks(growing: Sequence[Growing], block_size: int) -> int:
    """The most that they hold at once. In between two ends all grow, so it is just before one of them: when
    the one ends that is the i-th last to, i of them are there.

    How many tokens these hold follows from sums; how many blocks only from each of them. So the moments are
    looked at from the one on at which most could be held, until no other can exceed what was found.
    """
    latest_first = sorted(growing, key=attrgetter("coming_tokens"), reverse=True)
    moments, tokens = [], 0
    for there, each in enumerate(latest_first, 1):
        tokens += each.tokens + block_size - 1
        moments.append(((tokens + there * each.coming_tokens) // block_size, there, each.coming_tokens))
    most = 0
    for bound, there, steps in sorted(moments, reverse=True):
        if bound <= most:
            break
        blocks = sum([blocks_for(each.tokens + steps, block_size) for each in latest_first[:there]])
        most = max(most, blocks)
    return most


ADMISSIONS: dict[DecodeAdmission, Callable[[Growing, Sequence[Growing], int], int]] = {
    "greedy": wanted_now,
    "reserve_static": wanted_to_its_end,
    "reserve_dynamic": wanted_until_one_ends,
    "reserve_peak": wanted_until_all_end,
}


def looks_ahead(admission: DecodeAdmission) -> bool:
    """Whether it looks at what anybody is expected to draw: of those that are there, greedy asks only how
    many they are."""
    return admission != "greedy"


def blocks_to_enter(
    admission: DecodeAdmission, newcomer: Growing, present: Sequence[Growing], block_size: int
) -> int:
    """That have to be free for it to be taken in."""
    if not present:
        return newcomer.blocks(0, block_size)
    return ADMISSIONS[admission](newcomer, present, block_size)


def can_admit(admission: DecodeAdmission, pool: Pool, newcomer: Growing, present: Sequence[Growing]) -> bool:
    return blocks_to_enter(admission, newcomer, present, pool.block_size) <= pool.free
