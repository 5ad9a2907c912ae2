"""One scheduler, one gateway and some instances over one virtual bus, and what may befall them."""

import math
import random
from dataclasses import dataclass, field, replace

import msgspec

from common.ids import Incarnation, InstanceId
from common.kv.blocks import BlockAllocator
from common.kv.link_watch import LinkWatch
from common.messages import (
    InstanceLife,
    InstanceRecord,
    Role,
    ServiceRecord,
    has_phase,
)
from common.room_mates import RoomMates
from decode.pulls import Pulls
from decode.state import DecodeState
from prefill.events import TimePassed
from prefill.prompts import PromptQueue
from prefill.state import PrefillState
from scheduler.policy.mixed_batching import PassChoice
from scheduler.policy.prefill_batching import fill_batch_of
from scheduler.policy.pull_budget import PullBudget
from scheduler.policy.roles import RoleChange, role_policy
from tests.requests import GATEWAY
from tests.virtual.bus import Bus
from tests.virtual.decode import LAYOUT, KeptKV, VirtualDecode
from tests.virtual.engine import VirtualEngine
from tests.virtual.gateway import VirtualGateway
from tests.virtual.instance import VirtualInstance
from tests.virtual.memory import Memory
from tests.virtual.outputs import EOS_TOKEN_IDS, PREDICTORS, RUNNER
from tests.virtual.prefill import VirtualPrefill
from tests.virtual.scheduler import SCHEDULER, VirtualScheduler, VirtualStore
from tests.virtual.shape import LEASE_S, MeshShape, roles_of, state_of

REPORT_S = 0.25
DRAIN_S = 1.0
MIXED_MAX_WAIT_S = 0.2


