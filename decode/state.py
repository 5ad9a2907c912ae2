"""The decode room's decisions: who enters the batch, what a step computes, who is given up for memory.

``state.handle(event, now) -> [command]``: no clock, no IO, no torch. An event that breaks a rule raises a
RequestError (for its sender) or ValueError (a defect) and changes nothing.

A sequence's walk (``common.lifecycle``): WAITING, its KV still in the prefill instance's pool, or kept by
attention workers where it is resumed, until blocks and a batch slot are free; PULLING while the bytes are on
their way; RUNNING, one token a step (continuous batching), until it ends; amid that MOVING, where its KV goes
from one pool to another (``decode.moves``). One whose prompt was computed here comes in RUNNING. Where the
instance is to decode no more, those that run leave (``decode.departures``). Blocks grow with the sequence;
when none is left the latest arrivals are preempted: their KV waits in the host tier (``decode.swapping``), or
they go back to their gateway, which continues them elsewhere with the tokens they already have.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from common.attempts import EndedAttempts
from common.config import DecodeAdmission
from common.errors import HandoverFailed, NoInstanceReady, Overloaded, RequestCancelled
from common.ids import GatewayId, InstanceId, RequestId
from common.kv.blocks import BlockAllocator, BlockOwner, blocks_for
from common.lengths import LengthDistribution
from common.lifecycle import DecodePhase, next_decode_phase
from common.messages import (
    DecodeTask,
    ErrorReply,
    ResumeTask,
    SampledToken,
    TokenEvent,
)
from common.predictions import NewestLengths
from common.room_mates import RoomMates
from common.sequences import failure_of, finish_reason_of
from decode.batches import Batches
from decode.departures import Departures
from decode.events import (
    BlocksFreed,
    CancelArrived,
    DeclineOffer,
    DecodeCommand,
    DecodeEvent,
    DrainExpired,
    DrainStarted,
    GatewayGone,
    HomeFound,
    InheritSequence,
    LeaveAsked,
    LengthPredicted,
    MoveDrained,
    MoveFailed,
    MoveFinished,
    ObserveAdmission,
    OfferWithdrawn,
    PoolAdded,
    PoolClosed,
    PoolLeft,
    PoolLost,
    PortionPulled,
    PrefillGone,
    PublishTokens,
    PullDrained,
    PullFailed,
    PullFinished,
    PullSequence,
    ResumeArrived,
    RoleChanged,
    RunStep,
    SearchEnded,
    SequenceEnded,
    SequenceStayed,
    StepFailed,
    StepFinished,
    StepRow,
    SwapFailed,
    SwapFinished,
    TaskArrived,
)
from decode.forecast import has_begun, is_movable
from decode.holdings import Holdings
from decode.moves import Moves
from decode.pulls import Pulls
from decode.sequence import KV_LOST, PREEMPTED, PREFILL_GONE, ROOM, DecodeSequence, source_of
from decode.swapping import Swapping
from scheduler.policy.decode_admission import Growing, Pool, blocks_to_enter, can_admit
from scheduler.policy.decode_batching import choose_victims
from scheduler.policy.mixed_batching import choose_to_give_way


@dataclass(slots=True)
class DecodeState:
    """All sequences this instance decodes or has been offered. ``lanes``: batches that take turns.
    ``max_moves``: sequences that move between pools at once, and ``min_move_gain_tokens``: see ``Moves``.
    ``host_blocks``: of the host tier, and ``block_bytes`` of each; 0: nobody is swapped."""

    instance_id: InstanceId
    blocks: BlockAllocator
    block_size: int
    eos_token_ids: tuple[int, ...]
    max_batch: int
    max_waiting_requests: int
    admission: DecodeAdmission = "greedy"
    is_admitting: bool = True
    sequences: dict[BlockOwner, DecodeSequence] = field(default_factory=dict)
    lanes: int = 1
    pulls: Pulls = field(default_factory=Pulls)
    mates: RoomMates = field(default_factory=RoomMates)
    max_moves: int = 0
    min_move_gain_tokens: int = 256
    host_blocks: int = 0
    block_bytes: int = 1
    moves: Moves = field(init=False)
    batches: Batches = field(init=False)
    departures: Departures = field(init=False)
    swapping: Swapping = field(init=False)
    held: Holdings = field(init=False)
    _preempted: int = 0
    _ended: EndedAttempts = field(default_factory=EndedAttempts)
    _early_lengths: NewestLengths[BlockOwner] = field(default_factory=NewestLengths)

    def __post_init__(self) -> None:
        self.moves = Moves(self.blocks, self.block_size, self.max_moves, self.min_move_gain_tokens)
        self.batches = Batches(self.lanes)
        self.departures = Departures(self.blocks)
        host = BlockAllocator(self.host_blocks)
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

    # what others ask, changing nothing

    @property
    def running(self) -> int:
        """In the batch, be it that they move."""
        return self.held.count(DecodePhase.RUNNING) + self.held.count(DecodePhase.MOVING)

    @property
    def waiting(self) -> int:
        """Sequences that are here but not in the batch yet."""
        return len(self.sequences) - self.running

    @property
    def context_tokens(self) -> int:
        """KV positions of everything running or waiting."""
        return sum(sequence.tokens for sequence in self.sequences.values())

    @property
    def preempted(self) -> int:
        """How often a sequence lost its blocks to older ones since the start."""
        return self._preempted

    @property
    def is_idle(self) -> bool:
        return not self.sequences and not self.batches.is_computing

    def check(self) -> None:
        """Invariants, called by tests after every event."""
        self.held.check()

    def handle(self, event: DecodeEvent, now: float) -> list[DecodeCommand]:
        """Takes an event in and says what to do. ``now``: seconds, monotonic."""
        commands: list[DecodeCommand] = []
        match event:
            case TaskArrived(task):
                self._take_in(task, now)
            case SequenceStayed(held_by, task):
                self._take_over(held_by, task, now)
            case ResumeArrived(task, pool):
                self._take_in(task, now, pool)
            case LengthPredicted(owner, lengths):
                self._expect(owner, lengths)
            case PortionPulled(owner, kv_bytes, transfer_s):
                self._take_portion(owner, kv_bytes, transfer_s, commands)
            case PullFinished():
                self._start_running(event, now, commands)
            case PullFailed():
                self._give_up_pull(event, commands)
            case SequenceEnded(owner):
                self.held.drop(self.held.pulling(owner))
            case OfferWithdrawn():
                self._forget_offer(event)
            case PrefillGone():
                self._lose_source(event, commands)
            case PullDrained(owner):
                if not self.blocks.is_quarantined(owner):
                    raise ValueError(f"{owner} is not in quarantine")
                self.blocks.end_quarantine(owner)
            case MoveFinished(owner):
                self._end_move(owner, commands, has_arrived=True)
            case MoveFailed(owner):
                self._end_move(owner, commands, has_arrived=False)
            case MoveDrained(owner):
                self.moves.end_quarantine(owner)
            case SwapFinished() | SwapFailed():
                self._end_swap(event, commands)
            case StepFinished(tokens, lane):
                self._finish_step(lane, tokens, commands)
                self.pulls.step_ended(lane, now)
            case PoolAdded(total_blocks):
                self.blocks.add_pool(total_blocks)
                self._send_back_homeless(commands)
            case PoolClosed(pool):
                self.blocks.close_pool(pool)
                self._send_back_homeless(commands)
            case PoolLeft(pool):
                self.blocks.remove_pool(pool)
            case PoolLost(pool):
                self._lose_pool(pool, commands)
            case StepFailed():
                self._fail_step(event, commands)
                self.pulls.step_ended(event.lane, now)
            case CancelArrived(request_id, attempt):
                self._cancel(request_id, attempt)
            case GatewayGone(gateway_id):
                self.held.discard_all(lambda sequence: sequence.request.gateway_id == gateway_id)
            case BlocksFreed():
                pass
            case RoleChanged(is_decode):
                self.is_admitting = True
                self.departures.change_role(is_decode=is_decode)
            case LeaveAsked(owner, wanted):
                self._ask_to_leave(owner, wanted, commands)
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
                self._send_back(lambda sequence: sequence.phase is DecodePhase.WAITING, commands)
            case DrainExpired():
                self._send_back(lambda sequence: True, commands)
        self._let_leave(commands)
        self._admit(now, commands)
        self._start_moves(commands)
        self._start_steps(now, commands)
        self._ask_portions(commands)
        commands.extend(self.departures.seek(self.held.running()))
        self._tell_mates(now)
        return commands

    def _tell_mates(self, now: float) -> None:
        self.mates.decoding = min(self.running, self.max_batch)
        away = next((each for each in self.sequences.values() if not each.has_blocks), None)
        if away is None:
            self.mates.note_away(None, 0, now)
        else:
            self.mates.note_away(away.owner, self._blocks_wanted_by(away), now)
        self.mates.note_stuck(is_stuck=bool(self.sequences) and not self._is_anybody_busy(), now=now)

    def _is_anybody_busy(self) -> bool:
        """Whether a step computes, or KV is on its way: else all that are here wait for memory."""
        resting = (DecodePhase.WAITING, DecodePhase.RUNNING, DecodePhase.SWAPPED)
        return self.batches.is_computing or any(each.phase not in resting for each in self.sequences.values())

    def _blocks_wanted_by(self, away: DecodeSequence) -> int:
        """That have to be free for it to come in, or back, beside those that are there."""
        present = [each for each in self.sequences.values() if each.has_blocks]
        if away.is_swapped:
            return self.swapping.blocks_wanted_by(away, present)
        growing = [Growing(each.tokens, each.coming_tokens) for each in present]
        return blocks_to_enter(self.admission, _as_newcomer(away), growing, self.block_size)

    # arrivals

    def _take_in(self, task: DecodeTask | ResumeTask, now: float, pool: int | None = None) -> None:
        request = task.request
        owner = BlockOwner(ROOM, request.request_id, request.attempt)
        if not self.is_admitting:
            raise NoInstanceReady(f"instance {self.instance_id} admits no sequences now")
        if self._ended.is_superseded(request, self.sequences.values()) or self.blocks.is_quarantined(owner):
            raise RequestCancelled(f"request {request.request_id} was cancelled before it arrived")
        if owner in self.sequences:
            if source_of(self.sequences[owner].task) != source_of(task):
                raise HandoverFailed(f"request {request.request_id} is offered by another instance, too")
            return
        if self.waiting >= self.max_waiting_requests:
            raise Overloaded(
                f"decode instance {self.instance_id} already has instance.max_waiting_requests ="
                f" {self.max_waiting_requests} sequences waiting",
                retry_after_s=1.0,
            )
        if not self.blocks.open_pools:
            raise NoInstanceReady(f"instance {self.instance_id} has no attention worker now")
        needed, room = blocks_for(request.max_total_tokens, self.block_size), self.held.room_in(pool)
        if needed > room:
            raise HandoverFailed(
                f"the sequence may need {needed} KV blocks; instance {self.instance_id} has {room} for it"
            )
        self._keep(DecodeSequence(owner, task, now, list(request.output_ids), pool=pool))

    def _take_over(self, held_by: BlockOwner, task: DecodeTask, now: float) -> None:
        """It is in the batch at once, whoever is admitted: it has its KV here. A later attempt may have
        overtaken it; or the same one is here from another instance, which was slow to say that it has it."""
        request = task.request
        owner = BlockOwner(ROOM, request.request_id, request.attempt)
        is_here = owner in self.sequences or self.blocks.is_quarantined(owner)
        if is_here or self._ended.is_superseded(request, self.sequences.values()):
            self.blocks.release(held_by)
            return
        self.blocks.rename(held_by, owner)
        self._keep(DecodeSequence(owner, task, now, list(request.output_ids), DecodePhase.RUNNING))

    def _keep(self, sequence: DecodeSequence) -> None:
        """It takes the place of earlier attempts."""
        request = sequence.request
        self.held.discard_all(
            lambda other: (
                other.request.request_id == request.request_id and other.request.attempt < request.attempt
            )
        )
        sequence.predicted = self._early_lengths.forget(sequence.owner)
        self.sequences[sequence.owner] = sequence
        task = sequence.task
        if isinstance(task, DecodeTask) and task.prompt_time is not None:
            self.swapping.prompt_time = task.prompt_time

    def _expect(self, owner: BlockOwner, lengths: LengthDistribution) -> None:
        """The word may overtake the sequence: that has still to be prefilled."""
        if owner in self.sequences:
            self.sequences[owner].predicted = lengths
        else:
            self._early_lengths.keep(owner, lengths)

    def _admit(self, now: float, commands: list[DecodeCommand]) -> None:
        """Takes sequences in, or back from the host tier, in arrival order: nobody overtakes one that waits
        for memory, and no newcomer a copy that is under way, or a prompt that waits for memory here.

        Of the batch's slots those count that earlier ones have: sequences that stayed here come without being
        admitted, and might never leave one free.
        """
        reserved = self.mates.reserved_blocks(now)
        is_one_away = False
        for earlier, sequence in enumerate(self.sequences.values()):
            has_come = sequence.has_blocks
            if not has_come and earlier < self.max_batch:
                if sequence.is_swapped:
                    has_come = self._try_swap_in(sequence, reserved, commands)
                elif not is_one_away:
                    has_come = self._try_enter(sequence, reserved, commands)
            if not has_come:
                break
            is_one_away |= sequence.is_swapped

    def _try_enter(
        self, sequence: DecodeSequence, reserved_blocks: int, commands: list[DecodeCommand]
    ) -> bool:
        pool = sequence.pool
        if pool is None:
            pool = self.blocks.pool_for_newcomer(self.held.longest_blocks(sequence))
        if pool is None or not self._has_room(pool, sequence, reserved_blocks):
            return False
        self.blocks.try_allocate(sequence.owner, _as_newcomer(sequence).blocks(0, self.block_size), pool)
        sequence.phase = next_decode_phase(sequence.phase, DecodePhase.PULLING)
        if isinstance(sequence.task, DecodeTask):
            self.pulls.begin(sequence.owner)
        else:
            commands.append(self._inherit(sequence, sequence.task))
        return True

    def _try_swap_in(
        self, sequence: DecodeSequence, reserved_blocks: int, commands: list[DecodeCommand]
    ) -> bool:
        present = [each for each in self.sequences.values() if each.has_blocks]
        swap = self.swapping.try_swap_in(sequence, present, reserved_blocks)
        if swap is None:
            return False
        commands.append(swap)
        return True

    def _has_room(self, pool: int, sequence: DecodeSequence, reserved_blocks: int) -> bool:
        present = [
            Growing(each.tokens, each.coming_tokens)
            for each in self.sequences.values()
            if each.has_blocks and self.moves.pool_of(each) == pool
        ]
        free = self.blocks.free_blocks_in(pool) - (reserved_blocks if present else 0)
        room = Pool(free, self.block_size)
        return can_admit(self.admission, room, _as_newcomer(sequence), present)

    def _inherit(self, sequence: DecodeSequence, task: ResumeTask) -> InheritSequence:
        filled = blocks_for(sequence.position, self.block_size)
        blocks = tuple(self.blocks.block_table(sequence.owner)[:filled])
        return InheritSequence(sequence.owner, task.former, sequence.position, blocks)

    # pools

    def _lose_pool(self, pool: int, commands: list[DecodeCommand]) -> None:
        """Its sequences go back to be continued; what is in the step or in the air when that has ended."""
        self.blocks.lose_pool(pool)
        pulled = [self.sequences[owner] for owner in self.pulls.owners if self.pulls.rests(owner)]
        for sequence in [*self.held.at_rest(), *pulled]:
            if self.blocks.is_lost(sequence.owner):
                if not sequence.is_cancelled:
                    commands.append(failure_of(sequence.request, KV_LOST, can_continue=True))
                self.held.drop(sequence)
        self._send_back_homeless(commands)

    def _send_back_homeless(self, commands: list[DecodeCommand]) -> None:
        """Waiting sequences that none of the pools left can ever hold. Without any pool, all wait for one,
        except those that must have a certain one."""
        for sequence in [each for each in self.sequences.values() if each.phase is DecodePhase.WAITING]:
            room = self.held.room_in(sequence.pool)
            if room < self.held.longest_blocks(sequence) and (room > 0 or sequence.pool is not None):
                commands.append(failure_of(sequence.request, KV_LOST, can_continue=True))
                self.held.drop(sequence)

    # the host tier

    def _end_swap(self, ended: SwapFinished | SwapFailed, commands: list[DecodeCommand]) -> None:
        sequence = self.sequences.get(ended.owner)
        if sequence is None or sequence.phase not in (DecodePhase.SWAPPING_OUT, DecodePhase.SWAPPING_IN):
            raise ValueError(f"{ended.owner} is not being copied")
        if sequence.is_cancelled:
            self.held.drop(sequence)
        elif isinstance(ended, SwapFinished):
            self.swapping.end_copy(sequence, ended.kv_bytes, ended.copy_s)
        else:
            commands.append(failure_of(sequence.request, PREEMPTED, can_continue=True))
            self.held.drop(sequence)

    # moves

    def _start_moves(self, commands: list[DecodeCommand]) -> None:
        """Whoever waits for memory, and not for a slot, comes before what is only faster elsewhere."""
        if not self.moves.can_start:
            return
        entered = [each for each in self.sequences.values() if each.has_blocks]
        may_balance = len(entered) in (len(self.sequences), self.max_batch)
        commands.extend(self.moves.start(entered, self.held.at_rest(), may_balance=may_balance))

    def _end_move(self, owner: BlockOwner, commands: list[DecodeCommand], *, has_arrived: bool) -> None:
        sequence = self.moves.end(owner, has_arrived=has_arrived)
        if sequence.is_cancelled:
            self.held.drop(sequence)
        elif self.blocks.is_lost(owner):
            commands.append(failure_of(sequence.request, KV_LOST, can_continue=True))
            self.held.drop(sequence)

    def _ask_to_leave(self, owner: BlockOwner, wanted: InstanceId, commands: list[DecodeCommand]) -> None:
        """Of one that has ended, or is on some way already, nothing is done."""
        sequence = self.sequences.get(owner)
        if sequence is None or not is_movable(sequence, can_hand_on=True):
            return
        if has_begun(sequence):
            commands.extend(self.departures.ask(sequence, wanted))
            return
        prefill_instance, _ = source_of(sequence.task)
        self.held.drop(sequence)
        commands.append(DeclineOffer(owner, prefill_instance, wanted))

    def _let_leave(self, commands: list[DecodeCommand]) -> None:
        if not self.departures.has_homes:
            return
        for hand_on in self.departures.leave(self.held.at_rest()):
            del self.sequences[hand_on.owner]
            commands.append(hand_on)

    # the pull

    def _ask_portions(self, commands: list[DecodeCommand]) -> None:
        for portion in self.pulls.ask(is_computing=self.batches.is_computing):
            task = self.sequences[portion.owner].task
            assert isinstance(task, DecodeTask)
            blocks = tuple(self.blocks.block_table(portion.owner))
            source = (task.prefill_instance, task.prefill_incarnation)
            commands.append(
                PullSequence(portion.owner, *source, blocks, portion.number, portion.max_bytes, task.sender)
            )

    def _take_portion(
        self, owner: BlockOwner, kv_bytes: int, transfer_s: float, commands: list[DecodeCommand]
    ) -> None:
        sequence = self.held.pulling(owner)
        self.pulls.portion_done(owner, kv_bytes, transfer_s)
        if not self._drop_if_over(sequence, commands) and sequence.is_source_gone:
            self._drop_sourceless(sequence, commands)

    def _start_running(self, pulled: PullFinished, now: float, commands: list[DecodeCommand]) -> None:
        owner, token = pulled.owner, pulled.first_token
        sequence = self.held.pulling(owner)
        if sequence.awaits_first_token and token is None:
            raise ValueError(f"{owner}: the KV came without the first token")
        if isinstance(sequence.task, DecodeTask):
            self.pulls.portion_done(owner, pulled.kv_bytes, pulled.transfer_s)
        if self._drop_if_over(sequence, commands):
            return
        self.pulls.end(owner)
        if sequence.awaits_first_token and token is not None:
            sequence.output_ids.append(token)
        sequence.phase = next_decode_phase(sequence.phase, DecodePhase.RUNNING)
        commands.append(ObserveAdmission(now - sequence.arrived_s))

    def _drop_if_over(self, sequence: DecodeSequence, commands: list[DecodeCommand]) -> bool:
        """Whether it was cancelled, or lost its blocks' pool, while KV was in the air; now none is."""
        if not (sequence.is_cancelled or self.blocks.is_lost(sequence.owner)):
            return False
        if not sequence.is_cancelled:
            commands.append(failure_of(sequence.request, KV_LOST, can_continue=True))
        self.held.drop(sequence)
        return True

    def _give_up_pull(self, failed: PullFailed, commands: list[DecodeCommand]) -> None:
        sequence = self.held.pulling(failed.owner)
        if not sequence.is_cancelled:
            commands.append(
                failure_of(
                    sequence.request, failed.error, can_continue=True, lost_instance=failed.lost_instance
                )
            )
        del self.sequences[failed.owner]
        self.pulls.end(failed.owner)
        if failed.is_drained:
            self.blocks.release(failed.owner)
        else:
            self.blocks.quarantine(failed.owner)

    def _forget_offer(self, withdrawn: OfferWithdrawn) -> None:
        """Who has its KV already, be it on its way to another pool, needs its source no more."""
        sequence = self.sequences.get(withdrawn.owner)
        source = (withdrawn.prefill_instance, withdrawn.prefill_incarnation)
        if sequence is None or source_of(sequence.task) != source:
            return
        if sequence.phase in (DecodePhase.WAITING, DecodePhase.PULLING):
            self.held.discard(sequence)

    def _lose_source(self, gone: PrefillGone, commands: list[DecodeCommand]) -> None:
        """What waits for that life's KV goes back at once, what is in the air when that has ended."""
        life = (gone.prefill_instance, gone.prefill_incarnation)
        for sequence in list(self.sequences.values()):
            if not isinstance(sequence.task, DecodeTask) or source_of(sequence.task) != life:
                continue
            if sequence.phase is DecodePhase.WAITING or self.pulls.rests(sequence.owner):
                self._drop_sourceless(sequence, commands)
            elif sequence.phase is DecodePhase.PULLING:
                sequence.is_source_gone = True

    def _drop_sourceless(self, sequence: DecodeSequence, commands: list[DecodeCommand]) -> None:
        lost_instance, _ = source_of(sequence.task)
        commands.append(
            failure_of(sequence.request, PREFILL_GONE, can_continue=True, lost_instance=lost_instance)
        )
        self.held.drop(sequence)

    # steps

    def _start_steps(self, now: float, commands: list[DecodeCommand]) -> None:
        """Plans the next step of every lane that has none in flight: all its sequences that have room."""
        idle = self.batches.idle_lanes
        if not idle:
            return
        # Those whose prompts were computed here come without being admitted.
        self._give_way(commands)
        ready = self._make_room(commands)[: self.max_batch]
        self.batches.even_out(self.held.running(), ready)
        for lane in idle:
            rows = tuple(
                StepRow(
                    owner=sequence.owner,
                    request=sequence.request,
                    output_ids=sequence.output_ids,
                    position=sequence.position,
                    block_table=self.blocks.block_table(sequence.owner),
                )
                for sequence in ready
                if sequence.lane == lane
            )
            if rows:
                self.batches.begin(lane, rows)
                self.pulls.step_began(lane, now)
                commands.append(RunStep(rows, lane))

    def _give_way(self, commands: list[DecodeCommand]) -> None:
        """On a mixed instance a prompt that lacks memory comes first."""
        if not (self.mates.is_mixed and self.mates.wanted_blocks):
            return
        free = self.blocks.free_blocks + sum(map(self.swapping.coming_blocks, self.blocks.pools))
        resting = self.held.at_rest()
        relief = [len(self.blocks.block_table(each.owner)) for each in resting]
        ages = [each.request.attempt + each.preemptions for each in resting]
        for index in choose_to_give_way(relief, ages, self.mates.wanted_blocks - free):
            self._preempt(resting[index], commands, may_swap=True)

    def _make_room(self, commands: list[DecodeCommand]) -> list[DecodeSequence]:
        """Gives every sequence at rest a block for its next position, preempting where none is left.

        Returns those that have one. A sequence sits a step out only while the missing blocks are held by one
        that is being pulled, moved or swapped, or is in another lane's step, and cannot be preempted before
        that. Where nobody is left to give any up (they may be in quarantine, for how long nobody knows), it
        goes back itself.
        """
        for pool in self.blocks.pools:
            resting = [each for each in self.held.at_rest() if self.blocks.pool_of(each.owner) == pool]
            missing = sum(map(self.held.lacks_block, resting)) - self.blocks.free_blocks_in(pool)
            missing -= self.swapping.coming_blocks(pool)
            if missing <= 0:
                continue
            # A victim gives its blocks back, and needs none for its own next position any more.
            relief = [
                len(self.blocks.block_table(sequence.owner)) + self.held.lacks_block(sequence)
                for sequence in resting
            ]
            for index in choose_victims(relief, missing):
                self._preempt(resting[index], commands, may_swap=True)
            if self.held.is_stuck(resting[0]):
                self._preempt(resting[0], commands, may_swap=False)
        return [
            sequence
            for sequence in self.held.at_rest()
            if not self.held.lacks_block(sequence) or self.blocks.try_allocate(sequence.owner, 1)
        ]

    def _preempt(self, sequence: DecodeSequence, commands: list[DecodeCommand], *, may_swap: bool) -> None:
        """To the host tier and back, or to be computed again, whichever is cheaper."""
        self._preempted += 1
        sequence.preemptions += 1
        pull_rate = self.pulls.budget.bytes_per_s
        swap = self.swapping.try_swap_out(sequence, pull_rate) if may_swap else None
        if swap is not None:
            commands.append(swap)
            return
        commands.append(failure_of(sequence.request, PREEMPTED, can_continue=True))
        self.held.drop(sequence)

    def _finish_step(
        self, lane: int, tokens: tuple[SampledToken | None, ...], commands: list[DecodeCommand]
    ) -> None:
        events: dict[GatewayId, list[TokenEvent]] = {}
        for row, token in zip(self.batches.end(lane, len(tokens)), tokens, strict=True):
            sequence = self.sequences[row.owner]
            if sequence.is_cancelled:
                self.held.drop(sequence)
                continue
            if token is None or self.blocks.is_lost(row.owner):
                commands.append(failure_of(sequence.request, KV_LOST, can_continue=True))
                self.held.drop(sequence)
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
        commands.extend(PublishTokens(gateway_id, tuple(batch)) for gateway_id, batch in events.items())

    def _fail_step(self, failed: StepFailed, commands: list[DecodeCommand]) -> None:
        for row in self.batches.end(failed.lane, None):
            sequence = self.sequences[row.owner]
            if not sequence.is_cancelled:
                commands.append(failure_of(sequence.request, failed.error, can_continue=failed.can_continue))
            self.held.drop(sequence)

    # endings

    def _cancel(self, request_id: RequestId, attempt: int) -> None:
        self._ended.note(request_id, attempt)
        self.held.discard_all(
            lambda sequence: sequence.request.request_id == request_id and sequence.request.attempt <= attempt
        )

    def _send_back(self, matches: Callable[[DecodeSequence], bool], commands: list[DecodeCommand]) -> None:
        for sequence in [sequence for sequence in self.sequences.values() if matches(sequence)]:
            if not sequence.is_cancelled:
                error = ErrorReply(NoInstanceReady.code, f"instance {self.instance_id} is draining")
                commands.append(failure_of(sequence.request, error, can_continue=True))
            self.held.discard(sequence)


def _as_newcomer(sequence: DecodeSequence) -> Growing:
    return Growing(sequence.tokens + sequence.awaits_first_token, sequence.coming_tokens)
