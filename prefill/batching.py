"""Whose turn it is: which prompts get memory, and how many tokens of each the next chunk computes. Part of
the prefill room's decisions.

Chunks are of fixed size (TetriInfer 3.3.3). A prompt waits until its turn has come and there are blocks for
all of its tokens.
"""

from dataclasses import dataclass

from common.kv.blocks import BlockAllocator, blocks_for
from common.lifecycle import PrefillPhase, next_prefill_phase
from common.room_mates import RoomMates
from prefill.chunks import ChunksInFlight
from prefill.events import ChunkSlice
from prefill.prompts import PromptQueue
from prefill.sequence import PrefillSequence
from scheduler.policy.mixed_batching import prompt_tokens_beside
from scheduler.policy.prefill_batching import FillBatch


@dataclass(frozen=True, slots=True)
class Batching:
    """``prompts``, ``blocks``, ``mates`` and ``chunks`` are the state's own."""

    prompts: PromptQueue
    blocks: BlockAllocator
    block_size: int
    mates: RoomMates
    chunk_tokens: int
    fill_batch: FillBatch
    chunks: ChunksInFlight

    def next_slices(self, staying: int, now: float) -> tuple[ChunkSlice, ...]:
        """Of the next chunk, beside what is decoded; empty where nobody waits or there is no memory.
        ``staying``: that the decode room is about to have, and has not counted yet."""
        decoding = self.mates.decoding + staying
        room = prompt_tokens_beside(self.mates.policy, self.chunk_tokens, decoding)
        ready = self._give_blocks(now, room)
        sizes = self.fill_batch([sequence.remaining_tokens for sequence in ready], room)
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

    def _give_blocks(self, now: float, chunk_tokens: int) -> list[PrefillSequence]:
        """The window's head for as long as blocks last, enough for a chunk: nobody who has yet to get any
        overtakes a prompt that waits for memory."""
        ready: list[PrefillSequence] = []
        tokens, is_full, owed = 0, False, self.mates.owed_blocks(now)
        self.mates.wanted_blocks = 0
        for sequence in self.prompts.window(now, {piece.owner for piece in self.chunks.all_slices}):
            if tokens >= chunk_tokens:
                break
            if sequence.phase is PrefillPhase.QUEUED:
                if is_full:
                    continue
                needed = blocks_for(sequence.tokens, self.block_size)
                has_room = self.blocks.free_blocks - needed >= owed
                if not (has_room and self.blocks.try_allocate(sequence.owner, needed)):
                    is_full = True
                    # Who has waited so long gives way to nobody.
                    self.mates.wanted_blocks = 0 if owed else needed
                    continue
                sequence.phase = next_prefill_phase(sequence.phase, PrefillPhase.COMPUTING)
            ready.append(sequence)
            tokens += sequence.remaining_tokens
        return ready
