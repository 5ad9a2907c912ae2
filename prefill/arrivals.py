"""Who comes in: prompts to be computed, and sequences that ran in the instance's decode room and are to go on
elsewhere. Part of the prefill room's decisions.
"""

from dataclasses import dataclass

from common.errors import (
    ContextLengthExceeded,
    HandoverFailed,
    InvalidRequest,
    Overloaded,
    RequestCancelled,
)
from common.kv.blocks import BlockOwner, blocks_for
from common.kv.layout import KVLayout
from common.lifecycle import PrefillPhase
from common.messages import ErrorReply, GenerationRequest, PrefillTask
from common.sequences import failure_of, without_last_token
from prefill.events import PrefillCommand, SequenceLeft
from prefill.handover import HandOver, KVCursor
from prefill.holdings import Holdings
from prefill.offers import Offers
from prefill.sequence import ROOM, PrefillSequence

HELD_TWICE = ErrorReply(
    code=HandoverFailed.code, message="the sequence was to leave an instance that was still handing it over"
)


@dataclass(frozen=True, slots=True)
class Arrivals:
    layout: KVLayout
    max_waiting_requests: int
    held: Holdings
    offers: Offers

    def take_in(self, task: PrefillTask, now: float) -> list[PrefillCommand]:
        """A prompt, which takes the place of earlier attempts. Raises InvalidRequest, RequestCancelled,
        Overloaded, ContextLengthExceeded."""
        request = task.request
        owner = BlockOwner(ROOM, request.request_id, request.attempt)
        if request.tokens == 0:
            raise InvalidRequest(f"request {request.request_id} has an empty prompt", param="prompt")
        attempts = self.held.attempts_at(request.request_id)
        if self.held.ended.is_superseded(request, attempts):
            raise RequestCancelled(f"request {request.request_id} was cancelled before it arrived")
        if owner in self.held.sequences:
            return []
        self._check_room(request)
        commands: list[PrefillCommand] = []
        for earlier in attempts:
            if earlier.request.attempt < request.attempt:
                commands += self.held.discard(earlier)
        sequence = PrefillSequence(
            owner,
            request,
            task.decode_instance,
            task.decode_incarnation,
            now,
            self._hand_over_of(request),
            task.lengths,
            is_bound_late=task.is_bound_late,
        )
        self.held.sequences[owner] = sequence
        self.held.prompts.add(sequence)
        return commands

    def take_over(self, left: SequenceLeft, now: float) -> list[PrefillCommand]:
        """A sequence that ran here is handed over like a prompt that has just been computed.

        Delivered twice, its prompt may be here still. Where nobody else knows of that one, it is forgotten;
        else an answer could mean either, so both end and the sequence is computed again.
        """
        request, last_token = without_last_token(left.request)
        owner = BlockOwner(ROOM, request.request_id, request.attempt)
        commands: list[PrefillCommand] = []
        twin = self.held.sequences.get(owner)
        if twin is not None:
            is_known = twin.is_offered
            commands += self.held.discard(twin)
            if is_known or owner in self.held.sequences:
                self.held.ended.note(request.request_id, request.attempt)
                self.held.blocks.release(left.held_by)
                return [*commands, failure_of(left.request, HELD_TWICE, can_continue=True)]
        self.held.blocks.rename(left.held_by, owner)
        sequence = PrefillSequence(
            owner,
            request,
            left.decode_instance,
            left.decode_incarnation,
            now,
            self._hand_over_of(request),
            left.lengths,
            phase=PrefillPhase.COMPUTED,
            started_s=now,
            computed_tokens=request.tokens,
            computed_s=now,
            first_token=last_token,
            is_moving=True,
        )
        self.held.sequences[owner] = sequence
        return [*commands, self.offers.offer(sequence)]

    def _check_room(self, request: GenerationRequest) -> None:
        instance_id, total_blocks = self.held.instance_id, self.held.blocks.total_blocks
        if self.held.prompts.count >= self.max_waiting_requests:
            raise Overloaded(
                f"prefill instance {instance_id} already has instance.max_waiting_requests ="
                f" {self.max_waiting_requests} prompts waiting",
                retry_after_s=1.0,
            )
        needed = blocks_for(request.tokens, self.layout.block_size)
        if needed > total_blocks:
            raise ContextLengthExceeded(
                f"the prompt's {request.tokens} tokens need {needed} KV blocks; instance"
                f" {instance_id} has {total_blocks}",
                param="prompt",
            )

    def _hand_over_of(self, request: GenerationRequest) -> HandOver:
        return HandOver(request.tokens, KVCursor(self.layout.layers, self.layout.token_layer_bytes))
