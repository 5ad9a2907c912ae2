"""What a step computes, and what becomes of the sequences that it drew for: part of the decode room's
decisions.

A step takes all sequences of its lane that have room for a token, one each (continuous batching): whoever
came in since the last one joins, whoever has ended is gone. Where their contexts are too much for one step
they take turns (``decode.context_turns``).
"""

from collections import Counter
from dataclasses import dataclass

from common.config import DecodeAdmission
from common.ids import GatewayId
from common.kv.blocks import blocks_for
from common.messages import SampledToken, TokenEvent
from common.sequences import PublishFailure, finish_reason_of
from decode.context_turns import ContextTurns
from decode.entering import Entering
from decode.events import DecodeCommand, PublishTokens, RunStep, StepFailed, StepRow, StepsFinished
from decode.giving_way import GivingWay
from decode.holdings import Holdings
from decode.outlook import Outlook
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
    turns: ContextTurns
    admission: DecodeAdmission = "greedy"

    def start(self, now: float) -> list[DecodeCommand]:
        """The next step of every lane that has none in flight, as one has: all its sequences that have
        room."""
        batches, sequences = self.held.batches, self.held.sequences
        kept, joined = batches.kept, sequences.joined
        if joined:
            sequences.joined = []
        if kept is not None and self._goes_on(kept, joined):
            self.giving_way.has_just_given = False
            return [self._begin(batches.kept_lane, kept, now)]
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
            taken = ready
            if batches.lanes > 1:
                taken = [sequence for sequence in ready if sequence.lane == lane]
            if taken:
                taken = self.turns.choose(lane, taken, sequences)
                commands.append(self._begin(lane, self._outlook_of(taken), now))
        return commands

    def _goes_on(self, kept: Outlook, joined: list[DecodeSequence]) -> bool:
        """Whether the next step is of the rows that are kept and those that have ``joined``: then these are
        among them, and each has a block. Else nobody need have one, and none is given up for another.
        Batches that take turns are as alike as they were: that changes with those who come and go alone."""
        sequences, blocks, batches = self.held.sequences, self.held.blocks, self.held.batches
        rows = batches.rows + len(kept.rows) + len(joined)
        is_known = kept.departed == sequences.departed and rows == sequences.in_batch <= self.max_batch
        if not is_known or self.giving_way.mates.wanted_blocks:
            return False
        if joined and batches.lanes > 1:
            return False  # which lane they go to is to be found
        if joined:
            for sequence in joined:
                kept.add(sequence, blocks.block_table(sequence.owner))
            kept.count()
        if not self.turns.has_room_for(kept):
            return False
        self.turns.take_all(batches.kept_lane)
        if kept.room > 0:
            return True
        lacking = kept.lacking(1)
        if len(lacking) > blocks.free_blocks_in(blocks.pools[0]):
            return False
        for _, place in lacking:
            blocks.try_allocate(kept.rows[place].owner, 1)
            kept.grow(place)
        kept.count_room()
        return True

    def _begin(self, lane: int, outlook: Outlook, now: float) -> RunStep:
        outlook.departed = self.held.sequences.departed
        self.held.batches.begin(lane, outlook)
        self.held.pulls.step_began(lane, now)
        return RunStep(outlook.table, lane)

    def _outlook_of(self, sequences: list[DecodeSequence]) -> Outlook:
        """Anew."""
        outlook = Outlook(self.held.block_size, self.eos_token_ids)
        outlook.fill(sequences, self.held.blocks.block_table)
        return outlook

    def _end(self, lane: int, outlook: Outlook, steps: int, gone: list[int]) -> None:
        """With the step those in these places went."""
        held = self.held
        # They may move to another pool or leave.
        is_settled = held.blocks.is_one_pool and not held.departures.homes
        if is_settled and len(gone) < len(outlook.rows):
            held.batches.keep(lane, outlook, steps, gone)
        else:
            held.batches.let_go(outlook)

    def finish(self, lane: int, tokens: tuple[SampledToken | None, ...], now: float) -> list[DecodeCommand]:
        """A token for each row, which its gateway is told; None: its KV was lost. Raises ValueError where no
        such step is in flight."""
        commands: list[DecodeCommand] = []
        events: dict[GatewayId, list[TokenEvent]] = {}
        outlook = self.held.batches.end(lane, len(tokens))
        self.held.sequences.note_steps(1, 0)
        for row, token in zip(outlook.rows, tokens, strict=True):
            commands += self._take_token(row, token, events, is_told=True)
        gone = [place for place, row in enumerate(outlook.rows) if row.owner not in self.held.sequences]
        self._end(lane, outlook, 1, gone)
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
        if most <= 1:
            return 1
        held = self.held
        blocks, batches = held.blocks, held.batches
        most = min(most, self._steps_in_pools([*batches.steps.values()]))
        most = self.turns.steps_of(batches.outlook(lane), most)
        if not blocks.is_one_pool:
            before_move = held.moves.steps_before_any(held.with_blocks())
            most = most if before_move is None else min(most, before_move)
        return most if most > 1 else 1

    def _free_of_others(self, lane: int) -> int:
        """So many steps follow on one another, were there memory enough. Raises KeyError."""
        held, batches = self.held, self.held.batches
        is_alone = batches.lanes == 1
        rows = len(batches.steps[lane]) if is_alone else batches.rows
        if held.is_unsettled(rows) or self.giving_way.mates.wanted_blocks:
            return 1
        if not is_alone and batches.is_uneven(lane):
            return 1
        if len(held.sequences) > rows:
            # Where nobody looks ahead, or nobody may come in, who lacks room for now has no more of it as
            # others grow, unless somebody has given way since it was looked for.
            is_hopeless = not looks_ahead(self.admission) or self.entering.is_closed
            if self.giving_way.has_just_given or not is_hopeless:
                return 1
            if not (held.blocks.is_one_pool or self.entering.is_shut_out()):
                return 1
        return batches.outlook(lane).left

    def _steps_in_pools(self, steps: list[tuple[StepRow, ...]]) -> int:
        """For so many of all of them there are blocks, however they come in between one another."""
        blocks = self.held.blocks
        if blocks.is_one_pool:
            [pool] = blocks.pools
            return blocks.free_blocks_in(pool) // sum([len(rows) for rows in steps]) * self.held.block_size
        members = Counter(blocks.pool_of(row.owner) for rows in steps for row in rows)
        return (
            min(blocks.free_blocks_in(pool) // rows for pool, rows in members.items()) * self.held.block_size
        )

    def has_ample_blocks(self, steps: int) -> bool:
        """Whether memory would not limit ``ahead`` of any lane, of which so many are the most, after some of
        them either: as many of each lane, or one more. Of one pool."""
        held = self.held
        most = held.blocks.free_blocks // held.batches.rows * held.block_size
        return most >= steps + held.block_size

    def _can_have_ended(self, lane: int) -> int:
        """As ``ahead``, whatever other lanes have been given since that was said."""
        own = self._steps_in_pools([self.held.batches.steps[lane]])
        own = self.turns.steps_of(self.held.batches.outlook(lane), own)
        return max(1, min(self._free_of_others(lane), own))

    def finish_run(self, run: StepsFinished, now: float) -> list[DecodeCommand]:
        """Raises ValueError for more steps than can follow on one another, or for a token before the last
        that would end a sequence."""
        lane, steps, before = run.lane, run.steps, run.before.token_id
        rows = self.held.batches.steps.get(lane, ())
        if not rows or len(rows) != len(run.tokens):
            raise ValueError(f"lane {lane}: steps of {len(run.tokens)} rows ended, {len(rows)} are in flight")
        if steps != 1:
            most = self.ahead(lane) if self.held.batches.lanes == 1 else self._can_have_ended(lane)
            if not 1 <= steps <= most:
                raise ValueError(f"lane {lane}: {steps} steps ended, {most} can follow on another")
        outlook = self.held.batches.outlook(lane)
        if steps > 1 and before in outlook.end_token_ids:
            raise ValueError(f"lane {lane}: token {before} ends a sequence before the last of {steps} steps")
        self._give_blocks(outlook, steps)
        self.held.batches.end(lane, len(rows))
        ending = self._may_end(outlook, run)
        outlook.draw([before] * steps)
        for place in ending:
            rows[place].output_ids.pop()
        self.held.sequences.note_steps(steps, steps * len(rows) - len(ending))
        commands = self._take_last(outlook, run, ending) if ending else []
        gone = [place for place in ending if rows[place].owner not in self.held.sequences]
        self._end(lane, outlook, steps, gone)
        self.held.pulls.step_ended(lane, now, steps)
        return commands

    def _may_end(self, outlook: Outlook, run: StepsFinished) -> list[int]:
        """The places of those whose last token the rules have to be asked about."""
        is_quiet = not (self.held.sequences.is_any_cancelled or self.held.blocks.is_any_lost)
        if not is_quiet or run.before.token_id in outlook.end_token_ids:
            return list(range(len(outlook.rows)))
        ending = outlook.ending(run.steps)
        if run.tokens.count(run.before) < len(run.tokens):
            others = [place for place, token in enumerate(run.tokens) if token != run.before]
            ending = sorted({*ending, *others})
        return ending

    def _take_last(self, outlook: Outlook, run: StepsFinished, ending: list[int]) -> list[DecodeCommand]:
        commands: list[DecodeCommand] = []
        events: dict[GatewayId, list[TokenEvent]] = {}
        for place in ending:
            commands += self._take_token(outlook.rows[place], run.tokens[place], events, is_told=False)
        commands.extend(PublishTokens(gateway_id, tuple(batch)) for gateway_id, batch in events.items())
        return commands

    def _give_blocks(self, outlook: Outlook, steps: int) -> None:
        """For every position of so many steps but the one after the last: in the order in which they come to
        be lacked."""
        if steps <= outlook.room:
            return
        size = self.held.block_size
        lacking = outlook.lacking(steps)
        wanted = [(step, place) for room, place in lacking for step in range(room, steps, size)]
        for _, place in sorted(wanted):
            self.held.blocks.try_allocate(outlook.rows[place].owner, 1)
            outlook.grow(place)
        outlook.count_room()

    def blocks_taken(self, steps: int, lane: int = 0) -> int:
        """By so many that follow on one another, of the lane's in flight, and by the one after them."""
        if steps == 0:
            return 0
        outlook, size = self.held.batches.outlook(lane), self.held.block_size
        if steps < outlook.room:
            return 0
        return sum([blocks_for(steps + 1 - room, size) for room, _ in outlook.lacking(steps + 1)])

    def fail(self, failed: StepFailed, now: float) -> list[DecodeCommand]:
        """Raises ValueError where no such step is in flight."""
        commands: list[DecodeCommand] = []
        outlook = self.held.batches.end(failed.lane, None)
        self.held.batches.let_go(outlook)
        for row in outlook.rows:
            sequence = self.held.sequences[row.owner]
            commands += self.held.give_back(sequence, failed.error, can_continue=failed.can_continue)
        self.held.pulls.step_ended(failed.lane, now)
        return commands
