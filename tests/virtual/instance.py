"""One life of an instance in virtual time: both rooms over one pool, as ``services.hosts.instance`` has them.

What one room frees the other may wait for, and a sequence that leaves the decode room leaves by the other.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from common.config import ObjectivesConfig
from common.kv.blocks import BlockAllocator
from common.messages import DecodeTask, LoadReport, Phase, ResumeTask, Role, has_phase
from common.performance import FittedTime
from decode import events as decode_events
from prefill.events import BlocksFreed, KeepHere, PassDue, RoleChanged, SequenceLeft
from services.hosts.load_report import Asked, make_load_report
from services.hosts.measured_speed import MeasuredSpeed
from tests.virtual.bus import Bus, Reply
from tests.virtual.decode import VirtualDecode
from tests.virtual.engine import VirtualEngine
from tests.virtual.memory import Memory
from tests.virtual.prefill import VirtualPrefill

UNLEARNED = MeasuredSpeed(prefill_tokens_per_s=1000.0)
LEARNED = msgspec.structs.replace(
    UNLEARNED,
    chunk_time=FittedTime((5.0, 0.0, 0.05), 0.05, 99),
    step_time=FittedTime((1.0, 0.01, 0.05), 0.05, 99),
)


@dataclass(slots=True, eq=False)
class VirtualInstance:
    """``is_learned``: it tells how long its chunks and steps take. ``kept``: sequences that were decoded
    where they were prefilled."""

    role: Role
    prefill: VirtualPrefill
    decode: VirtualDecode
    bus: Bus
    is_learned: bool = False
    home: Role = field(init=False)
    reports_sent: int = 0
    kept: int = 0
    _free_blocks: int = 0
    _is_draining: bool = False
    _is_alive: bool = True

    def __post_init__(self) -> None:
        self.home = self.role
        self._free_blocks = self.blocks.free_blocks
        self.prefill.on_change = lambda: self._share(self._tell_decode)
        self.decode.on_change = lambda: self._share(self._tell_prefill)
        self.decode.hand_on = self._hand_on
        self.prefill.keep_here = self._keep_here
        self.engine.ask_room = self._choose_work

    @property
    def engine(self) -> VirtualEngine:
        return self.prefill.engine

    @property
    def memory(self) -> Memory:
        return self.prefill.memory

    @property
    def blocks(self) -> BlockAllocator:
        return self.prefill.state.blocks

    @property
    def is_idle(self) -> bool:
        return self.prefill.state.is_idle and self.decode.state.is_idle

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def hear(self, message: msgspec.Struct) -> None:
        self.prefill.hear(message)
        self.decode.hear(message)

    def serve(self, message: msgspec.Struct, reply: Callable[[Reply], None]) -> None:
        if isinstance(message, DecodeTask | ResumeTask):
            self.decode.serve(message, reply)
        else:
            self.prefill.serve(message, reply)

    def flip(self, role: Role, *, keeps_home: bool = False) -> None:
        """Has that role from now on, unless it is about to end."""
        if self._is_draining or role == self.role:
            return
        self.role, self.home = role, self.home if keeps_home else role
        self.decode.state.mates.is_mixed = role == "mixed"
        self.prefill.handle(RoleChanged(has_phase(role, "prefill")))
        self.decode.handle(decode_events.RoleChanged(has_phase(role, "decode")))

    def drain(self, timeout_s: float) -> None:
        self._is_draining = True
        self.prefill.drain(timeout_s)
        self.decode.drain(timeout_s)

    def die(self) -> None:
        self._is_alive = False
        self.engine.die()
        self.prefill.die()
        self.decode.die()

    def load(self) -> LoadReport:
        self.reports_sent += 1
        return make_load_report(
            self.prefill.state,
            self.decode.state,
            LEARNED if self.is_learned else UNLEARNED,
            sequence=self.reports_sent,
            role=self.role,
            home=self.home,
            can_hand_on=True,
            tpot_s=lambda service_class: ObjectivesConfig().tpot_s,
            now=self.bus.clock.now,
            asked=Asked(has_needs=True, has_spare=True),
        )

    def _hand_on(self, command: decode_events.HandOn) -> None:
        home = command.home
        left = SequenceLeft(
            command.held_by, command.request, home.decode_instance, home.decode_incarnation, command.lengths
        )
        self.prefill.handle(left)

    def _keep_here(self, command: KeepHere) -> None:
        self.kept += 1
        self.decode.handle(decode_events.SequenceStayed(command.held_by, command.task))

    def _choose_work(self, phase: Phase) -> None:
        if phase == "prefill":
            self.prefill.handle(PassDue())
        else:
            self.decode.handle(decode_events.PassDue())

    def _share(self, tell_other: Callable[[], None]) -> None:
        before, self._free_blocks = self._free_blocks, self.blocks.free_blocks
        if self._free_blocks > before:
            self.bus.clock.after(0.0, lambda: tell_other() if self._is_alive else None)

    def _tell_prefill(self) -> None:
        if self.prefill.state.pending_requests:
            self.prefill.handle(BlocksFreed())

    def _tell_decode(self) -> None:
        if self.decode.state.sequences:
            self.decode.handle(decode_events.BlocksFreed())
