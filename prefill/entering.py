"""Which prompt is given its memory next: part of the prefill room's decisions.

One that is to be decoded elsewhere wants room for its own tokens. On a mixed instance one that stays may want
more: a slot of the batch, what it is expected to draw (``scheduler.policy.decode_admission``), or all that it
may, and then only as a batch is taken (``mixed_batching``, static).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.ids import InstanceId
from common.kv.blocks import BlockAllocator, blocks_for
from common.room_mates import RoomMates
from prefill.prompts import PromptQueue
from prefill.sequence import PrefillSequence
from scheduler.policy.decode_admission import Growing, blocks_to_enter, looks_ahead


@dataclass(slots=True)
class Entering:
    """``prompts``, ``blocks`` and ``mates`` are the state's own. ``_slots`` and ``_free_blocks``: that those
    who are let in have left, of the batch's and of what nobody will come to hold."""

    prompts: PromptQueue
    blocks: BlockAllocator
    block_size: int
    mates: RoomMates
    instance_id: InstanceId
    is_open: bool = True
    _slots: int = 0
    _free_blocks: int = 0
    _is_batch_empty: bool = True

    def look(self, staying: int, now: float) -> None:
        """Before anybody is asked about. ``staying``: that the decode room is about to have."""
        mates = self.mates
        mates.want_nothing()
        if not mates.needs_slots:
            self.is_open = True
            return
        taken = mates.taken_slots + staying
        self._slots = mates.max_batch - taken - mates.owed_slots(now)
        begun = self.prompts.begun()
        if mates.is_static:
            self.is_open = not (taken or begun or (mates.is_away and mates.is_decodes_turn))
            self._free_blocks, self._is_batch_empty = self.blocks.free_blocks, True
        else:
            self._slots -= sum(map(self._stays, begun))

    def begun(self) -> Sequence[tuple[int, int]]:
        """(tokens, tokens to come) of prompts that have memory and are to be decoded here."""
        return [self._growing(each) for each in self.prompts.begun() if self._stays(each)]

    def _growing(self, sequence: PrefillSequence) -> tuple[int, int]:
        """As decodes' next step finds it: where they wait for prompts it has its first token by then, else it
        draws that beside them, as its last."""
        drawn = 1 if self.mates.policy == "prefill_first" and sequence.coming_tokens > 1 else 0
        return sequence.tokens + drawn, sequence.coming_tokens - drawn

    def try_enter(self, sequence: PrefillSequence, now: float) -> bool:
        """Gives it blocks for its prompt."""
        mates, needed = self.mates, blocks_for(sequence.tokens, self.block_size)
        if mates.is_static:
            return self._try_join(sequence, needed)
        owed = mates.owed_blocks(now)
        stays = mates.is_mixed and self._stays(sequence)
        if stays:
            if mates.needs_slots and self._slots <= 0:
                mates.wants_slot, mates.wanting = True, sequence.owner
                return False
            wanted = self._blocks_to_enter(sequence)
            if self.blocks.free_blocks - wanted < owed and wanted > needed:
                mates.entry_blocks, mates.wanting = 0 if owed else wanted, sequence.owner
                return False
        has_room = self.blocks.free_blocks - needed >= owed
        if has_room and self.blocks.try_allocate(sequence.owner, needed):
            self._slots -= stays
            return True
        # Who has waited so long gives way to nobody.
        mates.wanted_blocks, mates.wanting = 0 if owed else needed, sequence.owner
        return False

    def _blocks_to_enter(self, sequence: PrefillSequence) -> int:
        mates = self.mates
        if not looks_ahead(mates.admission):
            return 0
        present = [Growing(*each) for each in (*mates.decoded(), *self.begun())]
        newcomer = Growing(*self._growing(sequence))
        return blocks_to_enter(mates.admission, newcomer, present, self.block_size)

    def _try_join(self, sequence: PrefillSequence, needed: int) -> bool:
        """A batch that is taken. None of it lacks memory before its end; whoever is alone comes in if its
        prompt fits."""
        if not self.is_open or self._slots <= 0:
            return False
        longest = needed
        if self._stays(sequence):
            longest = blocks_for(sequence.request.max_total_tokens, self.block_size)
        if longest > self._free_blocks and not self._is_batch_empty:
            return False
        if not self.blocks.try_allocate(sequence.owner, needed):
            return False
        self._slots -= 1
        self._free_blocks -= longest
        self._is_batch_empty = False
        self.mates.is_decodes_turn = True
        return True

    def _stays(self, sequence: PrefillSequence) -> bool:
        return sequence.decode_instance == self.instance_id
