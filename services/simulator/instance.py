"""One life of an instance in virtual time: the live rooms over one pool of blocks, as
``services.hosts.instance`` puts them together, with a modelled engine and modelled links."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from common.ids import InstanceId
from common.kv.blocks import BlockAllocator, BlockOwner
from common.kv.link_watch import LinkWatch
from common.messages import (
    CancelRequest,
    DecodeTask,
    InstanceGone,
    InstanceLife,
    InstanceRecord,
    KVDestination,
    LeaveSequence,
    LengthPredicted,
    LoadReport,
    OfferDeclined,
    OfferWithdrawn,
    Phase,
    PrefillTask,
    PullKV,
    Role,
    has_phase,
)
from common.performance import PromptTime
from decode import events as decode_events
from decode.sequence import ROOM as DECODE_ROOM
from decode.state import DecodeState
from prefill import events as prefill_events
from prefill.sequence import ROOM as PREFILL_ROOM
from prefill.state import PrefillState
from services.hosts.load_report import Asked, make_load_report
from services.hosts.measured_speed import MeasuredSpeed
from services.simulator.attention_cost import PoolRows
from services.simulator.attention_workers import KVPools, RemoteUse
from services.simulator.decode_room import DecodeRoom
from services.simulator.engine import EnginePass, EngineSettings, SimulatedEngine
from services.simulator.mesh import OWN_POOL, Engine, Mesh, PullAnswer
from services.simulator.pipelined import PipelinedEngine
from services.simulator.prefill_room import PrefillRoom
from services.simulator.seat import Seat


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an instance is built into. ``speed``: what it tells of its own chunks and steps;
    ``host_bytes_per_s``: to its host's memory; ``tpot_s``: promised to a class of service; ``is_exact``:
    every sequence draws as many tokens as it may; ``asked``: of its load reports. ``remote``: where its KV
    lies, if not with it; ``note_pass``: who is told of every pass."""

    mesh: Mesh
    engine: EngineSettings
    speed: MeasuredSpeed
    host_bytes_per_s: float
    tpot_s: Callable[[str], float]
    is_exact: bool
    asked: Asked
    remote: RemoteUse | None = None
    note_pass: Callable[[EnginePass], None] | None = None


