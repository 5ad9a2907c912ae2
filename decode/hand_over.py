"""Offers and portions of KV, as the decode room takes them: part of its decisions.

Which portion is asked for next is ``decode.pulls``'. Where the source withdraws its offer, fails or is gone,
a sequence that has not all of its KV yet goes back; while bytes are in the air, when these have ended.
"""

from dataclasses import dataclass

from common.kv.blocks import BlockOwner
from common.lifecycle import DecodePhase
from common.messages import DecodeTask
from common.sequences import PublishFailure, failure_of
from decode.events import (
    DecodeCommand,
    ObserveAdmission,
    OfferWithdrawn,
    PrefillGone,
    PullFailed,
    PullFinished,
    PullSequence,
)
from decode.holdings import Holdings
from decode.sequence import KV_LOST, PREFILL_GONE, DecodeSequence, source_of


@dataclass(frozen=True, slots=True)
class HandOvers:
    held: Holdings

    def ask(self, *, is_step_due: bool) -> list[PullSequence]:
        """For the portions whose turn it is. Called after every event. ``is_step_due``: sequences wait for
        their next step as for one that is computed."""
        held = self.held
        decoding = max(1, held.in_batch) if held.batches.is_computing or is_step_due else 0
        return [
            self._pull(portion.owner, portion.number, portion.max_bytes)
            for portion in held.pulls.ask(decoding)
        ]

    def take_portion(self, owner: BlockOwner, kv_bytes: int, transfer_s: float) -> list[PublishFailure]:
        """More of its KV is still to come."""
        sequence = self.held.pulling(owner)
        self.held.pulls.portion_done(owner, kv_bytes, transfer_s)
        if self._is_over(sequence):
            return self.held.give_back(sequence, KV_LOST)
        return self._give_back_sourceless(sequence) if sequence.is_source_gone else []

    def finish(self, pulled: PullFinished, now: float) -> list[DecodeCommand]:
        """All of its KV is here: it runs. Raises ValueError for one that still lacks its first token."""
        owner, token = pulled.owner, pulled.first_token
        sequence = self.held.pulling(owner)
        if sequence.awaits_first_token and token is None:
            raise ValueError(f"{owner}: the KV came without the first token")
        if isinstance(sequence.task, DecodeTask):
            self.held.pulls.portion_done(owner, pulled.kv_bytes, pulled.transfer_s)
        if self._is_over(sequence):
            return [*self.held.give_back(sequence, KV_LOST)]
        self.held.pulls.end(owner)
        if sequence.awaits_first_token and token is not None:
            sequence.output_ids.append(token)
            self.held.sequences.note_first(owner)
        sequence.enter(DecodePhase.RUNNING)
        return [ObserveAdmission(now - sequence.arrived_s)]

    def fail(self, failed: PullFailed) -> list[PublishFailure]:
        """Where something may still be in the air, its blocks rest in quarantine."""
        sequence = self.held.pulling(failed.owner)
        del self.held.sequences[failed.owner]
        self.held.pulls.end(failed.owner)
        if failed.is_drained:
            self.held.blocks.release(failed.owner)
        else:
            self.held.blocks.quarantine(failed.owner)
        if sequence.is_cancelled:
            return []
        lost = failed.lost_instance
        return [failure_of(sequence.request, failed.error, can_continue=True, lost_instance=lost)]

    def withdraw(self, withdrawn: OfferWithdrawn) -> None:
        """Who has its KV already, be it on its way to another pool, needs its source no more."""
        sequence = self.held.sequences.get(withdrawn.owner)
        source = (withdrawn.prefill_instance, withdrawn.prefill_incarnation)
        if sequence is None or source_of(sequence.task) != source:
            return
        if sequence.phase in (DecodePhase.WAITING, DecodePhase.PULLING):
            self.held.discard(sequence)

    def lose_source(self, gone: PrefillGone) -> list[PublishFailure]:
        """What waits for that life's KV goes back at once, what is in the air when that has ended."""
        commands: list[PublishFailure] = []
        life = (gone.prefill_instance, gone.prefill_incarnation)
        for sequence in list(self.held.sequences.values()):
            if not isinstance(sequence.task, DecodeTask) or source_of(sequence.task) != life:
                continue
            if sequence.phase is DecodePhase.WAITING or self.held.pulls.rests(sequence.owner):
                commands += self._give_back_sourceless(sequence)
            elif sequence.phase is DecodePhase.PULLING:
                sequence.is_source_gone = True
        return commands

    def _is_over(self, sequence: DecodeSequence) -> bool:
        """Whether it was cancelled, or lost its blocks' pool, while KV was in the air; now none is."""
        return sequence.is_cancelled or self.held.blocks.is_lost(sequence.owner)

    def _give_back_sourceless(self, sequence: DecodeSequence) -> list[PublishFailure]:
        lost_instance, _ = source_of(sequence.task)
        return self.held.give_back(sequence, PREFILL_GONE, lost_instance=lost_instance)

    def _pull(self, owner: BlockOwner, number: int, max_bytes: int | None) -> PullSequence:
        task = self.held.sequences[owner].task
        assert isinstance(task, DecodeTask)
        blocks = tuple(self.held.blocks.block_table(owner))
        source = (task.prefill_instance, task.prefill_incarnation)
        return PullSequence(owner, *source, blocks, number, max_bytes, task.sender)
