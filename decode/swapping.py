"""Preempted sequences whose KV waits in the host tier: part of the decode room's decisions.

::

    RUNNING → SWAPPING_OUT → SWAPPED → SWAPPING_IN → RUNNING

A sequence that is swapped out keeps its blocks, pinned, until the copy has ended; then it holds blocks of the
host tier alone, which have an allocator of their own. On its way back these are pinned. It is in no step
meanwhile and its stream pauses. Whoever was swapped comes back in the order of arrival, before any later one
comes in. Only the instance's own pool has a host tier: the KV of attention workers has none.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.kv.blocks import BlockAllocator, BlockOwner, blocks_for
from common.lifecycle import DecodePhase
from common.performance import PromptTime
from decode.events import SwapIn, SwapOut
from decode.sequence import DecodeSequence, Sequences
from scheduler.policy.decode_admission import Growing
from scheduler.policy.preemption import Holder, Rates, blocks_to_return, is_swap_cheaper

OWN_POOL = 0
NEWEST_WEIGHT = 0.2
"""Of the newest copy in the measured rate."""


@dataclass(slots=True)
class Swapping:
    """``host``: the tier's blocks, as large as the pool's, of ``block_bytes`` each. ``swaps``: sequences that
    were copied out since the start."""

    blocks: BlockAllocator
    block_size: int
    host: BlockAllocator
    block_bytes: int = 1
    swaps: int = 0
    prompt_time: PromptTime | None = None
    _copied_bytes: float = 0.0
    _copied_s: float = 0.0
    _phases: dict[BlockOwner, DecodePhase] = field(default_factory=dict)

    def check(self, sequences: Sequences) -> None:
        """Invariants, called by tests after every event."""
        self.host.check()
        phases = {owner: each.phase for owner, each in sequences.items() if each.is_swapped}
        assert phases == self._phases, "who is swapped is not known"
        assert {*self.host.owners()} == phases.keys(), "host blocks are held for a sequence that is not there"
        for owner, phase in phases.items():
            held = len(self.host.block_table(owner)) * self.block_size
            assert held >= sequences[owner].position, "KV positions without a host block"
            assert self.host.is_pinned(owner) == (phase is DecodePhase.SWAPPING_IN)
            if phase is not DecodePhase.SWAPPED:
                is_source = phase is DecodePhase.SWAPPING_OUT
                assert self.blocks.is_pinned(owner) == is_source, "the source of a copy may be given away"
            assert not (sequences[owner].is_cancelled and phase is DecodePhase.SWAPPED), "a cancelled one"

    @property
    def away(self) -> int:
        """Sequences in the host tier or on the way there or back; whoever came later waits for them."""
        return len(self._phases)

    def coming_blocks(self, pool: int) -> int:
        """That copies under way are about to free."""
        return sum(
            len(self.blocks.block_table(owner))
            for owner, phase in self._phases.items()
            if phase is DecodePhase.SWAPPING_OUT and self.blocks.pool_of(owner) == pool
        )

    def try_swap_out(self, sequence: DecodeSequence, pull_bytes_per_s: float | None) -> SwapOut | None:
        """None where the tier has no room, or to compute it again is cheaper."""
        owner, filled = sequence.owner, blocks_for(sequence.position, self.block_size)
        if filled == 0 or filled > self.host.free_blocks or self.blocks.pool_of(owner) != OWN_POOL:
            return None
        rates = Rates(self._copy_bytes_per_s, pull_bytes_per_s, self.prompt_time)
        if not is_swap_cheaper(sequence.tokens, filled * self.block_bytes, rates):
            return None
        self.host.try_allocate(owner, filled)
        self.blocks.pin(owner)
        self._enter(sequence, DecodePhase.SWAPPING_OUT)
        self.swaps += 1
        return SwapOut(owner, tuple(self.blocks.block_table(owner)[:filled]), self._host_blocks(owner))

    def try_swap_in(
        self, sequence: DecodeSequence, present: Sequence[DecodeSequence], reserved_blocks: int
    ) -> SwapIn | None:
        """Of one that is swapped, beside those ``present`` that hold blocks. What is reserved it leaves to a
        prompt, unless it would be alone."""
        free = self.blocks.free_blocks_in(OWN_POOL) - (reserved_blocks if present else 0)
        if self.blocks_wanted_by(sequence, present) > free:
            return None
        owner, host_blocks = sequence.owner, self._host_blocks(sequence.owner)
        self.blocks.try_allocate(owner, blocks_for(sequence.tokens, self.block_size), OWN_POOL)
        self.host.pin(owner)
        self._enter(sequence, DecodePhase.SWAPPING_IN)
        return SwapIn(owner, tuple(self.blocks.block_table(owner)[: len(host_blocks)]), host_blocks)

    def blocks_wanted_by(self, sequence: DecodeSequence, present: Iterable[DecodeSequence]) -> int:
        """Which is swapped, to come back. ``present``: who holds blocks."""
        growing = Growing(sequence.tokens, sequence.coming_tokens)
        return blocks_to_return(growing, [self._as_holder(each) for each in present], self.block_size)

    def end_copy(self, sequence: DecodeSequence, kv_bytes: int, copy_s: float) -> None:
        """Its KV has arrived, on whichever way it was."""
        owner = sequence.owner
        self._copied_bytes += self._weight * (kv_bytes - self._copied_bytes)
        self._copied_s += self._weight * (copy_s - self._copied_s)
        self._end_pins(owner)
        if sequence.phase is DecodePhase.SWAPPING_OUT:
            self.blocks.release(owner)
            self._enter(sequence, DecodePhase.SWAPPED)
        else:
            self.host.release(owner)
            sequence.enter(DecodePhase.RUNNING)
            del self._phases[owner]

    def forget(self, owner: BlockOwner) -> None:
        """The sequence ends; no copy of it is under way any more. Also of one that was never swapped."""
        if owner in self._phases:
            del self._phases[owner]
            self._end_pins(owner)
            self.host.release(owner)

    @property
    def _copy_bytes_per_s(self) -> float | None:
        return self._copied_bytes / self._copied_s if self._copied_s > 0 else None

    @property
    def _weight(self) -> float:
        return NEWEST_WEIGHT if self._copied_s > 0 else 1.0

    def _as_holder(self, sequence: DecodeSequence) -> Holder:
        growing = Growing(sequence.tokens, sequence.coming_tokens)
        return Holder(growing, len(self.blocks.block_table(sequence.owner)))

    def _host_blocks(self, owner: BlockOwner) -> tuple[int, ...]:
        return tuple(self.host.block_table(owner))

    def _enter(self, sequence: DecodeSequence, phase: DecodePhase) -> None:
        sequence.enter(phase)
        self._phases[sequence.owner] = phase

    def _end_pins(self, owner: BlockOwner) -> None:
        for allocator in (self.blocks, self.host):
            if allocator.is_pinned(owner):
                allocator.unpin(owner)
