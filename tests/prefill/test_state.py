"""The prefill room's decisions, as events and commands."""

import random
from typing import TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import PrefillOrder
from common.errors import (
    ContextLengthExceeded,
    InstanceLost,
    InvalidRequest,
    NoInstanceReady,
    Overloaded,
    RequestCancelled,
    UnknownRequest,
)
from common.ids import Incarnation, InstanceId, RequestId
from common.kv.blocks import BlockAllocator, BlockOwner
from common.kv.layout import KVLayout
from common.messages import ErrorReply, KVDestination, PrefillTask, PullKV, SampledToken
from prefill import events
from prefill.state import ROOM, PrefillState
from tests.requests import GATEWAY, make_request

DECODE = InstanceId("decode-0")
LIFE = Incarnation("d1")
"""The decode instance's."""
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=1, block_size=4, element_bytes=1)
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
) -> PrefillState:
    return PrefillState(
        instance_id=InstanceId("prefill-0"),
        incarnation=Incarnation("i1"),
        blocks=BlockAllocator(total_blocks),
        block_size=block_size,
        eos_token_ids=(EOS,),
        chunk_tokens=chunk_tokens,
        order=order,
        scheduling_window=4,
        max_waiting_requests=max_waiting_requests,
    )


def handle(state: PrefillState, event: events.PrefillEvent, now: float = 0.0) -> list[events.PrefillCommand]:
    commands = state.handle(event, now)
    state.check()
    return commands


def arrive(state: PrefillState, *arguments: object, **keywords: object) -> list[events.PrefillCommand]:
    request = make_request(*arguments, **keywords)  # type: ignore[arg-type]  # passed on as given
    return handle(state, events.TaskArrived(PrefillTask(request, DECODE, LIFE)))


def owner_of(request_id: str, attempt: int = 0) -> BlockOwner:
    return BlockOwner(ROOM, RequestId(request_id), attempt)


def only(commands: list[events.PrefillCommand], kind: type[Command]) -> Command:
    [found] = [command for command in commands if isinstance(command, kind)]
    return found


def pull_of(request_id: str, blocks: int = 2) -> PullKV:
    return PullKV(RequestId(request_id), 0, Incarnation("i1"), DECODE, tuple(range(blocks)), LAYOUT, (POOL,))


def offered(state: PrefillState, request_id: str = "r1") -> None:
    arrive(state, request_id)
    handle(state, events.ChunkFinished((TOKEN,)))


def test_a_prompt_is_computed_in_chunks_and_offered_with_its_first_token() -> None:
    state = make_state()
    first = only(arrive(state, "r1", 12), events.RunChunk)
    assert [(piece.start, piece.tokens, piece.is_last) for piece in first.slices] == [(0, 8, False)]
    second = only(handle(state, events.ChunkFinished((None,))), events.RunChunk)
    assert [(piece.start, piece.tokens, piece.is_last) for piece in second.slices] == [(8, 4, True)]
    commands = handle(state, events.ChunkFinished((TOKEN,)), now=3.0)
    published = only(commands, events.PublishToken)
    assert (published.event.index, published.event.token, published.event.finish_reason) == (0, TOKEN, None)
    offer = only(commands, events.OfferSequence)
    assert offer.task.request.output_ids == (7,)
    assert offer.task.kv_tokens == 12
    assert state.handovers_waiting == 1


def test_short_prompts_share_a_chunk_and_a_long_one_is_sliced_across_chunks() -> None:
    """TetriInfer 3.3.3 and Figure 7: prompts are merged and sliced into chunks of one size."""
    state = make_state()
    arrive(state, "busy", 8)
    for request_id, tokens in (("a", 3), ("b", 9), ("c", 2)):
        arrive(state, request_id, tokens)
    chunk = only(handle(state, events.ChunkFinished((TOKEN,))), events.RunChunk)
    assert [(piece.owner.request_id, piece.tokens) for piece in chunk.slices] == [("a", 3), ("b", 5)]
    chunk = only(handle(state, events.ChunkFinished((TOKEN, None))), events.RunChunk)
    assert [(piece.owner.request_id, piece.tokens) for piece in chunk.slices] == [("b", 4), ("c", 2)]


@pytest.mark.parametrize(("order", "expected"), [("fcfs", "abc"), ("sjf", "cab"), ("ljf", "bac")])
def test_a_window_is_ordered_by_its_policy(order: PrefillOrder, expected: str) -> None:
    state = make_state(total_blocks=100, chunk_tokens=100, order=order)
    arrive(state, "busy", 8)
    for request_id, tokens in (("a", 5), ("b", 9), ("c", 2)):
        arrive(state, request_id, tokens)
    chunk = only(handle(state, events.ChunkFinished((TOKEN,))), events.RunChunk)
    assert "".join(piece.owner.request_id for piece in chunk.slices) == expected


