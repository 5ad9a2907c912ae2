"""What a virtual mesh is made of, and how its schedulers are to decide."""

from dataclasses import dataclass
from typing import Literal

from common.config import (
    DecodeAdmission,
    DecodeBinding,
    DecodePolicy,
    MixedPolicy,
    PrefillBatching,
    PrefillOrder,
    PrefillPolicy,
    RolePolicyName,
    RolesConfig,
    SchedulerConfig,
    TransferMode,
)
from common.ids import Incarnation
from scheduler.state import MOST_WAITING, SchedulerState
from scheduler.waiting_room import WaitingRoom
from tests.virtual.scheduler import HEARTBEAT_S

LEASE_S = 3.0


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
    decode_policy: DecodePolicy = "least_loaded"
    is_learned: bool = False
    """Whether instances tell how long their chunks and steps take."""
    schedulers: int = 1
    is_grouped: bool = False
    roles: RolePolicyName = "fixed"
    batching: PrefillBatching = "chunks"
    max_batch: int = 8
    max_waiting_requests: int = 4
    max_pending_prefill_tokens: int = 60
    max_requests_per_decode: int = 6
    send_failures: float = 0.0
    layerwise_min_tokens: int = 1000
    least_portion_bytes: int = 10
    transfer_mode: TransferMode = "pull"
    host_blocks: int = 0
    keeps_kv: bool = False
    """Whether decode instances' KV outlives them."""
    decode_admission: DecodeAdmission = "greedy"
    decode_binding: DecodeBinding = "early"
    predictor: Literal["none", "right", "wrong"] = "none"


def roles_of(shape: MeshShape) -> RolesConfig:
    """Changes that come often: an instance's role is worth little here."""
    return RolesConfig(
        policy=shape.roles,
        look_s=HEARTBEAT_S,
        cool_down_s=1.0,
        overflow_queue_s=0.5,
        overflow_queue_tokens=20,
        overflow_kv_share=0.5,
        settle_s=2.0,
        repurpose_s=6.0,
        idle_s=3.0,
        idle_share=0.5,
    )


def state_of(shape: MeshShape, incarnation: Incarnation) -> SchedulerState:
    return SchedulerState(
        LEASE_S,
        SchedulerConfig(
            prefill_policy=shape.policy,
            decode_binding=shape.decode_binding,
            decode_policy=shape.decode_policy,
            grouped=shape.is_grouped,
            bind_below_tokens=shape.chunk_tokens,
            max_pending_prefill_tokens=shape.max_pending_prefill_tokens,
            max_requests_per_decode=shape.max_requests_per_decode,
        ),
        incarnation=incarnation,
        waiting=WaitingRoom(MOST_WAITING, shape.order, window_size=3),
    )
