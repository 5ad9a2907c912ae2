"""The decode room's decisions: who enters the batch, what a step computes, who is given up for memory.

``state.handle(event, now) -> [command]``: no clock, no IO, no torch. An event that breaks a rule raises a
RequestError (for its sender) or ValueError (a defect) and changes nothing.

A sequence's walk (``common.lifecycle``): WAITING, its KV still in the prefill instance's pool, or kept by
attention workers where it is resumed, until blocks and a batch slot are free; PULLING while the bytes are on
their way; RUNNING, one token a step (continuous batching), until it ends; amid that MOVING, where its KV goes
from one pool to another (``decode.moves``). One whose prompt was computed here comes in RUNNING. Where the
instance is to decode no more, those that run leave (``decode.departures``); where memory runs out the latest
give way (``decode.giving_way``).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from common.config import DecodeAdmission
from common.errors import NoInstanceReady
from common.ids import InstanceId
from common.kv.blocks import BlockAllocator, BlockOwner
from common.lifecycle import DecodePhase
from common.messages import DecodeTask, ErrorReply, ResumeTask
from common.room_mates import RoomMates
from common.sequences import PublishFailure, failure_of
from decode.arrivals import Arrivals
from decode.batches import Batches
from decode.context_turns import ContextTurns
from decode.departures import Departures
from decode.entering import Entering
from decode.events import (
    BlocksFreed,
    CancelArrived,
    DeclineOffer,
    DecodeCommand,
    DecodeEvent,
    DrainExpired,
    DrainStarted,
    GatewayGone,
    HandOn,
    HomeFound,
    LeaveAsked,
    LengthPredicted,
    MoveDrained,
    MoveFailed,
    MoveFinished,
    MoveSequence,
    OfferWithdrawn,
    PassDue,
    PoolAdded,
    PoolClosed,
    PoolLeft,
    PoolLost,
    PortionPulled,
    PrefillGone,
    PullDrained,
    PullFailed,
    PullFinished,
    ResumeArrived,
    RoleChanged,
    SearchEnded,
    SeekHome,
    SequenceEnded,
    SequenceStayed,
    StepFailed,
    StepFinished,
    StepsFinished,
    SwapFailed,
    SwapFinished,
    TaskArrived,
)
from decode.expectations import Untold
from decode.forecast import has_begun, is_movable
from decode.giving_way import GivingWay
from decode.hand_over import HandOvers
from decode.holdings import Holdings
from decode.moves import Moves
from decode.pulls import Pulls
from decode.sequence import KV_LOST, PREEMPTED, DecodeSequence, Sequences, source_of
from decode.stepping import Stepping
from decode.swapping import Swapping


@dataclass(slots=True)
class DecodeState:
    """All sequences this instance decodes or has been offered. ``lanes``: batches that take turns.
    ``max_moves``: sequences that move between pools at once, and ``min_move_gain_tokens``: see ``Moves``.
    ``host_blocks``: of the host tier, and ``block_bytes`` of each; 0: nobody is swapped. ``turns``: where
    contexts are bounded of a step."""

    instance_id: InstanceId
    blocks: BlockAllocator
    block_size: int
    eos_token_ids: tuple[int, ...]
    max_batch: int
    max_waiting_requests: int
    admission: DecodeAdmission = "greedy"
    is_admitting: bool = True
    sequences: Sequences = field(default_factory=Sequences)
    lanes: int = 1
    pulls: Pulls = field(default_factory=Pulls)
    mates: RoomMates = field(default_factory=RoomMates)
    max_moves: int = 0
    min_move_gain_tokens: int = 256
    host_blocks: int = 0
    block_bytes: int = 1
    turns: ContextTurns = field(default_factory=ContextTurns)
    moves: Moves = field(init=False)
    batches: Batches = field(init=False)
    departures: Departures = field(init=False)
    swapping: Swapping = field(init=False)
    held: Holdings = field(init=False)
    arrivals: Arrivals = field(init=False)
    hand_overs: HandOvers = field(init=False)
    entering: Entering = field(init=False)
    giving_way: GivingWay = field(init=False)
    stepping: Stepping = field(init=False)

    def __post_init__(self) -> None:
        self.moves = Moves(self.blocks, self.block_size, self.max_moves, self.min_move_gain_tokens)
        self.batches = Batches(self.lanes)
        self.departures = Departures(self.blocks)
        host = BlockAllocator(self.host_blocks, has_pages=self.blocks.has_pages)
        self.swapping = Swapping(self.blocks, self.block_size, host, self.block_bytes)
        self.held = Holdings(
            self.sequences,
            self.blocks,
            self.block_size,
            self.pulls,
            self.moves,
            self.batches,
            self.departures,
            self.swapping,
        )
        self.arrivals = Arrivals(self.instance_id, self.max_waiting_requests, self.held)
        self.hand_overs = HandOvers(self.held)
        self.entering = Entering(self.held, self.mates, self.admission, self.max_batch)
        self.mates.admission, self.mates.max_batch = self.admission, self.max_batch
        self.mates.decoded = self._decoded
        self.giving_way = GivingWay(self.held, self.mates)
        self.stepping = Stepping(
            self.held,
            self.giving_way,
            self.entering,
            self.max_batch,
            self.eos_token_ids,
            self.turns,
            self.admission,
        )

    # what others ask, changing nothing

    @property
    def running(self) -> int:
        """In the batch, be it that they move."""
        return self.held.in_batch

    @property
    def waiting(self) -> int:
        """Sequences that are here but not in the batch yet."""
        return self.held.waiting

    @property
    def context_tokens(self) -> int:
        """KV positions of everything running or waiting."""
        return self.sequences.tokens

    @property
    def preempted(self) -> int:
        """How often a sequence lost its blocks to older ones since the start."""
        return self.giving_way.preempted

    @property
    def is_idle(self) -> bool:
        return not self.sequences and not self.batches.is_computing

    def untold(self, of_lane: tuple[int, ...]) -> Untold:
        """What it does not know yet: that each lane's step in flight, and those that follow on it, so many in
        all, have ended (``steps_ahead``)."""
        return self.batches.untold(of_lane)

    def blocks_taken(self, steps: int, lane: int = 0) -> int:
        """By so many of the lane's steps that follow on one another, and by the one after them."""
        return self.stepping.blocks_taken(steps, lane)

    def has_ample_blocks(self, steps: int) -> bool:
        """Whether memory limits no lane's ``steps_ahead``, the most of which is that, however many of them
        have ended."""
        return self.stepping.has_ample_blocks(steps)

    def context_of_step(self, lane: int = 0) -> int:
        """KV positions that the lane's step in flight attends to, of all its rows."""
        return self.batches.outlook(lane).context_tokens

    def steps_ahead(self, lane: int = 0) -> int:
        """So many steps, the lane's one in flight with them, follow on one another and change nothing but
        what they draw, unless an event comes in between: ``StepsFinished``."""
        return self.stepping.ahead(lane)

    def check(self) -> None:
        """Invariants, called by tests after every event."""
        is_step_due = self.mates.step_due_s is not None
        assert self.mates.is_engine_taken or not is_step_due, "nobody asks for a step that is due"
        self.held.check(is_step_due=is_step_due)

    def handle(self, event: DecodeEvent, now: float) -> list[DecodeCommand]:
        """Takes an event in and says what to do. ``now``: seconds, monotonic."""
        commands = self._take(event, now)
        if self.departures.homes:
            commands += self._let_leave()
        if self.sequences.without_blocks:
            commands += self.entering.enter(now)
        if not self.blocks.is_one_pool and self.moves.can_start:
            commands += self._start_moves()
        if len(self.batches.steps) < self.lanes:
            commands += self._start_steps(event, now)
        if self.pulls.under_way:
            commands += self.hand_overs.ask(is_step_due=self.mates.step_due_s is not None)
        if self.departures.is_leaving:
            commands += self.departures.seek(self.held.running())
        self._tell_mates(now)
        return commands

    def _start_steps(self, event: DecodeEvent, now: float) -> list[DecodeCommand]:
        """Whose turn has not come is not chosen yet."""
        mates = self.mates
        if isinstance(event, PassDue) or mates.may_choose_step():
            mates.step_due_s = None
            return self.stepping.start(now)
        self.batches.rest_kept()
        if mates.step_due_s is None and self.sequences.in_batch:
            mates.step_due_s = now
        return []

    def _take(self, event: DecodeEvent, now: float) -> list[DecodeCommand]:
        """What the event itself brings about, before anybody comes in, moves or is computed."""
        commands: list[DecodeCommand] = []
        match event:
            # The commonest come first.
            case StepsFinished():
                commands += self.stepping.finish_run(event, now)
            case StepFinished(tokens, lane):
                commands += self.stepping.finish(lane, tokens, now)
            case BlocksFreed() | PassDue():
                pass
            case TaskArrived(task):
                self._take_in(task, now)
            case PortionPulled(owner, kv_bytes, transfer_s):
                commands += self.hand_overs.take_portion(owner, kv_bytes, transfer_s)
            case PullFinished():
                commands += self.hand_overs.finish(event, now)
            case SequenceStayed(held_by, task):
                self.arrivals.take_over(held_by, task, now)
            case ResumeArrived(task, pool):
                self._take_in(task, now, pool)
            case LengthPredicted(owner, lengths):
                self.arrivals.expect(owner, lengths)
            case PullFailed():
                commands += self.hand_overs.fail(event)
            case SequenceEnded(owner):
                self.held.drop(self.held.pulling(owner))
            case OfferWithdrawn():
                self.hand_overs.withdraw(event)
            case PrefillGone():
                commands += self.hand_overs.lose_source(event)
            case PullDrained(owner):
                if not self.blocks.is_quarantined(owner):
                    raise ValueError(f"{owner} is not in quarantine")
                self.blocks.end_quarantine(owner)
            case MoveFinished(owner):
                commands += self._end_move(owner, has_arrived=True)
            case MoveFailed(owner):
                commands += self._end_move(owner, has_arrived=False)
            case MoveDrained(owner):
                self.moves.end_quarantine(owner)
            case SwapFinished() | SwapFailed():
                commands += self._end_swap(event)
            case StepFailed():
                commands += self.stepping.fail(event, now)
            case PoolAdded(total_blocks):
                self.blocks.add_pool(total_blocks)
                commands += self._send_back_homeless()
            case PoolClosed(pool):
                self.blocks.close_pool(pool)
                commands += self._send_back_homeless()
            case PoolLeft(pool):
                self.blocks.remove_pool(pool)
            case PoolLost(pool):
                commands += self._lose_pool(pool)
            case CancelArrived(request_id, attempt):
                self.arrivals.cancel(request_id, attempt)
            case GatewayGone(gateway_id):
                self.held.discard_all(lambda sequence: sequence.request.gateway_id == gateway_id)
            case RoleChanged(is_decode):
                self.is_admitting = True
                self.departures.change_role(is_decode=is_decode)
            case LeaveAsked(owner, wanted):
                commands += self._ask_to_leave(owner, wanted)
            case HomeFound(owner, home):
                # A mixed instance may be told that nobody else is better than itself.
                if home.decode_instance == self.instance_id:
                    self.departures.forget(owner)
                else:
                    self.departures.find(owner, home)
            case SearchEnded(owner):
                self.departures.forget(owner)
            case DrainStarted():
                self.is_admitting = False
                commands += self._send_back(lambda sequence: sequence.phase is DecodePhase.WAITING)
            case DrainExpired():
                commands += self._send_back(lambda sequence: True)
        return commands

    def _take_in(self, task: DecodeTask | ResumeTask, now: float, pool: int | None = None) -> None:
        if not self.is_admitting:
            raise NoInstanceReady(f"instance {self.instance_id} admits no sequences now")
        self.arrivals.take_in(task, now, pool)

    # the instance's other room

    def _decoded(self) -> list[tuple[int, int]]:
        return [(each.tokens, each.coming_tokens) for each in self.held.with_blocks()]

    def _tell_mates(self, now: float) -> None:
        mates, sequences = self.mates, self.sequences
        decoding = min(sequences.in_batch, self.max_batch)
        if self.turns.most_tokens is not None:
            if self.batches.is_computing:
                decoding = self.batches.rows
            elif mates.step_due_s is not None:
                # The share that was in the last.
                decoding = min(decoding, max(1, round(decoding / self.turns.steps_per_token(0))))
        mates.decoding = -(-decoding // self.lanes)
        mates.taken_slots = len(sequences) - sequences.without_blocks + sequences.swapped
        if sequences.without_blocks:
            away = next(each for each in sequences.values() if not each.has_blocks)
            mates.note_away(away.owner, self.entering.blocks_wanted_by(away), now)
        elif mates.away is not None:
            mates.note_away(None, 0, now)
        gets_on = bool(self.batches.steps) or not sequences or mates.step_due_s is not None
        if gets_on:
            mates.stuck_since_s = None
        else:
            mates.note_stuck(is_stuck=not self._is_kv_on_its_way(), now=now)

    def _is_kv_on_its_way(self) -> bool:
        """Else all that are here and not computed wait for memory."""
        resting = (DecodePhase.WAITING, DecodePhase.RUNNING, DecodePhase.SWAPPED)
        return any(each.phase not in resting for each in self.sequences.values())

    # pools

    def _lose_pool(self, pool: int) -> list[PublishFailure]:
        """Its sequences go back to be continued; what is in the step or in the air when that has ended."""
        self.blocks.lose_pool(pool)
        self.batches.disturb()
        pulled = [self.sequences[owner] for owner in self.pulls.owners if self.pulls.rests(owner)]
        lost = [each for each in [*self.held.at_rest(), *pulled] if self.blocks.is_lost(each.owner)]
        commands = [failure for sequence in lost for failure in self.held.give_back(sequence, KV_LOST)]
        return [*commands, *self._send_back_homeless()]

    def _send_back_homeless(self) -> list[PublishFailure]:
        """Waiting sequences that none of the pools left can ever hold. Without any pool, all wait for one,
        except those that must have a certain one."""
        commands: list[PublishFailure] = []
        for sequence in [each for each in self.sequences.values() if each.phase is DecodePhase.WAITING]:
            room = self.held.room_in(sequence.pool)
            if room < self.held.longest_blocks(sequence) and (room > 0 or sequence.pool is not None):
                commands += self.held.give_back(sequence, KV_LOST)
        return commands

    # the host tier

    def _end_swap(self, ended: SwapFinished | SwapFailed) -> list[PublishFailure]:
        sequence = self.sequences.get(ended.owner)
        if sequence is None or sequence.phase not in (DecodePhase.SWAPPING_OUT, DecodePhase.SWAPPING_IN):
            raise ValueError(f"{ended.owner} is not being copied")
        if sequence.is_cancelled or isinstance(ended, SwapFailed):
            return self.held.give_back(sequence, PREEMPTED)
        self.swapping.end_copy(sequence, ended.kv_bytes, ended.copy_s)
        return []

    # moves

    def _start_moves(self) -> list[MoveSequence]:
        """Whoever waits for memory, and not for a slot, comes before what is only faster elsewhere."""
        entered = self.held.with_blocks()
        may_balance = len(entered) in (len(self.sequences), self.max_batch)
        return self.moves.start(entered, self.held.at_rest(), may_balance=may_balance)

    def _end_move(self, owner: BlockOwner, *, has_arrived: bool) -> list[PublishFailure]:
        sequence = self.moves.end(owner, has_arrived=has_arrived)
        if sequence.is_cancelled or self.blocks.is_lost(owner):
            return self.held.give_back(sequence, KV_LOST)
        return []

    # those that leave

    def _ask_to_leave(self, owner: BlockOwner, wanted: InstanceId) -> list[SeekHome] | list[DeclineOffer]:
        """Of one that has ended, or is on some way already, nothing is done."""
        sequence = self.sequences.get(owner)
        if sequence is None or not is_movable(sequence, can_hand_on=True):
            return []
        if has_begun(sequence):
            return self.departures.ask(sequence, wanted)
        prefill_instance, _ = source_of(sequence.task)
        self.held.drop(sequence)
        return [DeclineOffer(owner, prefill_instance, wanted)]

    def _let_leave(self) -> list[HandOn]:
        commands = self.departures.leave(self.held.at_rest())
        for hand_on in commands:
            del self.sequences[hand_on.owner]
        return commands

    def _send_back(self, matches: Callable[[DecodeSequence], bool]) -> list[PublishFailure]:
        commands: list[PublishFailure] = []
        for sequence in [sequence for sequence in self.sequences.values() if matches(sequence)]:
            if not sequence.is_cancelled:
                error = ErrorReply(NoInstanceReady.code, f"instance {self.instance_id} is draining")
                commands.append(failure_of(sequence.request, error, can_continue=True))
            self.held.discard(sequence)
        return commands
