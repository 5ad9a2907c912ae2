"""Portions of KV that decode instances ask for, and what is sent of them: part of the prefill room's
decisions.

A portion is sent as soon as something of it stands in the pool, beside the chunks that compute the rest
(``prefill.handover``). The blocks that the transfer engine reads are pinned, and a sequence that ends
meanwhile stays until no byte is in the air.
"""

from dataclasses import dataclass

from common.errors import InstanceLost, RequestCancelled, UnknownRequest
from common.ids import Incarnation
from common.kv.blocks import BlockOwner, blocks_for
from common.messages import ErrorReply, PullKV
from prefill.events import AnswerPull, HandOverBegun, PrefillCommand, SendKV
from prefill.handover import check_destination
from prefill.holdings import Holdings
from prefill.sequence import ROOM, PrefillSequence


@dataclass(frozen=True, slots=True)
class Sends:
    """``incarnation``: of this instance; what is asked of another life is not here."""

    incarnation: Incarnation
    block_size: int
    held: Holdings

    def take_pull(self, pull: PullKV, now: float) -> list[PrefillCommand]:
        """Raises InstanceLost, RequestCancelled, UnknownRequest, HandoverFailed, InvalidRequest."""
        sequence = self._asked_for(pull)
        check_destination(pull, blocks_for(sequence.tokens, self.block_size))
        is_first = not sequence.hand_over.has_begun
        answered = sequence.hand_over.take_ask(pull)
        begun = [HandOverBegun(_waited_s(sequence, now))] if is_first else []
        again = [] if answered is None else [AnswerPull(sequence.owner, pull.portion, answered)]
        return [*begun, *again, *self.go_on(sequence)]

    def go_on(self, sequence: PrefillSequence) -> list[PrefillCommand]:
        """Sends what is there for the portion asked for, or answers it."""
        owner, hand_over = sequence.owner, sequence.hand_over
        pull = hand_over.asked
        if pull is None:
            return []
        spans = hand_over.begin_send(self.held.chunks.computed_kv(sequence))
        if spans:
            self.held.blocks.pin(owner)
            needed = blocks_for(sequence.tokens, self.block_size)
            source = tuple(self.held.blocks.block_table(owner)[:needed])
            return [SendKV(owner, pull, source, spans)]
        answer = hand_over.try_answer(sequence.first_token)
        if answer is None:
            return []
        if answer.is_last:
            self.held.drop(sequence)
        return [AnswerPull(owner, pull.portion, answer)]

    def finish(self, owner: BlockOwner, kv_bytes: int, transfer_s: float) -> list[PrefillCommand]:
        """What was in the air has arrived. Raises ValueError where nothing was."""
        sequence = self._end(owner)
        sequence.hand_over.end_send(kv_bytes, transfer_s)
        if not sequence.is_cancelled:
            return self.go_on(sequence)
        commands = self.held.end_ask(sequence)
        self.held.let_go(sequence)
        return commands

    def fail(self, owner: BlockOwner, error: ErrorReply) -> list[PrefillCommand]:
        """The decode instance, which is told, tells the gateway. Raises ValueError as ``finish`` does."""
        sequence = self._end(owner)
        pull = sequence.hand_over.give_up()
        answer = AnswerPull(owner, pull.portion, error)
        sequence.is_offered = False
        return [answer, *self.held.discard(sequence)]

    def _asked_for(self, pull: PullKV) -> PrefillSequence:
        if pull.prefill_incarnation != self.incarnation:
            raise InstanceLost(f"{self.held.instance_id} has begun anew since it computed that KV")
        sequence = self.held.sequences.get(BlockOwner(ROOM, pull.request_id, pull.attempt))
        if sequence is None or sequence.is_cancelled:
            if sequence is not None or self.held.ended.includes(pull.request_id, pull.attempt):
                raise RequestCancelled(f"request {pull.request_id} has ended at {self.held.instance_id}")
            raise UnknownRequest(f"no KV of request {pull.request_id} waits at {self.held.instance_id}")
        if not sequence.is_offered:
            raise UnknownRequest(f"the KV of request {pull.request_id} has not been offered")
        return sequence

    def _end(self, owner: BlockOwner) -> PrefillSequence:
        sequence = self.held.sequences.get(owner)
        if sequence is None or not sequence.hand_over.is_sending:
            raise ValueError(f"{owner} is not being sent")
        self.held.blocks.unpin(owner)
        return sequence


def _waited_s(sequence: PrefillSequence, now: float) -> float:
    """For its decode instance; the KV of a prompt that is still computed waits for nobody."""
    return 0.0 if sequence.computed_s is None else now - sequence.computed_s
