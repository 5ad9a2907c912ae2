"""One scheduler, one gateway and some instances over one virtual bus, and what may befall them."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from common.config import (
    DecodeAdmission,
    EmulationConfig,
    MixedPolicy,
    PrefillBatching,
    PrefillOrder,
    PrefillPolicy,
    SchedulerConfig,
)
from common.emulation import EmulatedRunner
from common.ids import Incarnation, InstanceId, RequestId
from common.kv.blocks import BlockAllocator
from common.lengths import LengthDistribution, certain
from common.messages import (
    GenerationRequest,
    InstanceLife,
    InstanceRecord,
    Role,
    SamplingParams,
    ServiceRecord,
    has_phase,
)
from common.room_mates import RoomMates
from common.sequences import finish_reason_of
from common.steps import Draw, SequenceStep
from decode.pulls import Pulls
from decode.state import DecodeState
from prefill.events import TimePassed
from prefill.prompts import PromptQueue
from prefill.state import PrefillState
from scheduler.policy.prefill_batching import fill_batch_of
from scheduler.policy.pull_budget import PullBudget
from scheduler.state import MOST_WAITING, SchedulerState
from scheduler.waiting_room import WaitingRoom
from tests.requests import GATEWAY
from tests.virtual.bus import Bus, Timeline
from tests.virtual.decode import LAYOUT, KeptKV, VirtualDecode
from tests.virtual.gateway import VirtualGateway
from tests.virtual.instance import VirtualInstance
from tests.virtual.memory import Memory
from tests.virtual.prefill import VirtualPrefill
from tests.virtual.scheduler import SCHEDULER, VirtualScheduler

LEASE_S = 3.0
REPORT_S = 0.25
DRAIN_S = 1.0
EOS_TOKEN_IDS = (3,)
RUNNER = EmulatedRunner(EmulationConfig(vocab_size=61), wait=lambda _: None)


@dataclass(frozen=True, slots=True)
class MeshShape:
    prefills: int = 1
    decodes: int = 1
    mixed: int = 0
    mixed_policy: MixedPolicy = "chunked"
    block_size: int = 4
    prefill_blocks: int = 16
    decode_blocks: int = 16
    chunk_tokens: int = 8
    order: PrefillOrder = "fcfs"
    policy: PrefillPolicy = "shortest_queue"
    batching: PrefillBatching = "chunks"
    max_batch: int = 8
    max_waiting_requests: int = 4
    max_pending_prefill_tokens: int = 60
    max_requests_per_decode: int = 6
    send_failures: float = 0.0
    layerwise_min_tokens: int = 1000
    least_portion_bytes: int = 10
    host_blocks: int = 0
    keeps_kv: bool = False
    """Whether decode instances' KV outlives them."""
    decode_admission: DecodeAdmission = "greedy"
    predictor: Literal["none", "right", "wrong"] = "none"


