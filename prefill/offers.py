"""Where a sequence goes on once its prompt is computed: part of the prefill room's decisions.

It is offered to its decode instance, for which the scheduler may have to be asked first. Where that refuses
it, or gives it back before it has begun with it, another one is sought, and its KV stays here meanwhile. One
that is to be decoded here is offered to nobody: its blocks become the decode room's (``KeepHere``).
"""

from dataclasses import dataclass

from common.errors import NoInstanceReady, Overloaded
from common.ids import Incarnation, InstanceId
from common.kv.blocks import BlockOwner
from common.lifecycle import PrefillPhase
from common.messages import DecodeTask, ErrorReply, HostProcess, Placement, SequenceMoved
from common.sequences import continued_with, failure_of
from prefill.events import (
    KeepHere,
    OfferDeclined,
    OfferRefused,
    OfferSequence,
    PrefillCommand,
    PublishMove,
    SeekDecode,
)
from prefill.holdings import Holdings
from prefill.sequence import KEPT_ROOM, PrefillSequence

STUCK_AFTER_S = 5.0
"""Whoever waits for an instance that is only busy is decoded, or ends, sooner; if not, it costs a prompt."""
NO_ROOM = ErrorReply(
    code=Overloaded.code, message="no decode instance had room, and others waited for its memory"
)
MAX_REFUSALS = 3
"""Of one sequence's offers, after which its KV is given up: whoever has room in word has none in deed."""


@dataclass(frozen=True, slots=True)
class Offers:
    """Of one life of an instance. ``process``: whose life it is."""

    instance_id: InstanceId
    incarnation: Incarnation
    process: HostProcess | None
    held: Holdings

    def stays(self, sequence: PrefillSequence) -> bool:
        """Whether it is to be decoded here."""
        return sequence.decode_instance == self.instance_id

    def is_for_others(self, sequence: PrefillSequence) -> bool:
        """Whether it is certain where else it is to be decoded."""
        return not (self.stays(sequence) or sequence.is_bound_late)

    def hand_over(self, sequence: PrefillSequence, first_token: int) -> PrefillCommand:
        """To its decode instance, which may have to be asked for; or to this instance's other room: then it
        is gone from here."""
        if sequence.is_bound_late:
            return self._seek(sequence, first_token, refused=None)
        return self._keep_here(sequence) if self.stays(sequence) else self.offer(sequence)

    def offer(self, sequence: PrefillSequence) -> OfferSequence:
        sequence.is_offered = True
        return OfferSequence(sequence.owner, sequence.decode_instance, self._task_of(sequence))

    def take_refusal(self, refused: OfferRefused) -> list[PrefillCommand]:
        """An early offer that only came too early is made again when the prompt is computed. One that is
        refused then, by an instance that is full or about to end, goes to another instance."""
        sequence = self.held.sequences.get(refused.owner)
        if sequence is None or sequence.is_cancelled or sequence.hand_over.has_begun:
            return []
        is_for_others = refused.error.code in (Overloaded.code, NoInstanceReady.code)
        if refused.is_early and is_for_others:
            sequence.is_offered = False
            return [self.offer(sequence)] if sequence.phase is PrefillPhase.COMPUTED else []
        if is_for_others and sequence.first_token is not None and sequence.refusals < MAX_REFUSALS:
            sequence.refusals += 1
            return [self._seek(sequence, sequence.first_token, sequence.decode_instance)]
        lost = sequence.decode_instance if refused.is_lost else None
        sequence.is_offered = refused.is_lost
        failure = failure_of(sequence.request, refused.error, can_continue=True, lost_instance=lost)
        return [failure, *self.held.discard(sequence)]

    def take_back(self, declined: OfferDeclined) -> list[PrefillCommand]:
        """What its decode instance has not begun with goes where there is more room."""
        sequence = self.held.sequences.get(declined.owner)
        if sequence is None or sequence.is_cancelled or not sequence.is_offered:
            return []
        is_from_its_own = sequence.decode_instance == declined.decode_instance
        if not is_from_its_own or sequence.hand_over.has_begun or sequence.first_token is None:
            return []
        return [self._seek(sequence, sequence.first_token, declined.decode_instance, declined.wanted)]

    def offer_anew(self, owner: BlockOwner, placement: Placement) -> list[PrefillCommand]:
        """To where the scheduler has placed the sequence now. Of one that has ended, nothing is wanted."""
        sequence = self.held.sequences.get(owner)
        if sequence is None or not sequence.is_seeking or sequence.first_token is None:
            return []
        request = sequence.request
        sequence.is_seeking = sequence.is_bound_late = False
        sequence.decode_instance = placement.decode_instance
        sequence.decode_incarnation = placement.decode_incarnation
        drawn = len(request.output_ids) + 1
        moved = SequenceMoved(request.request_id, request.attempt, placement, drawn)
        return [PublishMove(request.gateway_id, moved), self.hand_over(sequence, sequence.first_token)]

    def give_up(self, owner: BlockOwner, error: ErrorReply) -> list[PrefillCommand]:
        """Nobody else has room: it is computed again where and when somebody has. Who was only asked for the
        best one has one."""
        sequence = self.held.sequences.get(owner)
        if sequence is None or not sequence.is_seeking:
            return []
        if sequence.is_bound_late:
            sequence.is_seeking = sequence.is_bound_late = False
            return [self.offer(sequence)]
        return [failure_of(sequence.request, error, can_continue=True), *self.held.discard(sequence)]

    def break_circle(self, stuck_since_s: float | None, now: float) -> list[PrefillCommand]:
        """Two instances that changed their roles may each hold, computed or run before, what waits for room
        in the other. Where nobody can be decoded here for so long, the latest of these is computed again."""
        if stuck_since_s is None or now - stuck_since_s < STUCK_AFTER_S:
            return []
        waiting = [
            each
            for each in self.held.sequences.values()
            if each.phase is PrefillPhase.COMPUTED and not each.is_cancelled and not each.hand_over.has_begun
        ]
        if not waiting:
            return []
        latest = waiting[-1]
        return [failure_of(latest.request, NO_ROOM, can_continue=True), *self.held.discard(latest)]

    def _seek(
        self,
        sequence: PrefillSequence,
        first_token: int,
        refused: InstanceId | None,
        wanted: InstanceId | None = None,
    ) -> SeekDecode:
        """Another instance than the one that it was offered to, if it was."""
        sequence.is_offered, sequence.is_seeking = False, True
        request = continued_with(sequence.request, first_token)
        return SeekDecode(sequence.owner, request, refused, wanted)

    def _keep_here(self, sequence: PrefillSequence) -> KeepHere:
        owner = sequence.owner
        kept = BlockOwner(KEPT_ROOM, owner.request_id, owner.attempt)
        self.held.blocks.rename(owner, kept)
        del self.held.sequences[owner]
        return KeepHere(kept, self._task_of(sequence))

    def _task_of(self, sequence: PrefillSequence) -> DecodeTask:
        """With its first token, if that is there."""
        request, token = sequence.request, sequence.first_token
        return DecodeTask(
            request=request if token is None else continued_with(request, token),
            prefill_instance=self.instance_id,
            prefill_incarnation=self.incarnation,
            kv_tokens=request.tokens,
            sender=self.process,
            lengths=sequence.lengths,
        )
