"""What a step computes, and what becomes of the sequences that it drew for: part of the decode room's
decisions.

A step takes all sequences of its lane that have room for a token, one each (continuous batching): whoever
came in since the last one joins, whoever has ended is gone.
"""

from dataclasses import dataclass

from common.config import DecodeAdmission
from common.ids import GatewayId
from common.messages import SampledToken, TokenEvent
from common.sequences import PublishFailure, finish_reason_of
from decode.events import DecodeCommand, PublishTokens, RunStep, StepFailed, StepRow, StepsFinished
from decode.giving_way import GivingWay
from decode.holdings import Holdings
from decode.sequence import KV_LOST, DecodeSequence


@dataclass(frozen=True, slots=True)
class Stepping:
    """``max_batch``: sequences of all lanes. ``admission``: by which those come in that wait."""

    held: Holdings
    giving_way: GivingWay
    max_batch: int
    eos_token_ids: tuple[int, ...]
    admission: DecodeAdmission = "greedy"

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
            commands += self._take_token(row, token, events, is_told=True)
        self.held.pulls.step_ended(lane, now)
        commands.extend(PublishTokens(gateway_id, tuple(batch)) for gateway_id, batch in events.items())
        return commands

    def _take_token(
        self,
        row: StepRow,
        token: SampledToken | None,
        events: dict[GatewayId, list[TokenEvent]],
        *,
        is_told: bool,
    ) -> list[PublishFailure]:
        """``is_told``: its gateway is, also where the sequence goes on."""
        sequence = self.held.sequences[row.owner]
        if sequence.is_cancelled or token is None or self.held.blocks.is_lost(row.owner):
            return self.held.give_back(sequence, KV_LOST)
        request = sequence.request
        index = len(sequence.output_ids)
        finish = finish_reason_of(request, index, token, self.eos_token_ids)
        sequence.output_ids.append(token.token_id)
        if is_told or finish is not None:
            event = TokenEvent(request.request_id, request.attempt, index, token, finish)
            events.setdefault(request.gateway_id, []).append(event)
        if finish is not None:
            self.held.drop(sequence)
        return []

    def ahead(self, lane: int) -> int:
        """How many steps of the lane's rows follow on one another, the one in flight among them, before
        anybody ends, comes in or leaves; and for which there is memory. 1, too, where that cannot be told.
        Raises KeyError without a step in flight."""
        held = self.held
        rows = held.batches.steps[lane]
        if held.batches.lanes > 1 or held.is_unsettled(len(rows)) or self.giving_way.mates.wanted_blocks:
            return 1
        # Under greedy admission who lacks room for now has no more of it as others grow.
        if self.admission != "greedy" and len(held.sequences) > len(rows):
            return 1
        least = min(self._left(row) for row in rows)
        [pool] = held.blocks.pools
        return max(1, min(least, held.blocks.free_blocks_in(pool) // len(rows) * held.block_size))

    def _left(self, row: StepRow) -> int:
        """Steps until the row's sequence ends, at the latest."""
        sequence = self.held.sequences[row.owner]
        return 1 if sequence.is_cancelled else sequence.left_tokens

    def finish_run(self, run: StepsFinished, now: float) -> list[DecodeCommand]:
        """Raises ValueError for more steps than can follow on one another, or for a token before the last
        that would end a sequence."""
        lane, steps, before = run.lane, run.steps, run.before.token_id
        rows = self.held.batches.steps.get(lane, ())
        if not rows or len(rows) != len(run.tokens):
            raise ValueError(f"lane {lane}: steps of {len(run.tokens)} rows ended, {len(rows)} are in flight")
        if not 1 <= steps <= self.ahead(lane):
            raise ValueError(f"lane {lane}: {steps} steps ended, {self.ahead(lane)} can follow on another")
        is_end = before in self.eos_token_ids
        if steps > 1 and (is_end or any(before in row.request.sampling.stop_token_ids for row in rows)):
            raise ValueError(f"lane {lane}: token {before} ends a sequence before the last of {steps} steps")
        if steps > 1:
            self._grow(rows, steps - 1, before)
        commands: list[DecodeCommand] = []
        events: dict[GatewayId, list[TokenEvent]] = {}
        for row, token in zip(self.held.batches.end(lane, len(run.tokens)), run.tokens, strict=True):
            commands += self._take_token(row, token, events, is_told=False)
        self.held.pulls.step_ended(lane, now, steps)
        commands.extend(PublishTokens(gateway_id, tuple(batch)) for gateway_id, batch in events.items())
        return commands

    def _grow(self, rows: tuple[StepRow, ...], steps: int, token_id: int) -> None:
        """By so many steps that end nobody, with a block for the position after each: given in the order in
        which they come to be lacked."""
        blocks, size = self.held.blocks, self.held.block_size
        lacking: list[tuple[int, int]] = []
        for index, row in enumerate(rows):
            position = self.held.sequences[row.owner].position
            first = len(row.block_table) * size - position
            lacking += [(step, index) for step in range(first, steps + 1, size)]
            row.output_ids.extend([token_id] * steps)
        for _, index in sorted(lacking):
            blocks.try_allocate(rows[index].owner, 1)

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