@dataclass(slots=True)
class VirtualMesh:
    shape: MeshShape
    bus: Bus
    scheduler: VirtualScheduler
    gateway: VirtualGateway
    kept: KeptKV = field(default_factory=KeptKV)
    instances: dict[InstanceId, VirtualInstance] = field(default_factory=dict)
    silent_until_s: dict[InstanceId, float] = field(default_factory=dict)
    lives: int = 0
    preempted: int = 0

    def start(self) -> None:
        self.bus.nodes |= {GATEWAY: self.gateway, SCHEDULER: self.scheduler}
        self.scheduler.gateway = ServiceRecord(
            service_id=GATEWAY, incarnation=Incarnation("g"), kind="gateway", host="h", pid=1, http_url=""
        )
        for number in range(self.shape.prefills):
            self.join(InstanceId(f"prefill-{number}"))
        for number in range(self.shape.decodes):
            self.join(InstanceId(f"decode-{number}"))
        for number in range(self.shape.mixed):
            self.join(InstanceId(f"mixed-{number}"))
        self.scheduler.beat()

    def join(self, instance_id: InstanceId) -> None:
        """A new life of an instance; its record replaces that of the last one."""
        self.lives += 1
        incarnation = Incarnation(f"life-{self.lives}")
        role = first_role(instance_id)
        node = self._instance(instance_id, incarnation, role)
        self.instances[instance_id] = node
        self.bus.nodes[instance_id] = node
        self.scheduler.lives.append(InstanceLife(instance_id, incarnation))
        self.scheduler.records[instance_id] = InstanceRecord(
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
        record = self.scheduler.records[instance_id]
        timeline = self.bus.timeline

        def forget() -> None:
            if self.scheduler.records.get(instance_id) is record:
                del self.scheduler.records[instance_id]

        timeline.after(LEASE_S, forget)
        if away_s is not None:
            timeline.after(away_s, lambda: self.join(instance_id))

    def kill_scheduler(self, away_s: float) -> None:
        """Who asks meanwhile hears that nobody is there; who had asked hears nothing. The next one knows what
        the store holds and what is reported."""
        former = self.bus.nodes.pop(SCHEDULER)
        assert former is self.scheduler
        self.scheduler = VirtualScheduler(
            state_of(self.shape), self.bus, former.records, former.lives, former.gateway, former.predict
        )

        def join() -> None:
            self.bus.nodes[SCHEDULER] = self.scheduler
            self.scheduler.beat()

        self.bus.timeline.after(away_s, join)

    def drain(self, instance_id: InstanceId, away_s: float) -> None:
        node = self.instances.get(instance_id)
        if node is None or node.is_draining:
            return
        node.drain(DRAIN_S)

        def leave() -> None:
            if self.instances.get(instance_id) is node:
                self.kill(instance_id, away_s)

        self.bus.timeline.after(2 * DRAIN_S, leave)

    def flip(self, instance_id: InstanceId, role: Role) -> None:
        """Another role for an instance that is there and stays; the store and the scheduler hear of it."""
        node = self.instances.get(instance_id)
        if node is None or node.is_draining:
            return
        node.flip(role)
        record = self.scheduler.records[instance_id]
        self.scheduler.records[instance_id] = msgspec.structs.replace(record, role=role)
        self.bus.publish(instance_id, SCHEDULER, node.load())

    def restore_roles(self) -> None:
        for instance_id in self.instances:
            self.flip(instance_id, first_role(instance_id))

    def silence(self, instance_id: InstanceId, duration_s: float) -> None:
        """Its reports stay away though it works."""
        self.silent_until_s[instance_id] = self.bus.timeline.now + duration_s

    def check_empty(self) -> None:
        """Nobody holds anything any more."""
        assert not self.scheduler.state.requests, "the scheduler keeps a booking"
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
        timeline = self.bus.timeline
        if timeline.now >= self.silent_until_s.get(instance_id, 0.0):
            self.bus.publish(instance_id, SCHEDULER, node.load())
        timeline.after(REPORT_S, lambda: self._report(node))

    def _instance(self, instance_id: InstanceId, incarnation: Incarnation, role: Role) -> VirtualInstance:
        shape = self.shape
        blocks = BlockAllocator(shape.prefill_blocks if role == "prefill" else shape.decode_blocks)
        mates = RoomMates(shape.mixed_policy, is_mixed=role == "mixed")
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
            pulls=Pulls(PullBudget(least_bytes=shape.least_portion_bytes)),
            host_blocks=shape.host_blocks,
        )
        kept = self.kept if shape.keeps_kv else KeptKV()
        failures = shape.send_failures
        return VirtualInstance(
            role,
            VirtualPrefill(prefill, RUNNER, self.bus, memory, failures),
            VirtualDecode(decode, incarnation, RUNNER, self.bus, memory, host_memory, kept, failures),
            self.bus,
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
    bus = Bus(Timeline(random.Random(seed)))
    scheduler = VirtualScheduler(state_of(shape), bus, predict=PREDICTORS[shape.predictor])
    mesh = VirtualMesh(shape, bus, scheduler, VirtualGateway(bus))
    mesh.start()
    return mesh


def state_of(shape: MeshShape) -> SchedulerState:
    return SchedulerState(
        LEASE_S,
        SchedulerConfig(
            prefill_policy=shape.policy,
            bind_below_tokens=shape.chunk_tokens,
            max_pending_prefill_tokens=shape.max_pending_prefill_tokens,
            max_requests_per_decode=shape.max_requests_per_decode,
        ),
        waiting=WaitingRoom(MOST_WAITING, shape.order, window_size=3),
    )


def sequence_of(name: str, prompt_tokens: int, max_tokens: int, seed: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(name),
        gateway_id=GATEWAY,
        prompt_ids=tuple(range(prompt_tokens)),
        sampling=SamplingParams(max_tokens=max_tokens, seed=seed),
    )


def expected_tokens(request: GenerationRequest) -> tuple[list[int], str]:
    """What the emulated engine defines for the request, drawn one after another by nobody's state."""
    output_ids: list[int] = []
    while True:
        draw = Draw(request.sampling, request.prompt_ids, output_ids)
        [token] = RUNNER.run([SequenceStep((0,), 0, (), draw)])
        assert token is not None
        finish = finish_reason_of(request, len(output_ids), token, EOS_TOKEN_IDS)
        output_ids.append(token.token_id)
        if finish is not None:
            return output_ids, finish


def _predict_wrongly(request: GenerationRequest) -> LengthDistribution:
    """Far too little of some, far too much of others."""
    return certain(1 if request.sampling.seed % 2 else 10 * request.sampling.max_tokens)


PREDICTORS: dict[str, Callable[[GenerationRequest], LengthDistribution] | None] = {
    "none": None,
    "right": lambda request: certain(len(expected_tokens(request)[0])),
    "wrong": _predict_wrongly,
}