def test_a_sequence_that_ends_with_its_first_token_is_never_offered() -> None:
    for ending in (SampledToken(EOS), TOKEN):
        state = make_state()
        arrive(state, "r1", max_tokens=1 if ending == TOKEN else 9)
        commands = handle(state, events.ChunkFinished((ending,)))
        reason = only(commands, events.PublishToken).event.finish_reason
        assert reason == ("length" if ending == TOKEN else "stop")
        assert len(commands) == 1
        assert state.is_idle
        assert state.blocks.free_blocks == 8


def test_blocks_stay_pinned_until_no_byte_is_in_the_air() -> None:
    state = make_state()
    offered(state)
    send = only(handle(state, events.PullArrived(pull_of("r1"))), events.SendKV)
    assert (send.source_blocks, send.kv_tokens) == ((0,), 4)
    handle(state, events.CancelArrived(RequestId("r1"), 0))
    assert state.blocks.free_blocks == 7
    handle(state, events.SendFinished(owner_of("r1")))
    assert state.is_idle
    assert state.blocks.free_blocks == 8


def test_a_refused_offer_goes_back_to_the_gateway_and_names_a_lost_instance() -> None:
    state = make_state()
    offered(state)
    commands = handle(state, events.OfferRefused(owner_of("r1"), FAILED, is_lost=True))
    failure = only(commands, events.PublishFailure).failure
    assert failure.can_continue
    assert failure.lost_instance == DECODE
    assert state.blocks.free_blocks == 8


def test_pulling_what_is_not_here_is_refused_and_changes_nothing() -> None:
    state = make_state()
    offered(state)
    for pull in (pull_of("other"), pull_of("r1", blocks=0)):
        with pytest.raises(UnknownRequest):
            handle(state, events.PullArrived(pull))
        state.check()
    assert state.handovers_waiting == 1


def test_a_cancellation_that_overtakes_its_task_is_remembered() -> None:
    state = make_state()
    handle(state, events.CancelArrived(RequestId("r1"), 0))
    with pytest.raises(RequestCancelled):
        arrive(state, "r1")
    assert only(arrive(state, "r1", attempt=1), events.RunChunk)


def test_a_later_attempt_supersedes_an_earlier_one() -> None:
    state = make_state()
    offered(state)
    arrive(state, "r1", attempt=1)
    assert list(state.sequences) == [owner_of("r1", 1)]


def test_an_earlier_attempt_that_comes_late_is_refused() -> None:
    state = make_state()
    arrive(state, "r1", attempt=1)
    with pytest.raises(RequestCancelled):
        arrive(state, "r1")
    assert list(state.sequences) == [owner_of("r1", 1)]


def test_word_that_an_earlier_life_of_the_decode_instance_is_gone_changes_nothing() -> None:
    state = make_state()
    arrive(state, "r1")
    assert handle(state, events.DecodeInstanceGone(DECODE, Incarnation("d0"))) == []
    offer = handle(state, events.ChunkFinished((TOKEN,)))[-1]
    assert isinstance(offer, events.OfferSequence)
    handle(state, events.DecodeInstanceGone(DECODE, LIFE))
    assert state.is_idle


def test_a_repeated_task_is_taken_once_and_never_in_the_name_of_one_that_was_given_up() -> None:
    state = make_state()
    arrive(state, "r1")
    assert arrive(state, "r1") == []
    handle(state, events.DecodeInstanceGone(DECODE, LIFE))
    with pytest.raises(RequestCancelled):
        arrive(state, "r1")
    handle(state, events.ChunkFinished((TOKEN,)))
    assert state.is_idle


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty prompt"):
        arrive(make_state(), "r1", 0)


def test_bounds_are_kept_with_typed_errors() -> None:
    state = make_state(max_waiting_requests=1)
    arrive(state, "r1")
    with pytest.raises(Overloaded, match=r"instance\.max_waiting_requests"):
        arrive(state, "r2")
    with pytest.raises(ContextLengthExceeded, match="KV blocks"):
        arrive(make_state(), "r1", 33)
    handle(state, events.DrainStarted())
    with pytest.raises(NoInstanceReady):
        arrive(state, "r3")


def test_nobody_overtakes_a_prompt_that_waits_for_memory() -> None:
    state = make_state(total_blocks=3, chunk_tokens=100)
    arrive(state, "first", 8)
    arrive(state, "large", 12)
    arrive(state, "small", 1)
    assert not any(
        isinstance(command, events.RunChunk) for command in handle(state, events.ChunkFinished((TOKEN,)))
    )
    chunk = only(handle(state, events.CancelArrived(RequestId("first"), 0)), events.RunChunk)
    assert [piece.owner.request_id for piece in chunk.slices] == ["large"]