@dataclass(slots=True)
class VirtualMesh:
    shape: MeshShape
    bus: Bus
    gateway: VirtualGateway
    store: VirtualStore = field(default_factory=VirtualStore)
    schedulers: list[VirtualScheduler] = field(default_factory=list)
    kept: KeptKV = field(default_factory=KeptKV)
    instances: dict[InstanceId, VirtualInstance] = field(default_factory=dict)
    cut: set[InstanceId] = field(default_factory=set)
    silent_until_s: dict[InstanceId, float] = field(default_factory=dict)
    lives: int = 0
    preempted: int = 0

    def start(self) -> None:
        self.bus.nodes[GATEWAY] = self.gateway
        self.store.gateway = ServiceRecord(
            service_id=GATEWAY, incarnation=Incarnation("g"), kind="gateway", host="h", pid=1, http_url=""
        )
        for number in range(self.shape.prefills):
            self.join(InstanceId(f"prefill-{number}"))
        for number in range(self.shape.decodes):
            self.join(InstanceId(f"decode-{number}"))
        for number in range(self.shape.mixed):
            self.join(InstanceId(f"mixed-{number}"))
        names = [f"{SCHEDULER}-{number}" for number in range(self.shape.schedulers)]
        self.bus.hearing[SCHEDULER], self.bus.serving[SCHEDULER] = names, list(names)
        self.schedulers = [self._scheduler(name) for name in names]
        for scheduler in self.schedulers:
            self.bus.nodes[scheduler.name] = scheduler
            scheduler.beat()

    def _scheduler(self, name: str) -> VirtualScheduler:
        self.lives += 1
        state = state_of(self.shape, Incarnation(f"life-{self.lives}"))
        roles = role_policy(roles_of(self.shape))
        predict = PREDICTORS[self.shape.predictor]
        return VirtualScheduler(name, state, self.bus, self.store, roles, self._follow, predict)

    def _follow(self, change: RoleChange) -> None:
        self.flip(change.instance_id, change.role, keeps_home=change.keeps_home)

    def join(self, instance_id: InstanceId) -> None:
        """A new life of an instance; its record replaces that of the last one."""
        self.lives += 1
        incarnation = Incarnation(f"life-{self.lives}")
        role = first_role(instance_id)
        node = self._instance(instance_id, incarnation, role)
        self.instances[instance_id] = node
        self.bus.nodes[instance_id] = node
        self.store.lives.append(InstanceLife(instance_id, incarnation))
        self.store.records[instance_id] = InstanceRecord(
            instance_id=instance_id,
            incarnation=incarnation,
            role=role,
            model="m",
            host="h",
            pid=1,
            http_url="",
            block_size=self.shape.block_size,
            total_blocks=node.blocks.total_blocks,
            largest_pool_blocks=node.blocks.largest_pool_blocks,
            context_length=8192,
            dtype="fp32",
        )
        self._report(node)

    def kill(self, instance_id: InstanceId, away_s: float | None) -> None:
        """Ends a life without a word; after ``away_s`` the next one begins, or never."""
        node = self.instances.pop(instance_id, None)
        if node is None:
            return
        node.die()
        del self.bus.nodes[instance_id]
        record = self.store.records[instance_id]
        clock = self.bus.clock

        def forget() -> None:
            if self.store.records.get(instance_id) is record:
                del self.store.records[instance_id]

        clock.after(LEASE_S, forget)
        if away_s is not None:
            clock.after(away_s, lambda: self.join(instance_id))

    def kill_scheduler(self, away_s: float) -> None:
        """The first one. Where there is no other, who asks meanwhile hears that nobody is there; who had
        asked hears nothing. The next one knows what the store holds and what is reported."""
        name = self.schedulers[0].name
        if self.bus.nodes.pop(name, None) is None:
            return
        if name in self.bus.serving[SCHEDULER]:
            self.bus.serving[SCHEDULER].remove(name)
        successor = self.schedulers[0] = self._scheduler(name)

        def join() -> None:
            self.bus.nodes[name] = successor
            successor.start()

        self.bus.clock.after(away_s, join)

    def cut_scheduler_off(self, name: str, duration_s: float) -> None:
        """It works on, and neither hears nor is heard; then it is told that it was away."""
        cut_off = self.bus.cut_off
        if name in cut_off:
            return
        cut_off.add(name)

        def reconnect() -> None:
            cut_off.discard(name)
            node = self.bus.nodes.get(name)
            if isinstance(node, VirtualScheduler):
                node.reconnect()

        self.bus.clock.after(duration_s, reconnect)

    def kill_gateway(self) -> None:
        """For good, and its clients' streams with it. Its record is there until its lease is over."""
        del self.bus.nodes[GATEWAY]
        self.bus.clock.after(LEASE_S, lambda: self.lose_gateway_record(math.inf))

    def lose_gateway_record(self, away_s: float) -> None:
        """The gateway lives, but for so long the store does not say so."""
        record, self.store.gateway = self.store.gateway, None

        def restore() -> None:
            self.store.gateway = record

        if record is not None:
            self.bus.clock.after(away_s, restore)

    def drain(self, instance_id: InstanceId, away_s: float) -> None:
        node = self.instances.get(instance_id)
        if node is None or node.is_draining:
            return
        node.drain(DRAIN_S)

        def leave() -> None:
            if self.instances.get(instance_id) is node:
                self.kill(instance_id, away_s)

        self.bus.clock.after(2 * DRAIN_S, leave)

    def flip(self, instance_id: InstanceId, role: Role, *, keeps_home: bool = False) -> None:
        """Another role for an instance that is there and stays; the store and the scheduler hear of it."""
        node = self.instances.get(instance_id)
        if node is None or node.is_draining:
            return
        node.flip(role, keeps_home=keeps_home)
        record = self.store.records[instance_id]
        self.store.records[instance_id] = msgspec.structs.replace(record, role=role)
        self.bus.publish(instance_id, SCHEDULER, node.load())

    def restore_roles(self) -> None:
        for instance_id in self.instances:
            self.flip(instance_id, first_role(instance_id))

    def silence(self, instance_id: InstanceId, duration_s: float) -> None:
        """Its reports stay away though it works."""
        self.silent_until_s[instance_id] = self.bus.clock.now + duration_s

    def cut_link(self, instance_id: InstanceId, duration_s: float) -> None:
        """No KV gets from it or to it, though messages do."""
        if instance_id not in self.cut:
            self.cut.add(instance_id)
            self.bus.clock.after(duration_s, lambda: self.cut.discard(instance_id))

    def check_empty(self) -> None:
        """Nobody holds anything any more."""
        for scheduler in self.schedulers:
            assert not scheduler.state.requests, f"{scheduler.name} keeps a booking"
        for instance_id, node in self.instances.items():
            blocks = node.blocks
            kept = [*node.prefill.state.sequences, *node.decode.state.sequences]
            assert node.is_idle, f"{instance_id} keeps {kept}"
            assert blocks.free_blocks == blocks.total_blocks, f"{instance_id} keeps blocks"
            assert node.decode.state.swapping.host.used_blocks == 0, f"{instance_id} keeps host blocks"

    def _report(self, node: VirtualInstance) -> None:
        instance_id = node.prefill.state.instance_id
        if self.instances.get(instance_id) is not node:
            return
        node.prefill.handle(TimePassed())
        clock = self.bus.clock
        if clock.now >= self.silent_until_s.get(instance_id, 0.0):
            self.bus.publish(instance_id, SCHEDULER, node.load())
        clock.after(REPORT_S, lambda: self._report(node))

    def _instance(self, instance_id: InstanceId, incarnation: Incarnation, role: Role) -> VirtualInstance:
        shape = self.shape
        blocks = BlockAllocator(shape.prefill_blocks if role == "prefill" else shape.decode_blocks)
        mates = RoomMates(shape.mixed_policy, is_mixed=role == "mixed")
        choice = PassChoice(shape.mixed_policy, shape.chunk_tokens, MIXED_MAX_WAIT_S)
        engine = VirtualEngine(self.bus.clock, mates, choice)
        memory, host_memory = Memory(shape.block_size), Memory(shape.block_size)
        prefill = PrefillState(
            instance_id=instance_id,
            incarnation=incarnation,
            blocks=blocks,
            layout=replace(LAYOUT, block_size=shape.block_size),
            eos_token_ids=EOS_TOKEN_IDS,
            chunk_tokens=shape.chunk_tokens,
            prompts=PromptQueue(shape.order, window_size=3),
            max_waiting_requests=shape.max_waiting_requests,
            layerwise_min_tokens=shape.layerwise_min_tokens,
            fill_batch=fill_batch_of(shape.batching, shape.order),
            is_admitting=has_phase(role, "prefill"),
            mates=mates,
        )
        decode = DecodeState(
            instance_id=instance_id,
            blocks=blocks,
            block_size=shape.block_size,
            eos_token_ids=EOS_TOKEN_IDS,
            max_batch=shape.max_batch,
            max_waiting_requests=shape.max_waiting_requests,
            admission=shape.decode_admission,
            is_admitting=has_phase(role, "decode"),
            mates=mates,
            pulls=Pulls(PullBudget(least_bytes=shape.least_portion_bytes), shape.transfer_mode == "push"),
            host_blocks=shape.host_blocks,
        )
        links = LinkWatch(instance_id, math.inf, lambda word: self.bus.publish(instance_id, SCHEDULER, word))
        kept = self.kept if shape.keeps_kv else KeptKV()
        failures = shape.send_failures
        return VirtualInstance(
            role,
            VirtualPrefill(prefill, RUNNER, self.bus, memory, links, engine, self.cut, failures),
            VirtualDecode(
                decode, incarnation, RUNNER, self.bus, links, engine, memory, host_memory, kept, failures
            ),
            self.bus,
            shape.is_learned,
        )


def first_role(instance_id: InstanceId) -> Role:
    match instance_id.partition("-")[0]:
        case "prefill":
            return "prefill"
        case "decode":
            return "decode"
        case _:
            return "mixed"


def make_mesh(shape: MeshShape, seed: int) -> VirtualMesh:
    bus = Bus(random.Random(seed))
    mesh = VirtualMesh(shape, bus, VirtualGateway(bus))
    mesh.start()
    return mesh
