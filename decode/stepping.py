"""What a step computes, and what becomes of the sequences that it drew for: part of the decode room's
decisions.

A step takes all sequences of its lane that have room for a token, one each (continuous batching): whoever
came in since the last one joins, whoever has ended is gone.
"""

from collections import Counter
from dataclasses import dataclass

from common.config import DecodeAdmission
from common.ids import GatewayId
from common.kv.blocks import blocks_for
from common.messages import SampledToken, TokenEvent
from common.sequences import PublishFailure, finish_reason_of
from decode.batches import Outlook
from decode.entering import Entering
from decode.events import DecodeCommand, PublishTokens, RunStep, StepFailed, StepRow, StepsFinished
from decode.giving_way import GivingWay
from decode.holdings import Holdings
from decode.sequence import KV_LOST, DecodeSequence
from scheduler.policy.decode_admission import looks_ahead


@dataclass(frozen=True, slots=True)
class Stepping:
    """``max_batch``: sequences of all lanes. ``admission``: by which those come in that wait."""

    held: Holdings
    giving_way: GivingWay
    entering: Entering
    max_batch: int
    eos_token_ids: tuple[int, ...]
    admission: DecodeAdmission = "greedy"

    def start(self, now: float) -> list[DecodeCommand]:
        """The next step of every lane that has none in flight, as one has: all its sequences that have
        room."""
        batches = self.held.batches
        kept = batches.kept
        if kept is not None and self._can_go_on(kept):
            return [self._begin(0, kept, now)]
        batches.forget_kept()
        # Those whose prompts were computed here come without being admitted.
        commands = self.giving_way.to_prompt()
        with_room, preempted = self.giving_way.make_room()
        commands += preempted
        self.giving_way.has_just_given = bool(commands)
        ready = with_room[: self.max_batch]
        if batches.lanes > 1:
            batches.even_out(self.held.running(), ready)
        for lane in batches.idle_lanes:
            sequences = ready
            if batches.lanes > 1:
                sequences = [sequence for sequence in ready if sequence.lane == lane]
            if sequences:
                commands.append(self._begin(lane, self._outlook_of(sequences), now))
        return commands

    def _can_go_on(self, kept: Outlook) -> bool:
        """Whether the next step is of the same rows: nobody has come or gone, and nobody lacks a block."""
        is_same = self.held.sequences.in_batch == len(kept.rows)
        return is_same and kept.room > 0 and not self.giving_way.mates.wanted_blocks

    def _begin(self, lane: int, outlook: Outlook, now: float) -> RunStep:
        self.held.batches.begin(lane, outlook)
        self.held.pulls.step_began(lane, now)
        return RunStep(outlook.rows, lane)

    def _outlook_of(self, sequences: list[DecodeSequence]) -> Outlook:
        """A membership's change looks at everybody: what is looked up is kept to what has to be."""
        size, block_table = self.held.block_size, self.held.blocks.block_table
        rows, lefts, rooms = [], [], []
        ends = {*self.eos_token_ids}
        for sequence in sequences:
            row = sequence.known_row or sequence.row(block_table(sequence.owner))
            drawn = len(row.output_ids)
            rows.append(row)
            lefts.append(sequence.max_tokens - drawn)
            rooms.append(len(row.block_table) * size - drawn - sequence.prompt_tokens + 1)
            if sequence.stop_token_ids:
                ends.update(sequence.stop_token_ids)
        return Outlook(tuple(rows), min(lefts), rooms, frozenset(ends))

    def finish(
        self,
        lane: int,
        tokens: tuple[SampledToken | None, ...],
        now: float,
        *,
        steps: int = 1,
        is_told: bool = True,
    ) -> list[DecodeCommand]:
        """A token for each row; None: its KV was lost. ``steps``: that took the time since it began, this one
        the last; ``is_told``: gateways are, also where a sequence goes on. Raises ValueError where no such
        step is in flight."""
        commands: list[DecodeCommand] = []
        events: dict[GatewayId, list[TokenEvent]] = {}
        rows, ends = self.held.batches.end(lane, len(tokens))
        self.held.sequences.note_steps(1, 0)
        is_quiet = not (is_told or self.held.sequences.is_any_cancelled or self.held.blocks.is_any_lost)
        for row, token in zip(rows, tokens, strict=True):
            output_ids = row.output_ids
            is_going_on = is_quiet and token is not None and len(output_ids) + 1 < row.max_tokens
            if token is not None and is_going_on and token.token_id not in ends:
                # The rules of those that end would say just this.
                output_ids.append(token.token_id)
                self.held.sequences.note_drawn(1)
            else:
                commands += self._take_token(row, token, events, is_told=is_told)
        self.held.pulls.step_ended(lane, now, steps)
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
        self.held.sequences.note_drawn(1)
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
        most = self._free_of_others(lane)
        if most > 1 and len(self.held.blocks.pools) == 1:
            [pool] = self.held.blocks.pools
            free = self.held.blocks.free_blocks_in(pool)
            most = min(most, free // self.held.batches.rows * self.held.block_size)
        elif most > 1:
            most = min(most, self._steps_in_pools([*self.held.batches.steps.values()]))
            before_move = self.held.moves.steps_before_any(self.held.with_blocks())
            most = most if before_move is None else min(most, before_move)
        return max(1, most)

    def _free_of_others(self, lane: int) -> int:
        """So many steps follow on one another, were there memory enough. Raises KeyError."""
        held, batches = self.held, self.held.batches
        rows = len(batches.steps[lane]) if batches.lanes == 1 else batches.rows
        if held.is_unsettled(rows) or self.giving_way.mates.wanted_blocks or batches.is_uneven(lane):
            return 1
        # Where nobody looks ahead, who lacks room for now has no more of it as others grow, unless somebody
        # has given way since it was looked for.
        is_hopeless = not looks_ahead(self.admission) and not self.giving_way.has_just_given
        is_alone = len(held.blocks.pools) == 1
        if len(held.sequences) > rows and not (is_hopeless and (is_alone or self.entering.is_shut_out())):
            return 1
        return batches.outlook(lane).left

    def _steps_in_pools(self, steps: list[tuple[StepRow, ...]]) -> int:
        """For so many of all of them there are blocks, however they come in between one another."""
        blocks = self.held.blocks
        members = Counter(blocks.pool_of(row.owner) for rows in steps for row in rows)
        return (
            min(blocks.free_blocks_in(pool) // rows for pool, rows in members.items()) * self.held.block_size
        )

    def _can_have_ended(self, lane: int) -> int:
        """As ``ahead``, whatever other lanes have been given since that was said."""
        own = self._steps_in_pools([self.held.batches.steps[lane]])
        return max(1, min(self._free_of_others(lane), own))

    def finish_run(self, run: StepsFinished, now: float) -> list[DecodeCommand]:
        """Raises ValueError for more steps than can follow on one another, or for a token before the last
        that would end a sequence."""
        lane, steps, before = run.lane, run.steps, run.before.token_id
        rows = self.held.batches.steps.get(lane, ())
        if not rows or len(rows) != len(run.tokens):
            raise ValueError(f"lane {lane}: steps of {len(run.tokens)} rows ended, {len(rows)} are in flight")
        most = self.ahead(lane) if self.held.batches.lanes == 1 else self._can_have_ended(lane)
        if not 1 <= steps <= most:
            raise ValueError(f"lane {lane}: {steps} steps ended, {most} can follow on another")
        outlook = self.held.batches.outlook(lane)
        if steps > 1 and before in outlook.end_token_ids:
            raise ValueError(f"lane {lane}: token {before} ends a sequence before the last of {steps} steps")
        if steps < outlook.left and run.tokens.count(run.before) == len(rows):
            self._grow(outlook, steps, [before] * steps)
            self.held.batches.end_quietly(lane, steps)
            if self.held.batches.lanes > 1 or len(self.held.blocks.pools) > 1:
                # They may change lanes, or move to another pool.
                self.held.batches.forget_kept()
            self.held.pulls.step_ended(lane, now, steps)
            return []
        if steps > 1:
            self._grow(outlook, steps, [before] * (steps - 1))
        return self.finish(lane, run.tokens, now, steps=steps, is_told=False)

    def _grow(self, outlook: Outlook, steps: int, drawn: list[int]) -> None:
        """By what was ``drawn`` in ``steps`` steps, with a block for every position but the one after the
        last: given in the order in which they come to be lacked."""
        if steps > outlook.room:
            size = self.held.block_size
            lacking = [
                (step, index) for room, index in outlook.lacking(steps) for step in range(room, steps, size)
            ]
            for _, index in sorted(lacking):
                self.held.blocks.try_allocate(outlook.rows[index].owner, 1)
                outlook.grow(index, size)
            outlook.count()
        for row in outlook.rows:
            row.output_ids.extend(drawn)
        self.held.sequences.note_steps(len(drawn), len(drawn) * len(outlook.rows))

    def blocks_taken(self, steps: int) -> int:
        """By so many that follow on one another, of the only one in flight, and by the one after them."""
        if steps == 0:
            return 0
        outlook, size = self.held.batches.outlook(0), self.held.block_size
        if steps < outlook.room:
            return 0
        return sum([blocks_for(steps + 1 - room, size) for room, _ in outlook.lacking(steps + 1)])

    def fail(self, failed: StepFailed, now: float) -> list[DecodeCommand]:
        """Raises ValueError where no such step is in flight."""
        commands: list[DecodeCommand] = []
        rows, _ = self.held.batches.end(failed.lane, None)
        for row in rows:
            sequence = self.held.sequences[row.owner]
            commands += self.held.give_back(sequence, failed.error, can_continue=failed.can_continue)
        self.held.pulls.step_ended(failed.lane, now)
        return commands
