"""Who is given up for memory, or gives way to a prompt: part of the decode room's decisions.

Blocks grow with the sequence; when none is left the latest arrivals are preempted: their KV waits in the host
tier (``decode.swapping``), or they go back to their gateway, which continues them elsewhere with the tokens
they already have.
"""

from dataclasses import dataclass

from common.room_mates import RoomMates
from decode.events import DecodeCommand
from decode.holdings import Holdings
from decode.sequence import PREEMPTED, DecodeSequence
from scheduler.policy.decode_batching import choose_victims
from scheduler.policy.mixed_batching import choose_to_give_way


@dataclass(slots=True)
class GivingWay:
    """``preempted``: how often a sequence lost its blocks to older ones, or to a prompt, since the start.
    ``has_just_given``: whether somebody gave way as the newest step began."""

    held: Holdings
    mates: RoomMates
    preempted: int = 0
    has_just_given: bool = False

    def to_prompt(self) -> list[DecodeCommand]:
        """On a mixed instance a prompt that lacks memory comes first."""
        if not (self.mates.is_mixed and self.mates.wanted_blocks):
            return []
        blocks = self.held.blocks
        free = blocks.free_blocks + sum(map(self.held.swapping.coming_blocks, blocks.pools))
        resting = self.held.at_rest()
        relief = [len(blocks.block_table(each.owner)) for each in resting]
        ages = [each.request.attempt + each.preemptions for each in resting]
        victims = choose_to_give_way(relief, ages, self.mates.wanted_blocks - free)
        return [command for index in victims for command in self._preempt(resting[index], may_swap=True)]

    def make_room(self) -> tuple[list[DecodeSequence], list[DecodeCommand]]:
        """Gives every sequence at rest a block for its next position, preempting where none is left.

        Returns those that have one. A sequence sits a step out only while the missing blocks are held by one
        that is being pulled, moved or swapped, or is in another lane's step, and cannot be preempted before
        that. Where nobody is left to give any up (they may be in quarantine, for how long nobody knows), it
        goes back itself.
        """
        resting, blocks = self.held.at_rest(), self.held.blocks
        lacking = self.held.lacking_blocks(resting)
        if blocks.is_one_pool and len(lacking) <= blocks.free_blocks_in(blocks.pools[0]):
            for sequence in lacking:
                blocks.try_allocate(sequence.owner, 1)
            return resting, []
        commands = [command for pool in blocks.pools for command in self._make_room_in(pool)]
        ready = [
            sequence
            for sequence in self.held.at_rest()
            if not self.held.lacks_block(sequence) or self.held.blocks.try_allocate(sequence.owner, 1)
        ]
        return ready, commands

    def _make_room_in(self, pool: int) -> list[DecodeCommand]:
        held, blocks = self.held, self.held.blocks
        resting = [each for each in held.at_rest() if blocks.pool_of(each.owner) == pool]
        missing = sum(map(held.lacks_block, resting)) - blocks.free_blocks_in(pool)
        missing -= held.swapping.coming_blocks(pool)
        if missing <= 0:
            return []
        # A victim gives its blocks back, and needs none for its own next position any more.
        relief = [
            len(blocks.block_table(sequence.owner)) + held.lacks_block(sequence) for sequence in resting
        ]
        commands: list[DecodeCommand] = []
        for index in choose_victims(relief, missing):
            commands += self._preempt(resting[index], may_swap=True)
        if held.is_stuck(resting[0]):
            commands += self._preempt(resting[0], may_swap=False)
        return commands

    def _preempt(self, sequence: DecodeSequence, *, may_swap: bool) -> list[DecodeCommand]:
        """To the host tier and back, or to be computed again, whichever is cheaper."""
        self.preempted += 1
        sequence.preemptions += 1
        pull_rate = self.held.pulls.budget.bytes_per_s
        swap = self.held.swapping.try_swap_out(sequence, pull_rate) if may_swap else None
        return [swap] if swap is not None else [*self.held.give_back(sequence, PREEMPTED)]
