"""Who comes to be decoded here, and is taken in or refused: part of the decode room's decisions.

Most are offered by a prefill instance, or resumed where attention workers keep their KV, and wait until they
are admitted (``decode.entering``). One whose prompt was computed here is in the batch at once.
"""

from dataclasses import dataclass, field

from common.attempts import EndedAttempts
from common.errors import HandoverFailed, NoInstanceReady, Overloaded, RequestCancelled
from common.ids import InstanceId, RequestId
from common.kv.blocks import BlockOwner, blocks_for
from common.lengths import LengthDistribution
from common.lifecycle import DecodePhase
from common.messages import DecodeTask, GenerationRequest, ResumeTask
from common.predictions import NewestLengths
from decode.holdings import Holdings
from decode.sequence import ROOM, DecodeSequence, source_of


@dataclass(slots=True)
class Arrivals:
    instance_id: InstanceId
    max_waiting_requests: int
    held: Holdings
    _ended: EndedAttempts = field(default_factory=EndedAttempts)
    _early_lengths: NewestLengths[BlockOwner] = field(default_factory=NewestLengths)

    def take_in(self, task: DecodeTask | ResumeTask, now: float, pool: int | None = None) -> None:
        """``pool``: the only one that it can be in. Raises NoInstanceReady, RequestCancelled, HandoverFailed,
        Overloaded."""
        request, sequences = task.request, self.held.sequences
        owner = BlockOwner(ROOM, request.request_id, request.attempt)
        is_over = self._ended.is_superseded(request, sequences.of_request(request.request_id))
        if is_over or self.held.blocks.is_quarantined(owner):
            raise RequestCancelled(f"request {request.request_id} was cancelled before it arrived")
        if owner in sequences:
            if source_of(sequences[owner].task) != source_of(task):
                raise HandoverFailed(f"request {request.request_id} is offered by another instance, too")
            return
        self._check_room(request, pool)
        self._keep(DecodeSequence(owner, task, now, list(request.output_ids), pool=pool))

    def take_over(self, held_by: BlockOwner, task: DecodeTask, now: float) -> None:
        """It is in the batch at once, whoever is admitted: it has its KV here. A later attempt may have
        overtaken it; or the same one is here from another instance, which was slow to say that it has it."""
        request, blocks = task.request, self.held.blocks
        owner = BlockOwner(ROOM, request.request_id, request.attempt)
        is_here = owner in self.held.sequences or blocks.is_quarantined(owner)
        others = self.held.sequences.of_request(request.request_id)
        if is_here or self._ended.is_superseded(request, others):
            blocks.release(held_by)
            return
        blocks.rename(held_by, owner)
        self._keep(DecodeSequence(owner, task, now, list(request.output_ids), DecodePhase.RUNNING))

    def expect(self, owner: BlockOwner, lengths: LengthDistribution) -> None:
        """The word may overtake the sequence: that has still to be prefilled."""
        sequence = self.held.sequences.get(owner)
        if sequence is None:
            self._early_lengths.keep(owner, lengths)
        else:
            self.held.sequences.predict(sequence, lengths)

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        """Neither this attempt nor an earlier one is wanted any more, be they here or still to come."""
        self._ended.note(request_id, attempt)
        self.held.discard_attempts(request_id, attempt + 1)

    def _check_room(self, request: GenerationRequest, pool: int | None) -> None:
        if self.held.waiting >= self.max_waiting_requests:
            raise Overloaded(
                f"decode instance {self.instance_id} already has instance.max_waiting_requests ="
                f" {self.max_waiting_requests} sequences waiting",
                retry_after_s=1.0,
            )
        if not self.held.blocks.open_pools:
            raise NoInstanceReady(f"instance {self.instance_id} has no attention worker now")
        needed, room = blocks_for(request.max_total_tokens, self.held.block_size), self.held.room_in(pool)
        if needed > room:
            raise HandoverFailed(
                f"the sequence may need {needed} KV blocks; instance {self.instance_id} has {room} for it"
            )

    def _keep(self, sequence: DecodeSequence) -> None:
        """It takes the place of earlier attempts."""
        request = sequence.request
        self.held.discard_attempts(request.request_id, request.attempt)
        sequence.predicted = self._early_lengths.forget(sequence.owner)
        self.held.sequences[sequence.owner] = sequence
        task = sequence.task
        if isinstance(task, DecodeTask) and task.prompt_time is not None:
            self.held.swapping.prompt_time = task.prompt_time
