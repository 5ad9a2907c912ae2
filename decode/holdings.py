"""The decode room's sequences and what each of them holds: blocks, a row of a step, a pull, a move,
a place in the host tier.

Nothing is decided here but whether a sequence can be forgotten now: not while the engine or a transfer uses
its blocks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from common.ids import InstanceId, RequestId
from common.kv.blocks import BlockAllocator, BlockOwner, blocks_for
from common.lifecycle import DecodePhase
from common.messages import DecodeTask, ErrorReply
from common.sequences import PublishFailure, failure_of
from decode.batches import Batches
from decode.departures import Departures
from decode.moves import DESTINATION_ROOM, Moves
from decode.pulls import Pulls
from decode.sequence import ROOM, RUNNING, DecodeSequence, Sequences
from decode.swapping import Swapping


@dataclass(frozen=True, slots=True)
class Holdings:
    """All parts are the state's own. ``sequences`` are in the order of arrival."""

    sequences: Sequences
    blocks: BlockAllocator
    block_size: int
    pulls: Pulls
    moves: Moves
    batches: Batches
    departures: Departures
    swapping: Swapping

    def check(self, *, is_step_due: bool = False) -> None:
        """Invariants, called by tests after every event."""
        self.sequences.check()
        self.blocks.check()
        self.moves.check()
        self.batches.check()
        self.departures.check(self.sequences)
        self.swapping.check(self.sequences)
        self._check_waits(is_step_due=is_step_due)
        moving = {owner for owner, each in self.sequences.items() if each.phase is DecodePhase.MOVING}
        assert moving == self.moves.moving.keys(), "a sequence that moves is gone"
        for owner, sequence in self.sequences.items():
            assert owner == sequence.owner
            if sequence.phase is DecodePhase.RUNNING:
                held = len(self.blocks.block_table(owner))
                assert held * self.block_size >= sequence.position, "KV positions without a block"
        held_owners = {owner for owner in self.blocks.owners() if owner.room == ROOM}
        with_blocks = {owner for owner, sequence in self.sequences.items() if sequence.has_blocks}
        assert held_owners == with_blocks, "blocks are held for a sequence that is gone"
        pulled = {
            owner
            for owner, sequence in self.sequences.items()
            if sequence.phase is DecodePhase.PULLING and isinstance(sequence.task, DecodeTask)
        }
        assert {*self.pulls.owners} == pulled, "who is pulled is not known"
        for owner, sequence in self.sequences.items():
            assert not (sequence.is_cancelled and self.pulls.rests(owner)), "a cancelled sequence stays"
            if sequence.phase is DecodePhase.RUNNING:
                assert not sequence.awaits_first_token, "a sequence runs without its first token"
        for row in (row for step in self.batches.steps.values() for row in step):
            assert row.owner in self.sequences, "the step in flight computes a sequence that is gone"
            assert row.owner not in moving, "the step in flight computes a sequence that moves"

    def _check_waits(self, *, is_step_due: bool) -> None:
        """Everybody who waits, waits for something that happens."""
        is_under_way = any(
            sequence.has_blocks and sequence.phase is not DecodePhase.RUNNING
            for sequence in self.sequences.values()
        )
        is_under_way |= is_step_due or self.batches.is_computing
        is_under_way |= any(map(self._other_room_holds, self.blocks.pools))
        assert is_under_way or not self.running(), "nothing is under way"
        for sequence in self.at_rest():
            is_next = is_step_due or sequence.lane in self.batches.steps
            pool = self.blocks.pool_of(sequence.owner)
            assert is_next or self.has_others_in(pool, sequence), "nobody is going to free a block"
        for sequence in self.sequences.values():
            may_wait = sequence.pool is None and not self.blocks.open_pools
            has_home = self.room_in(sequence.pool) >= self.longest_blocks(sequence)
            is_waiting = sequence.phase is DecodePhase.WAITING
            assert has_home or may_wait or not is_waiting, "a sequence waits for a pool that there is not"

    @property
    def in_batch(self) -> int:
        """Sequences that run, be it that they move."""
        return self.sequences.in_batch

    @property
    def waiting(self) -> int:
        """Sequences that are here but not in the batch yet."""
        return len(self.sequences) - self.in_batch

    def is_unsettled(self, rows: int) -> bool:
        """Whether the end of a step, nobody of whose rows ends, may change who is computed: somebody else
        runs than the ``rows`` of all steps in flight, waits for the end of a step, or has more room then."""
        sequences, departures, pulls = self.sequences, self.departures, self.pulls
        return (
            departures.is_leaving
            or bool(departures.homes)
            or (bool(pulls.under_way) and pulls.is_any_waiting)
            or (len(sequences) > rows and sequences.in_batch != rows)
            or sequences.swapped > 0
        )

    def with_blocks(self) -> list[DecodeSequence]:
        return [sequence for sequence in self.sequences.values() if sequence.has_blocks]

    def running(self) -> list[DecodeSequence]:
        return [sequence for sequence in self.sequences.values() if sequence.phase is RUNNING]

    def at_rest(self) -> list[DecodeSequence]:
        """Running sequences that no step computes now, in arrival order."""
        computed = self.batches.computed
        if not computed:
            return self.running()
        everyone = self.sequences.values()
        return [each for each in everyone if each.phase is RUNNING and each.owner not in computed]

    def pulling(self, owner: BlockOwner) -> DecodeSequence:
        sequence = self.sequences.get(owner)
        if sequence is None or sequence.phase is not DecodePhase.PULLING:
            raise ValueError(f"{owner} is not being pulled")
        return sequence

    def room_in(self, pool: int | None) -> int:
        """Blocks of the longest sequence that could ever be held there; None: anywhere."""
        if pool is None:
            return self.blocks.largest_pool_blocks
        return self.blocks.total_blocks_in(pool) if pool in self.blocks.open_pools else 0

    def longest_blocks(self, sequence: DecodeSequence) -> int:
        return blocks_for(sequence.request.max_total_tokens, self.block_size)

    def lacks_block(self, sequence: DecodeSequence) -> bool:
        return len(self.blocks.block_table(sequence.owner)) * self.block_size < sequence.tokens

    def lacking_blocks(self, sequences: Iterable[DecodeSequence]) -> list[DecodeSequence]:
        """Those of them that lack one."""
        block_table, size = self.blocks.block_table, self.block_size
        return [
            each
            for each in sequences
            if len(block_table(each.owner)) * size < each.prompt_tokens + len(each.output_ids)
        ]

    def is_stuck(self, sequence: DecodeSequence) -> bool:
        """Whether it lacks a block, and no other sequence is going to free one."""
        pool = self.blocks.pool_of(sequence.owner)
        is_short = self.lacks_block(sequence) and self.blocks.free_blocks_in(pool) == 0
        return is_short and not self.has_others_in(pool, sequence)

    def has_others_in(self, pool: int, sequence: DecodeSequence) -> bool:
        """Whether somebody else holds blocks there, be it in the instance's other room."""
        is_held_here = any(
            pool in (self.blocks.pool_of(other.owner), self.moves.pool_of(other))
            for other in self.sequences.values()
            if other is not sequence and other.has_blocks
        )
        return is_held_here or self._other_room_holds(pool)

    def _other_room_holds(self, pool: int) -> bool:
        own = (ROOM, DESTINATION_ROOM)
        return any(
            owner.room not in own and self.blocks.pool_of(owner) == pool for owner in self.blocks.owners()
        )

    def discard_attempts(self, request_id: RequestId, below: int) -> None:
        """Of the request, those below that one."""
        for sequence in self.sequences.of_request(request_id):
            if sequence.owner.attempt < below:
                self.discard(sequence)

    def discard_all(self, matches: Callable[[DecodeSequence], bool]) -> None:
        for sequence in [sequence for sequence in self.sequences.values() if matches(sequence)]:
            self.discard(sequence)

    def discard(self, sequence: DecodeSequence) -> None:
        """Forgets a sequence now, or marks it where the engine or a transfer still uses its blocks."""
        is_pulled = sequence.phase is DecodePhase.PULLING and not self.pulls.rests(sequence.owner)
        is_computed = self.batches.computes(sequence.owner)
        is_copied = sequence.phase in (
            DecodePhase.MOVING,
            DecodePhase.SWAPPING_OUT,
            DecodePhase.SWAPPING_IN,
        )
        if is_computed or is_pulled or is_copied:
            self.sequences.cancel(sequence)
            self.batches.disturb()
        else:
            self.drop(sequence)

    def give_back(
        self,
        sequence: DecodeSequence,
        error: ErrorReply,
        *,
        can_continue: bool = True,
        lost_instance: InstanceId | None = None,
    ) -> list[PublishFailure]:
        """Forgets it now, and tells its gateway; nobody waits to hear of one that was cancelled."""
        self.drop(sequence)
        if sequence.is_cancelled:
            return []
        return [failure_of(sequence.request, error, can_continue=can_continue, lost_instance=lost_instance)]

    def drop(self, sequence: DecodeSequence) -> None:
        del self.sequences[sequence.owner]
        self.departures.forget(sequence.owner)
        self.pulls.end(sequence.owner)
        self.swapping.forget(sequence.owner)
        if sequence.has_blocks:
            self.blocks.release(sequence.owner)
