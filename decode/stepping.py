"""What a step computes, and what becomes of the sequences that it drew for: part of the decode room's
decisions.

A step takes all sequences of its lane that have room for a token, one each (continuous batching): whoever
came in since the last one joins, whoever has ended is gone.
"""

from dataclasses import dataclass

from common.ids import GatewayId
from common.messages import SampledToken, TokenEvent
from common.sequences import finish_reason_of
from decode.events import DecodeCommand, PublishTokens, RunStep, StepFailed, StepRow
from decode.giving_way import GivingWay
from decode.holdings import Holdings
from decode.sequence import KV_LOST, DecodeSequence


@dataclass(frozen=True, slots=True)
class Stepping:
    """``max_batch``: sequences of all lanes."""

    held: Holdings
    giving_way: GivingWay
    max_batch: int
    eos_token_ids: tuple[int, ...]

    def start(self, now: float) -> list[DecodeCommand]:
        """The next step of every lane that has none in flight: all its sequences that have room."""
        batches = self.held.batches
        idle = batches.idle_lanes
        if not idle:
            return []
        # Those whose prompts were computed here come without being admitted.
        commands = self.giving_way.to_prompt()
        with_room, preempted = self.giving_way.make_room()
        commands += preempted
        ready = with_room[: self.max_batch]
        batches.even_out(self.held.running(), ready)
        for lane in idle:
            rows = tuple(self._row_of(sequence) for sequence in ready if sequence.lane == lane)
            if rows:
                batches.begin(lane, rows)
                self.held.pulls.step_began(lane, now)
                commands.append(RunStep(rows, lane))
        return commands

    def finish(self, lane: int, tokens: tuple[SampledToken | None, ...], now: float) -> list[DecodeCommand]:
        """A token for each row; None: its KV was lost. Raises ValueError where no such step is in flight."""
        commands: list[DecodeCommand] = []
        events: dict[GatewayId, list[TokenEvent]] = {}
        for row, token in zip(self.held.batches.end(lane, len(tokens)), tokens, strict=True):
            sequence = self.held.sequences[row.owner]
            if sequence.is_cancelled or token is None or self.held.blocks.is_lost(row.owner):
                commands += self.held.give_back(sequence, KV_LOST)
                continue
            request = sequence.request
            index = len(sequence.output_ids)
            finish = finish_reason_of(request, index, token, self.eos_token_ids)
            sequence.output_ids.append(token.token_id)
            events.setdefault(request.gateway_id, []).append(
                TokenEvent(request.request_id, request.attempt, index, token, finish)
            )
            if finish is not None:
                self.held.drop(sequence)
        self.held.pulls.step_ended(lane, now)
        commands.extend(PublishTokens(gateway_id, tuple(batch)) for gateway_id, batch in events.items())
        return commands

    def fail(self, failed: StepFailed, now: float) -> list[DecodeCommand]:
        """Raises ValueError where no such step is in flight."""
        commands: list[DecodeCommand] = []
        for row in self.held.batches.end(failed.lane, None):
            sequence = self.held.sequences[row.owner]
            commands += self.held.give_back(sequence, failed.error, can_continue=failed.can_continue)
        self.held.pulls.step_ended(failed.lane, now)
        return commands

    def _row_of(self, sequence: DecodeSequence) -> StepRow:
        return StepRow(
            owner=sequence.owner,
            request=sequence.request,
            output_ids=sequence.output_ids,
            position=sequence.position,
            block_table=self.held.blocks.block_table(sequence.owner),
        )
