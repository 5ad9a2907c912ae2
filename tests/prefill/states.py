"""A prefill room's state and the events that tests give it."""

from dataclasses import replace
from typing import TypeVar

from common.config import PrefillBatching, PrefillOrder
from common.ids import Incarnation, InstanceId, RequestId
from common.kv.blocks import BlockAllocator, BlockOwner
from common.kv.layout import KVLayout
from common.messages import (
    ErrorReply,
    KVDelivered,
    KVDestination,
    Placement,
    PrefillTask,
    PullKV,
    SampledToken,
)
from prefill import events
from prefill.prompts import PromptQueue
from prefill.sequence import ROOM
from prefill.state import PrefillState
from scheduler.policy.prefill_batching import fill_batch_of
from tests.requests import make_request

DECODE = InstanceId("decode-0")
LIFE = Incarnation("d1")
"""The decode instance's."""
HOME = Placement(InstanceId("prefill-0"), Incarnation("i1"), InstanceId("decode-1"), Incarnation("d2"))
"""Where the scheduler has a sequence go on that was refused."""
LAYOUT = KVLayout(layers=3, kv_heads=1, head_dim=1, block_size=4, element_bytes=1)
POOL = KVDestination(b"", 0, 1, 60)
EOS = 2
TOKEN = SampledToken(7)
FAILED = ErrorReply("handover_failed", "no")
Command = TypeVar("Command")


def make_state(
    total_blocks: int = 8,
    block_size: int = 4,
    chunk_tokens: int = 8,
    order: PrefillOrder = "fcfs",
    max_waiting_requests: int = 100,
    layerwise_min_tokens: int = 1000,
    batching: PrefillBatching = "chunks",
) -> PrefillState:
    return PrefillState(
        instance_id=InstanceId("prefill-0"),
        incarnation=Incarnation("i1"),
        blocks=BlockAllocator(total_blocks),
        layout=replace(LAYOUT, block_size=block_size),
        eos_token_ids=(EOS,),
        chunk_tokens=chunk_tokens,
        prompts=PromptQueue(order, window_size=4, aging_tokens_per_s=10.0),
        max_waiting_requests=max_waiting_requests,
        layerwise_min_tokens=layerwise_min_tokens,
        fill_batch=fill_batch_of(batching, order),
    )


def handle(state: PrefillState, event: events.PrefillEvent, now: float = 0.0) -> list[events.PrefillCommand]:
    commands = state.handle(event, now)
    state.check()
    return commands


def arrive(
    state: PrefillState, *arguments: object, now: float = 0.0, **keywords: object
) -> list[events.PrefillCommand]:
    request = make_request(*arguments, **keywords)  # type: ignore[arg-type]  # passed on as given
    return handle(state, events.TaskArrived(PrefillTask(request, DECODE, LIFE)), now)


def owner_of(request_id: str, attempt: int = 0) -> BlockOwner:
    return BlockOwner(ROOM, RequestId(request_id), attempt)


def only(commands: list[events.PrefillCommand], kind: type[Command]) -> Command:
    [found] = [command for command in commands if isinstance(command, kind)]
    return found


def delivered(commands: list[events.PrefillCommand]) -> KVDelivered:
    answer = only(commands, events.AnswerPull).answer
    assert isinstance(answer, KVDelivered)
    return answer


def check_empty(state: PrefillState) -> None:
    """Nothing is left to do, and no block is held for anybody."""
    assert state.is_idle
    assert state.blocks.free_blocks == state.blocks.total_blocks


EVERYTHING = 1 << 30
"""Bytes; no KV here is as large."""


def pull_of(
    request_id: str, blocks: int = 2, portion: int = 0, max_bytes: int | None = EVERYTHING, attempt: int = 0
) -> PullKV:
    return PullKV(
        RequestId(request_id),
        attempt,
        Incarnation("i1"),
        DECODE,
        tuple(range(blocks)),
        LAYOUT,
        (POOL,),
        portion,
        max_bytes,
    )


def sent(request_id: str, kv_bytes: int = 24) -> events.SendFinished:
    return events.SendFinished(owner_of(request_id), kv_bytes, 0.5)


def offered(state: PrefillState, request_id: str = "r1") -> None:
    arrive(state, request_id)
    handle(state, events.ChunkFinished((TOKEN,)))