def test_an_illegal_end_of_chunk_raises_and_changes_nothing() -> None:
    state = make_state()
    arrive(state, "r1")
    for event in (
        events.ChunkFinished((TOKEN, TOKEN)),
        events.ChunkFinished((None,)),
        events.SendFinished(owner_of("r1")),
    ):
        with pytest.raises(ValueError, match=r"r1|slices"):
            handle(state, event)
        state.check()
    assert handle(state, events.ChunkFinished((TOKEN,)))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([1, 5, 64]),
    st.sampled_from(["fcfs", "sjf", "ljf"]),
)
def test_whatever_happens_nothing_is_lost_or_leaked(
    seed: int, block_size: int, chunk_tokens: int, order: PrefillOrder
) -> None:
    """A random walk over legal events, then everything that is under way ends: all blocks are free."""
    chance = random.Random(seed)
    state = make_state(40 // block_size + 1, block_size, chunk_tokens, order)
    walk = Walk(state, chance)
    for _ in range(120):
        walk.step()
    walk.finish()
    assert state.is_idle
    assert state.blocks.free_blocks == state.blocks.total_blocks
    assert walk.ended == walk.arrived


class Walk:
    """Plays everybody around the state. ``ended`` are requests whose fate somebody was told or decided."""

    def __init__(self, state: PrefillState, chance: random.Random) -> None:
        self.state = state
        self.chance = chance
        self.chunk: tuple[events.ChunkSlice, ...] = ()
        self.offers: list[BlockOwner] = []
        self.sends: list[BlockOwner] = []
        self.arrived: set[RequestId] = set()
        self.ended: set[RequestId] = set()

    def do(self, event: events.PrefillEvent) -> None:
        for command in handle(self.state, event):
            match command:
                case events.RunChunk(slices):
                    assert not self.chunk, "two chunks at once"
                    assert sum(piece.tokens for piece in slices) <= self.state.chunk_tokens
                    self.chunk = slices
                case events.OfferSequence(owner):
                    self.offers.append(owner)
                case events.SendKV(owner):
                    self.sends.append(owner)
                case events.PublishToken(_, event_, _, _) if event_.finish_reason is not None:
                    self.ended.add(event_.request_id)
                case events.PublishFailure(_, failure):
                    self.ended.add(failure.request_id)

    def step(self) -> None:
        choice = self.chance.random()
        if choice < 0.35:
            self.arrive()
        elif choice < 0.6 and self.chunk:
            self.end_chunk()
        elif choice < 0.7 and self.offers:
            owner = self.offers.pop(self.chance.randrange(len(self.offers)))
            if owner in self.state.sequences:
                self.do(events.PullArrived(pull_of(owner.request_id, 60)))
        elif choice < 0.75 and self.offers:
            owner = self.offers.pop()
            self.do(events.OfferRefused(owner, FAILED))
        elif choice < 0.85 and self.sends:
            owner = self.sends.pop(self.chance.randrange(len(self.sends)))
            self.do(events.SendFinished(owner))
            self.ended.add(owner.request_id)
        elif choice < 0.95 and self.arrived:
            request_id = self.chance.choice(sorted(self.arrived))
            self.do(events.CancelArrived(request_id, 0))
            self.ended.add(request_id)
        elif choice < 0.96:
            self.do(events.DecodeInstanceGone(DECODE, LIFE))
            self.ended |= self.arrived
        elif choice < 0.97:
            self.do(events.GatewayGone(GATEWAY))
            self.ended |= self.arrived

    def arrive(self) -> None:
        request_id = RequestId(f"r{len(self.arrived)}")
        request = make_request(request_id, self.chance.randint(1, 30), self.chance.choice([1, 5]))
        self.do(events.TaskArrived(PrefillTask(request, DECODE, LIFE)))
        self.arrived.add(request_id)

    def end_chunk(self) -> None:
        chunk, self.chunk = self.chunk, ()
        if self.chance.random() < 0.05:
            self.do(events.ChunkFailed(ErrorReply("internal_error", "broken")))
            return
        tokens = [SampledToken(self.chance.choice([EOS, 7, 8])) if piece.is_last else None for piece in chunk]
        self.do(events.ChunkFinished(tuple(tokens)))

    def finish(self) -> None:
        while self.chunk or self.offers or self.sends:
            if self.chunk:
                self.end_chunk()
            for owner in self.offers:
                self.do(events.OfferRefused(owner, FAILED))
            self.offers = []
            for owner in self.sends:
                self.do(events.SendFinished(owner))
                self.ended.add(owner.request_id)
            self.sends = []


def test_a_pull_for_an_earlier_life_or_into_impossible_blocks_is_refused() -> None:
    state = make_state()
    offered(state)
    pull = pull_of("r1")
    for wrong, refusal in (
        (msgspec.structs.replace(pull, prefill_incarnation=Incarnation("i0")), InstanceLost),
        (msgspec.structs.replace(pull, blocks=(0, 60)), InvalidRequest),
        (msgspec.structs.replace(pull, blocks=(0, -1)), InvalidRequest),
        (msgspec.structs.replace(pull, blocks=(1, 1)), InvalidRequest),
    ):
        with pytest.raises(refusal):
            handle(state, events.PullArrived(wrong))
    handle(state, events.PullArrived(pull))