@dataclass(slots=True, eq=False)
class SimulatedInstance:
    """``note_change`` asks for a load report, ``publish_load`` for one at once. ``most_used_blocks``: at
    once, since the start. ``_prompt_counts`` and ``_decode_counts``: of the report that was asked for last;
    a life's first event asks for one, too. ``seat``: on the host that all run on, if they do."""

    record: InstanceRecord
    role: Role
    prefill_state: PrefillState
    decode_state: DecodeState
    around: Surroundings
    note_change: Callable[[], None]
    publish_load: Callable[[], None]
    began_s: float = 0.0
    ended_s: float | None = None
    seat: Seat | None = field(init=False)
    engine: Engine = field(init=False)
    pools: KVPools | None = field(init=False, default=None)
    prefill: PrefillRoom = field(init=False)
    decode: DecodeRoom = field(init=False)
    home: Role = field(init=False)
    is_alive: bool = True
    is_draining: bool = False
    has_died: bool = False
    most_used_blocks: int = 0
    reports: int = 0
    _free_blocks: int = 0
    _prompt_counts: tuple[int, ...] = ()
    _decode_counts: tuple[int, ...] = ()
    _speed: MeasuredSpeed = field(init=False)

    def __post_init__(self) -> None:
        around, prefill, decode = self.around, self.prefill_state, self.decode_state
        self.home, self._speed = self.role, around.speed
        self._free_blocks = self.blocks.free_blocks
        network = around.mesh.network
        self.seat = None if network.host is None else Seat(network.host)
        note_pass = self._note_pass if network.timeline or around.note_pass else None
        layers, shares = prefill.layout.layers, around.engine.stage_shares
        if around.remote is not None:
            self.pools = around.remote.pools_for(self.life, decode, self._handle_pool)
            destinations = self.pools.destinations
            self.engine = around.remote.engine_for(self, self.pools, around.engine, note_pass)
        else:
            own = KVDestination(OWN_POOL, 0, prefill.layout.kv_heads, self.blocks.total_blocks)
            destinations = {0: (own,)}
            if len(shares) > 1:
                self.engine = PipelinedEngine(network.clock, self, around.engine, layers, shares, note_pass)
            else:
                settings, seat = around.engine, self.seat
                self.engine = SimulatedEngine(
                    network.clock, self, settings, layers, prefill.mates, note_pass, seat
                )
        prompt_time = _prompt_time(around.speed, prefill.chunk_tokens)
        links = LinkWatch(self.instance_id, network.links.suspect_after_s, around.mesh.tell_scheduler)
        self.prefill = PrefillRoom(
            prefill, around.mesh, self.engine, links, prompt_time, self._keep_here, self._note_prefill
        )
        self.decode = DecodeRoom(
            decode,
            around.mesh,
            self.engine,
            links,
            prefill.layout,
            around.host_bytes_per_s,
            around.is_exact,
            self._hand_on,
            self._note_decode,
            destinations,
        )

    def _note_pass(self, done: EnginePass) -> None:
        timeline, note = self.around.mesh.network.timeline, self.around.note_pass
        if timeline is not None:
            timeline.add_pass(self.instance_id, done)
        if note is not None:
            note(done)

    @property
    def blocks(self) -> BlockAllocator:
        return self.prefill_state.blocks

    @property
    def life(self) -> InstanceLife:
        return InstanceLife(self.record.instance_id, self.record.incarnation)

    @property
    def instance_id(self) -> InstanceId:
        return self.record.instance_id

    @property
    def is_idle(self) -> bool:
        prefill, decode = self.prefill_state, self.decode_state
        return not (prefill.sequences or decode.sequences) and prefill.is_idle and decode.is_idle

    def load(self) -> LoadReport:
        """Steps that run on are counted as far as they have come, and go on."""
        untold_steps = self.engine.untold_steps()
        if self.prefill_state.mates.stuck_since_s is not None:
            self.prefill.handle(prefill_events.TimePassed())
        self.reports += 1
        return make_load_report(
            self.prefill_state,
            self.decode_state,
            self._measured_speed(),
            sequence=self.reports,
            role=self.role,
            home=self.home,
            can_hand_on=self.pools is None,
            tpot_s=self.around.tpot_s,
            now=self.around.mesh.network.clock.now,
            asked=self.around.asked,
            untold_steps=untold_steps,
        )

    def _measured_speed(self) -> MeasuredSpeed:
        known, step_s = self._speed, self.decode.drawing.step_s
        if known.decode_step_s != step_s:
            known = self._speed = msgspec.structs.replace(known, decode_step_s=step_s)
        return known

    # what others tell and ask

    def take_prompt(self, task: PrefillTask) -> None:
        """Raises as the state does."""
        self.prefill.handle(prefill_events.TaskArrived(task))
        if self.seat is not None:
            self.seat.take_prompt()

    def take_sequence(self, task: DecodeTask) -> None:
        """Raises as the state does."""
        self.decode.handle(decode_events.TaskArrived(task))
        if self.seat is not None:
            self.seat.take_sequence()

    def take_pull(self, pull: PullKV, answer: PullAnswer) -> None:
        self.prefill.take_pull(pull, answer)

    def take_word(self, word: msgspec.Struct) -> None:
        """What is told to everyone, or to this instance."""
        prefill, decode = self.prefill, self.decode
        match word:
            case CancelRequest(request_id, attempt):
                prefill.handle(prefill_events.CancelArrived(request_id, attempt))
                decode.handle(decode_events.CancelArrived(request_id, attempt))
            case OfferDeclined(request_id, attempt, decode_instance, wanted):
                owner = BlockOwner(PREFILL_ROOM, request_id, attempt)
                prefill.handle(prefill_events.OfferDeclined(owner, decode_instance, wanted))
            case OfferWithdrawn(request_id, attempt, prefill_instance, incarnation):
                owner = BlockOwner(DECODE_ROOM, request_id, attempt)
                decode.handle(decode_events.OfferWithdrawn(owner, prefill_instance, incarnation))
            case LeaveSequence(request_id, attempt, wanted):
                owner = BlockOwner(DECODE_ROOM, request_id, attempt)
                decode.handle(decode_events.LeaveAsked(owner, wanted))
            case LengthPredicted(request_id, attempt, lengths):
                owner = BlockOwner(DECODE_ROOM, request_id, attempt)
                decode.handle(decode_events.LengthPredicted(owner, lengths))
            case InstanceGone(instance_id, incarnation):
                prefill.handle(prefill_events.DecodeInstanceGone(instance_id, incarnation))
                decode.handle(decode_events.PrefillGone(instance_id, incarnation))
                decode.give_up(word)

    def flip(self, role: Role, *, keeps_home: bool = False) -> bool:
        """Has that role from now on, unless it is about to end, or has no memory for prompts. Whether it had
        another one."""
        home = self.home if keeps_home else role
        if self.pools is not None or self.is_draining or (role, home) == (self.role, self.home):
            return False
        is_other = role != self.role
        if is_other:
            self.decode_state.mates.is_mixed = role == "mixed"
            self.prefill.handle(prefill_events.RoleChanged(has_phase(role, "prefill")))
            self.decode.handle(decode_events.RoleChanged(has_phase(role, "decode")))
        self.role, self.home = role, home
        self.publish_load()
        return is_other

    def change_speed(self, engine: EngineSettings, speed: MeasuredSpeed) -> None:
        """Of the passes that begin from now on. It tells of it as if it had learned it already."""
        self.around, self._speed = replace(self.around, speed=speed), speed
        self.prefill.prompt_time = _prompt_time(speed, self.prefill_state.chunk_tokens)
        self.engine.change_settings(engine)

    def drain(self, timeout_s: float, ended: Callable[[], None]) -> None:
        """Both rooms finish or give back what they hold; then ``ended`` is called, unless it dies."""
        clock, tell_change = self.around.mesh.network.clock, self.note_change
        self.is_draining = True

        def note_change() -> None:
            tell_change()
            clock.soon(look)

        def look() -> None:
            if self.is_idle:
                end()

        def expire() -> None:
            if not self.prefill_state.is_idle:
                self.prefill.handle(prefill_events.DrainExpired())
            if not self.decode_state.is_idle:
                self.decode.handle(decode_events.DrainExpired())
            end()

        def end() -> None:
            clock.cancel(timer)
            if self.is_alive:
                ended()

        timer = clock.after(timeout_s, lambda: expire() if self.is_alive else None)
        self.note_change = note_change
        self.prefill.handle(prefill_events.DrainStarted())
        self.decode.handle(decode_events.DrainStarted())
        note_change()

    def end(self) -> None:
        """Nothing is computed, sent or told any more. What had been computed had been told."""
        self.engine.catch_up()
        self.is_alive = self.prefill.is_alive = False
        self.decode.end()
        self.engine.die()
        if self.seat is not None:
            self.seat.leave()
        if self.pools is not None:
            self.pools.end(is_lost=self.has_died)

    # between the rooms

    def _keep_here(self, command: prefill_events.KeepHere) -> None:
        self.decode.take_stayed(decode_events.SequenceStayed(command.held_by, command.task))
        if self.seat is not None:
            self.seat.take_sequence()

    def _hand_on(self, command: decode_events.HandOn) -> None:
        home = command.home
        left = prefill_events.SequenceLeft(
            command.held_by, command.request, home.decode_instance, home.decode_incarnation, command.lengths
        )
        self.prefill.handle(left)

    def _note_prefill(self) -> None:
        """A report is wanted where it would count anything else now; so below."""
        prefill = self.prefill_state
        if self._has_freed(prefill.blocks) and self.decode_state.sequences:
            self.around.mesh.network.clock.soon(self._tell_decode)
        counts = len(prefill.sequences), prefill.prompts.count, self.prefill.chunk_tokens
        if counts != self._prompt_counts:
            self._prompt_counts = counts
            self.note_change()

    def _note_decode(self) -> None:
        """That steps go on the next report says."""
        prefill, sequences = self.prefill_state, self.decode_state.sequences
        if self._has_freed(prefill.blocks) and prefill.prompts.count:
            self.around.mesh.network.clock.soon(self._tell_prefill)
        counts = len(sequences), sequences.in_batch
        if counts != self._decode_counts:
            self._decode_counts = counts
            self.note_change()

    def _has_freed(self, blocks: BlockAllocator) -> bool:
        """Blocks, for which the other room may wait (``services.hosts.shared_blocks``)."""
        before, free = self._free_blocks, blocks.free_blocks
        if free == before:
            return False
        self._free_blocks = free
        self._note_used()
        return free > before

    def _note_used(self, more_blocks: int = 0) -> None:
        """``more_blocks``: that steps took of which the state has not been told."""
        blocks = self.blocks
        used = blocks.total_blocks - blocks.free_blocks + more_blocks
        if used > self.most_used_blocks:
            self.most_used_blocks = used

    def _tell_decode(self) -> None:
        if self.is_alive and self.decode_state.sequences:
            self.decode.handle(decode_events.BlocksFreed())

    def _tell_prefill(self) -> None:
        if self.is_alive and self.prefill_state.pending_requests:
            self.prefill.handle(prefill_events.BlocksFreed())

    def _handle_pool(self, event: decode_events.DecodeEvent) -> None:
        self.decode.handle(event)

    # the engine's (``engine.Rooms``, ``pipelined.StagedRooms``, ``attention_engine.Lanes``)

    def choose_work(self, phase: Phase, now: float) -> None:
        if phase == "prefill":
            self.prefill.choose_work(now)
        else:
            self.decode.choose_work(now)

    def lane_rows(self, lane: int) -> tuple[PoolRows, ...]:
        return self.decode.rows_by_pool(lane)

    def decode_shape(self, lane: int = 0) -> tuple[int, int]:
        return self.decode.shape(lane)

    def steps_ahead(self, lane: int = 0) -> int:
        return self.decode.steps_ahead(lane)

    def has_ample_blocks(self, steps: int) -> bool:
        return self.decode_state.has_ample_blocks(steps)

    def end_steps(self, steps: int, first_end_s: float, ended_s: float, last_s: float, lane: int = 0) -> None:
        if steps > 1:
            self._note_used(self.decode_state.blocks_taken(steps - 1, lane))
        self.decode.end_steps(steps, first_end_s, ended_s, last_s, lane)

    def count_steps(
        self, steps: int, first_end_s: float, ended_s: float, last_s: float, lane: int, slowest_s: float
    ) -> None:
        self.decode.count_steps(steps, first_end_s, ended_s, last_s, lane, slowest_s)

    def tell_steps(self, steps: int, ended_s: float, lane: int) -> None:
        if steps > 1:
            self._note_used(self.decode_state.blocks_taken(steps - 1, lane))
        self.decode.tell_steps(steps, ended_s, lane)

    def advance_chunk(self) -> None:
        self.prefill.advance_chunk()

    def end_chunk(self, slices: Sequence[prefill_events.ChunkSlice]) -> None:
        self.prefill.end_chunk(slices)

    def end_layers(self, layers: int) -> None:
        self.prefill.end_layers(layers)

    def wants_layers(self) -> bool:
        return self.prefill.wants_layers()


def _prompt_time(speed: MeasuredSpeed, chunk_tokens: int) -> PromptTime | None:
    return None if speed.chunk_time is None else PromptTime(speed.chunk_time, chunk_tokens)
