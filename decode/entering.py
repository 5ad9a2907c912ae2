"""Who is given blocks next, of those that wait for memory: part of the decode room's decisions.

In the order of arrival: nobody overtakes one that waits for memory, and no newcomer a copy from the host tier
that is under way, or a prompt that waits for memory here.
"""

from dataclasses import dataclass

from common.config import DecodeAdmission
from common.kv.blocks import blocks_for
from common.lifecycle import DecodePhase
from common.messages import DecodeTask, ResumeTask
from common.room_mates import RoomMates
from decode.events import InheritSequence, SwapIn
from decode.holdings import Holdings
from decode.sequence import RUNNING, DecodeSequence
from scheduler.policy.decode_admission import Growing, Pool, blocks_to_enter, can_admit, looks_ahead

COUNTED = Growing(1, 1)
"""Anybody, where only how many there are matters."""


@dataclass(frozen=True, slots=True)
class Entering:
    """``max_batch``: sequences that are decoded at once."""

    held: Holdings
    mates: RoomMates
    admission: DecodeAdmission
    max_batch: int

    def enter(self, now: float) -> list[SwapIn | InheritSequence]:
        """All that have room now, from elsewhere or from the host tier.

        Of the batch's slots those count that earlier ones have: sequences that stayed here come without being
        admitted, and might never leave one free.
        """
        commands: list[SwapIn | InheritSequence] = []
        if not self.held.sequences.without_blocks:
            return commands
        reserved = self.mates.reserved_blocks(now)
        most = self.max_batch - self.mates.reserved_slots(now)
        here = self.held.sequences.values()
        is_one_away = False
        for earlier, sequence in enumerate(self._of_batch() if self.is_closed else here):
            if sequence.phase is RUNNING:
                continue
            has_come = sequence.has_blocks
            if not has_come and earlier < self.max_batch:
                if sequence.is_swapped:
                    has_come = self._try_swap_in(sequence, reserved, commands)
                elif not is_one_away and earlier < most:
                    has_come = self._try_enter(sequence, reserved, commands)
            if not has_come:
                break
            is_one_away |= sequence.is_swapped
        return commands

    @property
    def is_closed(self) -> bool:
        """Whether there is a batch that nobody may join, or it is the prompts' turn to be the next one
        (``scheduler.policy.mixed_batching``, static)."""
        mates = self.mates
        if not mates.is_static:
            return False
        if self.held.in_batch or mates.is_computing or (mates.waiting_prompts and not mates.is_decodes_turn):
            return True
        return any(each.is_swapped for each in self.held.sequences.values())

    def _of_batch(self) -> list[DecodeSequence]:
        return [each for each in self.held.sequences.values() if each.phase is not DecodePhase.WAITING]

    def is_shut_out(self) -> bool:
        """Whether the first that waits for memory would be taken into no pool now, were it the one with the
        most room: nor will it as others grow (greedy admission)."""
        for earlier, sequence in enumerate(self.held.sequences.values()):
            if sequence.phase is not DecodePhase.WAITING:
                continue
            pools = self.held.blocks.open_pools if sequence.pool is None else [sequence.pool]
            return earlier >= self.max_batch or not any(
                self.held.room_in(pool) >= self.held.longest_blocks(sequence)
                and self._has_room(pool, self._as_newcomer(sequence), 0)
                for pool in pools
            )
        return False

    def blocks_wanted_by(self, away: DecodeSequence) -> int:
        """That have to be free for it to come in, or back, beside those that are there."""
        if away.is_swapped:
            return self.held.swapping.blocks_wanted_by(away, self.held.with_blocks())
        newcomer, present = self._as_newcomer(away), self._present()
        return blocks_to_enter(self.admission, newcomer, present, self.held.block_size)

    def _try_enter(
        self,
        sequence: DecodeSequence,
        reserved_blocks: int,
        commands: list[SwapIn | InheritSequence],
    ) -> bool:
        held, pool = self.held, sequence.pool
        if pool is None:
            pool = held.blocks.pool_for_newcomer(held.longest_blocks(sequence))
        newcomer = self._as_newcomer(sequence)
        if pool is None or not self._has_room(pool, newcomer, reserved_blocks):
            return False
        held.blocks.try_allocate(sequence.owner, newcomer.blocks(0, held.block_size), pool)
        self.mates.is_decodes_turn = False
        sequence.enter(DecodePhase.PULLING)
        if isinstance(sequence.task, DecodeTask):
            held.pulls.begin(sequence.owner)
        else:
            commands.append(self._inherit(sequence, sequence.task))
        return True

    def _try_swap_in(
        self,
        sequence: DecodeSequence,
        reserved_blocks: int,
        commands: list[SwapIn | InheritSequence],
    ) -> bool:
        swap = self.held.swapping.try_swap_in(sequence, self.held.with_blocks(), reserved_blocks)
        if swap is None:
            return False
        commands.append(swap)
        return True

    def _has_room(self, pool: int, newcomer: Growing, reserved_blocks: int) -> bool:
        present = self._present(pool)
        free = self.held.blocks.free_blocks_in(pool) - (reserved_blocks if present else 0)
        room = Pool(free, self.held.block_size)
        return can_admit(self.admission, room, newcomer, present)

    def _present(self, pool: int | None = None) -> list[Growing]:
        """Who holds blocks, there or anywhere. Some admissions only count them."""
        sequences, is_anywhere = self.held.sequences, pool is None or self.held.blocks.is_one_pool
        if is_anywhere and not looks_ahead(self.admission):
            return [COUNTED] * (len(sequences) - sequences.without_blocks)
        there = self.held.with_blocks()
        if not is_anywhere:
            there = [each for each in there if self.held.moves.pool_of(each) == pool]
        return [
            *(Growing(each.tokens, each.coming_tokens) for each in there),
            *(Growing(*each) for each in self.mates.begun()),
        ]

    def _inherit(self, sequence: DecodeSequence, task: ResumeTask) -> InheritSequence:
        filled = blocks_for(sequence.position, self.held.block_size)
        blocks = tuple(self.held.blocks.block_table(sequence.owner)[:filled])
        return InheritSequence(sequence.owner, task.former, sequence.position, blocks)

    def _as_newcomer(self, sequence: DecodeSequence) -> Growing:
        """What it is still to draw only some admissions look at."""
        tokens = sequence.tokens + sequence.awaits_first_token
        return Growing(tokens, sequence.coming_tokens if looks_ahead(self.admission) else 1)
