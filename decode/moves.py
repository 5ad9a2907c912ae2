"""Running sequences on their way from one pool to another: part of the decode room's decisions.

A sequence that moves is in no step. It keeps its blocks, pinned, while they are copied into others, which it
holds in the other pool under a second owner; then it goes on there. A copy that failed may still land: its
destination rests in quarantine, meanwhile nobody else moves into that pool, and the sequence goes on where it
was, if its KV is still there.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from common.kv.blocks import BlockAllocator, BlockOwner, blocks_for
from common.lifecycle import DecodePhase
from decode.events import MoveSequence
from decode.sequence import DecodeSequence
from scheduler.policy.rebalance import (
    PoolLoad,
    Resident,
    can_pay,
    choose_balancing,
    choose_departure,
    steps_before_pay,
)

DESTINATION_ROOM = "move"
"""Second owners'."""
MAX_FAILED_MOVES = 3
"""A sequence that no worker can take over stays."""


@dataclass(slots=True)
class Moves:
    """``limit``: at once. ``min_gain_tokens``: by which a move without need shrinks the most context on one
    worker. ``moving`` is by the sequences' own names."""

    blocks: BlockAllocator
    block_size: int
    limit: int
    min_gain_tokens: int
    moving: dict[BlockOwner, DecodeSequence] = field(default_factory=dict)
    _resting: dict[BlockOwner, int] = field(default_factory=dict)

    def check(self) -> None:
        """Invariants, called by tests after every event."""
        held = {owner for owner in self.blocks.owners() if owner.room == DESTINATION_ROOM}
        assert held == {destination_of(owner) for owner in self.moving}, "a move holds too little or too much"
        for owner, sequence in self.moving.items():
            assert owner == sequence.owner
            assert sequence.phase is DecodePhase.MOVING
            assert self.blocks.is_pinned(owner), "the source of a move may be given away"
            assert self.blocks.pool_of(owner) != self.pool_of(sequence), "a move within a pool"
            places = len(self.blocks.block_table(destination_of(owner))) * self.block_size
            assert places > sequence.position, "a move without room for the next position"
        for owner in self._resting:
            assert self.blocks.is_quarantined(destination_of(owner)), "nothing rests there any more"

    def pool_of(self, sequence: DecodeSequence) -> int:
        """Where it is, or is going to be."""
        owner = sequence.owner
        return self.blocks.pool_of(destination_of(owner) if owner in self.moving else owner)

    @property
    def can_start(self) -> bool:
        return len(self.moving) < self.limit and not self.blocks.is_one_pool and bool(self.blocks.pools)

    def steps_before_any(self, entered: Collection[DecodeSequence]) -> int | None:
        """So many steps may end before anybody could move, if nobody comes or goes. None: never."""
        if self.limit == 0 or len(self.blocks.pools) < 2:
            return None
        return steps_before_pay(self._loads(entered), self.min_gain_tokens)

    def start(
        self, entered: Collection[DecodeSequence], resting: Sequence[DecodeSequence], *, may_balance: bool
    ) -> list[MoveSequence]:
        """``entered``: all that hold blocks; ``resting``: those of them that could move now."""
        commands: list[MoveSequence] = []
        while self.can_start:
            command = self._try_start(entered, resting, may_balance=may_balance)
            if command is None:
                break
            commands.append(command)
        return commands

    def _try_start(
        self, entered: Collection[DecodeSequence], resting: Sequence[DecodeSequence], *, may_balance: bool
    ) -> MoveSequence | None:
        loads = self._loads(entered)
        if not can_pay(loads, self.min_gain_tokens):
            return None
        movable = [sequence for sequence in resting if self._is_movable(sequence)]
        residents = [self._as_resident(sequence) for sequence in movable]
        move = choose_departure(loads, residents)
        if move is None and may_balance:
            move = choose_balancing(loads, residents, self.min_gain_tokens)
        if move is None:
            return None
        sequence, resident = movable[move.resident], residents[move.resident]
        owner, destination = sequence.owner, destination_of(sequence.owner)
        self.blocks.try_allocate(destination, resident.blocks, move.pool)
        self.blocks.pin(owner)
        sequence.enter(DecodePhase.MOVING)
        self.moving[owner] = sequence
        filled = blocks_for(sequence.position, self.block_size)
        return MoveSequence(
            owner,
            sequence.position,
            tuple(self.blocks.block_table(owner)[:filled]),
            tuple(self.blocks.block_table(destination)[:filled]),
        )

    def end(self, owner: BlockOwner, *, has_arrived: bool) -> DecodeSequence:
        """The sequence, running again, where its KV is; whether that is lost is the caller's to ask."""
        if owner not in self.moving:
            raise ValueError(f"{owner} is not being moved")
        sequence, destination = self.moving.pop(owner), destination_of(owner)
        self.blocks.unpin(owner)
        if not has_arrived:
            self._resting[owner] = self.blocks.pool_of(destination)
            self.blocks.quarantine(destination)
            sequence.failed_moves += 1
        elif self.blocks.is_lost(destination):
            self.blocks.release(destination)
        else:
            self.blocks.replace(owner, destination)
        sequence.enter(DecodePhase.RUNNING)
        return sequence

    def end_quarantine(self, owner: BlockOwner) -> None:
        """Nothing of the sequence's failed move can land any more."""
        if owner not in self._resting:
            raise ValueError(f"{owner} left nothing in quarantine by a move")
        del self._resting[owner]
        self.blocks.end_quarantine(destination_of(owner))

    def _is_movable(self, sequence: DecodeSequence) -> bool:
        owner = sequence.owner
        return (
            sequence.phase is DecodePhase.RUNNING
            and sequence.failed_moves < MAX_FAILED_MOVES
            and not self.blocks.is_lost(owner)
            and owner not in self._resting
        )

    def _as_resident(self, sequence: DecodeSequence) -> Resident:
        request = sequence.request
        return Resident(
            pool=self.blocks.pool_of(sequence.owner),
            context_tokens=sequence.tokens,
            blocks=blocks_for(sequence.tokens, self.block_size),
            longest_blocks=blocks_for(request.max_total_tokens, self.block_size),
            max_steps=request.max_total_tokens - sequence.tokens,
        )

    def _loads(self, entered: Collection[DecodeSequence]) -> dict[int, PoolLoad]:
        tokens = dict.fromkeys(self.blocks.pools, 0)
        sequences = dict.fromkeys(self.blocks.pools, 0)
        for sequence in entered:
            pool = self.pool_of(sequence)
            tokens[pool] += sequence.tokens
            sequences[pool] += 1
        open_pools, resting = {*self.blocks.open_pools}, {*self._resting.values()}
        return {
            pool: PoolLoad(
                tokens[pool],
                sequences[pool],
                0 if pool in resting else self.blocks.free_blocks_in(pool),
                self.blocks.total_blocks_in(pool),
                pool in open_pools,
            )
            for pool in tokens
        }


def destination_of(owner: BlockOwner) -> BlockOwner:
    """Who holds the blocks that the sequence moves into."""
    return BlockOwner(DESTINATION_ROOM, owner.request_id, owner.attempt)
