"""Whose turn it is: which prompts get memory, and how many tokens of each the next chunk computes. Part of
the prefill room's decisions.

Chunks are of fixed size (TetriInfer 3.3.3), or of whole prompts as a mixed instance's policy may want
(``mixed_batching``). A prompt waits until its turn has come and there are blocks for all of its tokens
(``prefill.entering``).
"""

from dataclasses import dataclass

from common.kv.blocks import BlockAllocator, BlockOwner
from common.lifecycle import PrefillPhase, next_prefill_phase
from common.room_mates import RoomMates
from prefill.chunks import ChunksInFlight
from prefill.entering import Entering
from prefill.events import ChunkSlice
from prefill.prompts import PromptQueue
from prefill.sequence import PrefillSequence
from scheduler.policy.mixed_batching import prompt_tokens_beside
from scheduler.policy.prefill_batching import FillBatch, fill_whole


@dataclass(frozen=True, slots=True)
class Batching:
    """``prompts``, ``blocks``, ``mates`` and ``chunks`` are the state's own."""

    prompts: PromptQueue
    blocks: BlockAllocator
    mates: RoomMates
    chunk_tokens: int
    fill_batch: FillBatch
    chunks: ChunksInFlight
    entering: Entering

    def next_slices(self, staying: int, now: float) -> tuple[ChunkSlice, ...]:
        """Of the next chunk, beside what is decoded; empty where nobody waits or there is no memory.
        ``staying``: that the decode room is about to have, and has not counted yet."""
        decoding = self.mates.decoding + staying
        room = prompt_tokens_beside(self.mates.policy, self.chunk_tokens, decoding)
        ready = self._give_blocks(staying, room, now)
        fill_batch = fill_whole if self.mates.needs_slots else self.fill_batch
        sizes = fill_batch([sequence.remaining_tokens for sequence in ready], room)
        return tuple(
            ChunkSlice(
                owner=sequence.owner,
                request=sequence.request,
                start=sequence.computed_tokens,
                tokens=tokens,
                block_table=tuple(self.blocks.block_table(sequence.owner)),
                is_last=tokens == sequence.remaining_tokens,
            )
            for sequence, tokens in zip(ready, sizes, strict=False)
        )

    def _give_blocks(self, staying: int, chunk_tokens: int, now: float) -> list[PrefillSequence]:
        """The window's head for as long as blocks last, enough for a chunk, or for a batch that is taken:
        nobody who has yet to get any overtakes a prompt that waits for memory."""
        ready: list[PrefillSequence] = []
        tokens, is_full = 0, False
        is_whole, is_static = self.mates.needs_slots, self.mates.is_static
        self.entering.look(staying, now)
        for sequence in self._batch(now) if is_static else self.prompts.window(now, self._computed()):
            is_past = is_whole and tokens > 0 and tokens + sequence.remaining_tokens > chunk_tokens
            if (is_past or tokens >= chunk_tokens) and not is_static:
                break
            if sequence.phase is PrefillPhase.QUEUED:
                if is_full or not self.entering.try_enter(sequence, now):
                    is_full = True
                    continue
                sequence.phase = next_prefill_phase(sequence.phase, PrefillPhase.COMPUTING)
            ready.append(sequence)
            tokens += sequence.remaining_tokens
        return ready

    def _batch(self, now: float) -> list[PrefillSequence]:
        """Of static ones: who has begun, and where the next is taken all that could be of it."""
        if self.entering.is_open:
            return self.prompts.window(now, at_least=self.mates.max_batch)
        computed = self._computed()
        return [each for each in self.prompts.begun() if each.owner not in computed]

    def _computed(self) -> set[BlockOwner]:
        return {piece.owner for piece in self.chunks.all_slices}
