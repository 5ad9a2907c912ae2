"""A decode room's state and the events that tests give it."""

from typing import TypeVar

from common.config import DecodeAdmission
from common.ids import Incarnation, InstanceId, RequestId
from common.kv.blocks import BlockAllocator, BlockOwner
from common.messages import DecodeTask, ErrorReply, InstanceLife, ResumeTask, SampledToken
from decode import events
from decode.context_turns import ContextTurns
from decode.pulls import Pulls
from decode.sequence import ROOM
from decode.state import DecodeState
from tests.requests import make_request

PREFILL = InstanceId("prefill-0")
LIFE = Incarnation("i1")
"""The prefill instance's."""
FORMER = InstanceLife(InstanceId("decode-1"), Incarnation("i0"))
EOS = 2
FAILED = ErrorReply("handover_failed", "no")
Command = TypeVar("Command")


def make_state(
    total_blocks: int = 8,
    block_size: int = 4,
    max_batch: int = 8,
    max_waiting_requests: int = 100,
    lanes: int = 1,
    max_moves: int = 0,
    pulls: Pulls | None = None,
    admission: DecodeAdmission = "greedy",
    host_blocks: int = 0,
    most_context: int | None = None,
) -> DecodeState:
    return DecodeState(
        instance_id=InstanceId("decode-0"),
        blocks=BlockAllocator(total_blocks),
        block_size=block_size,
        eos_token_ids=(EOS,),
        max_batch=max_batch,
        max_waiting_requests=max_waiting_requests,
        admission=admission,
        lanes=lanes,
        max_moves=max_moves,
        min_move_gain_tokens=1,
        host_blocks=host_blocks,
        pulls=pulls or Pulls(),
        turns=ContextTurns(most_context),
    )


def handle(state: DecodeState, event: events.DecodeEvent, now: float = 0.0) -> list[events.DecodeCommand]:
    commands = state.handle(event, now)
    state.check()
    return commands


def task_of(
    request_id: str = "r1",
    prompt_tokens: int = 4,
    max_tokens: int = 8,
    attempt: int = 0,
    stop_token_ids: tuple[int, ...] = (),
) -> DecodeTask:
    request = make_request(
        request_id, prompt_tokens, max_tokens, attempt=attempt, output_ids=(7,), stop_token_ids=stop_token_ids
    )
    return DecodeTask(request, PREFILL, LIFE, prompt_tokens)


def resumed_of(
    request_id: str = "r1", prompt_tokens: int = 4, max_tokens: int = 8, attempt: int = 1
) -> ResumeTask:
    request = make_request(request_id, prompt_tokens, max_tokens, attempt=attempt, output_ids=(7, 8))
    return ResumeTask(request, FORMER)


def owner_of(request_id: str = "r1", attempt: int = 0) -> BlockOwner:
    return BlockOwner(ROOM, RequestId(request_id), attempt)


def kinds(commands: list[events.DecodeCommand], kind: type[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, kind)]


def start(state: DecodeState, *request_ids: str, prompt_tokens: int = 4, max_tokens: int = 8) -> None:
    """Each is offered, pulled and in the batch; the first one's step is in flight."""
    for request_id in request_ids:
        handle(state, events.TaskArrived(task_of(request_id, prompt_tokens, max_tokens)))
    for request_id in request_ids:
        handle(state, events.PullFinished(owner_of(request_id)))


def end_step(state: DecodeState, now: float = 0.0) -> list[events.DecodeCommand]:
    """The first lane's, whose sequences go on."""
    return handle(state, events.StepFinished(tuple(SampledToken(8) for _ in state.batches.steps[0])), now)


def early_of(request_id: str = "r1", prompt_tokens: int = 4, max_tokens: int = 8) -> DecodeTask:
    """Offered before its first token was drawn."""
    request = make_request(request_id, prompt_tokens, max_tokens)
    return DecodeTask(request, PREFILL, LIFE, prompt_tokens)
