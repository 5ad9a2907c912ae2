"""The prefill room's sequences and what each of them holds: a place in the queue, blocks, a slice of the
chunk in flight, a portion of KV that is sent.

Nothing is decided here but whether a sequence can be forgotten now: not while the engine or the transfer uses
its blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass

from common.attempts import EndedAttempts
from common.errors import RequestCancelled
from common.ids import InstanceId, RequestId
from common.kv.blocks import BlockAllocator, BlockOwner
from common.lifecycle import PrefillPhase
from common.messages import ErrorReply
from prefill.chunks import ChunksInFlight
from prefill.events import AnswerPull, PrefillCommand, WithdrawOffer
from prefill.prompts import PromptQueue
from prefill.sequence import ROOM, PrefillSequence


@dataclass(frozen=True, slots=True)
class Holdings:
    """All parts are the state's own. ``sequences`` are in the order of arrival. ``ended``: attempts of which
    nothing is taken any more."""

    instance_id: InstanceId
    sequences: dict[BlockOwner, PrefillSequence]
    blocks: BlockAllocator
    prompts: PromptQueue
    chunks: ChunksInFlight
    ended: EndedAttempts

    def check(self) -> None:
        """Invariants, called by tests after every event."""
        self.blocks.check()
        queued = {sequence.owner for sequence in self.prompts}
        assert len(queued) == len(self.prompts), "a sequence queues twice"
        for owner, sequence in self.sequences.items():
            assert owner == sequence.owner
            is_uncomputed = sequence.phase in (PrefillPhase.QUEUED, PrefillPhase.COMPUTING)
            assert is_uncomputed == (owner in queued) or sequence.is_cancelled
            assert sequence.computed_tokens <= sequence.request.tokens
            is_computed = sequence.phase is PrefillPhase.COMPUTED
            assert is_computed == (sequence.first_token is not None)
            is_known = sequence.is_offered or sequence.is_seeking
            assert is_known or not is_computed, "nobody knows of a computed prompt"
            assert not (sequence.is_offered and sequence.is_seeking), "offered while another is sought"
            is_used = self.chunks.computes(owner) or sequence.hand_over.is_sending
            assert is_used or not sequence.is_cancelled, "a cancelled sequence stays"
            if not sequence.is_cancelled:
                sequence.hand_over.check(self.chunks.computed_kv(sequence))
        for owner in queued:
            assert owner in self.sequences, "a queued sequence is not known"
        held = {owner for owner in self.blocks.owners() if owner.room == ROOM}
        assert held <= self.sequences.keys(), "blocks are held for a sequence that is gone"
        computed = [piece.owner for piece in self.chunks.all_slices]
        assert len({*computed}) == len(computed), "a sequence is in two chunks at once"
        assert self.sequences.keys() >= {*computed}, "a chunk in flight computes a sequence that is gone"

    def attempts_at(self, request_id: RequestId) -> list[PrefillSequence]:
        """All that are here, in the order of arrival."""
        return [each for each in self.sequences.values() if each.owner.request_id == request_id]

    def discard_all(self, matches: Callable[[PrefillSequence], bool]) -> list[PrefillCommand]:
        commands: list[PrefillCommand] = []
        for sequence in [sequence for sequence in self.sequences.values() if matches(sequence)]:
            commands += self.discard(sequence)
        return commands

    def discard(self, sequence: PrefillSequence) -> list[PrefillCommand]:
        """The sequence has ended, and its gateway knows; its decode instance is told."""
        commands: list[PrefillCommand] = []
        if not sequence.is_cancelled:
            self.prompts.remove(sequence)
            if sequence.is_offered:
                self.ended.note(sequence.request.request_id, sequence.request.attempt)
                commands.append(WithdrawOffer(sequence.owner, sequence.decode_instance))
            if not sequence.hand_over.is_sending:
                commands += self.end_ask(sequence)
        self.let_go(sequence)
        return commands

    def end_ask(self, sequence: PrefillSequence) -> list[PrefillCommand]:
        """Whoever waits for a portion waits in vain."""
        if sequence.hand_over.asked is None:
            return []
        pull = sequence.hand_over.give_up()
        error = ErrorReply(
            RequestCancelled.code, f"request {pull.request_id} has ended at {self.instance_id}"
        )
        return [AnswerPull(sequence.owner, pull.portion, error)]

    def let_go(self, sequence: PrefillSequence) -> None:
        """Forgets a sequence now, or marks it where the engine or the transfer still uses its blocks."""
        if self.chunks.computes(sequence.owner) or sequence.hand_over.is_sending:
            sequence.is_cancelled = True
        else:
            self.drop(sequence)

    def drop(self, sequence: PrefillSequence) -> None:
        del self.sequences[sequence.owner]
        if sequence.phase is not PrefillPhase.QUEUED:
            self.blocks.release(sequence.owner)
