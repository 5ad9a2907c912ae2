"""The prefill room's decisions, as events and commands."""

import random
from dataclasses import replace
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
from common.kv.layout import KVLayout, KVSpan
from common.messages import ErrorReply, KVDelivered, KVDestination, PrefillTask, PullKV, SampledToken
from prefill import events
from prefill.prompts import PromptQueue
from prefill.sequence import ROOM
from prefill.state import PrefillState
from tests.requests import GATEWAY, make_request

DECODE = InstanceId("decode-0")
LIFE = Incarnation("d1")
"""The decode instance's."""
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
) -> PrefillState:
    return PrefillState(
        instance_id=InstanceId("prefill-0"),
        incarnation=Incarnation("i1"),
        blocks=BlockAllocator(total_blocks),
        layout=replace(LAYOUT, block_size=block_size),
        eos_token_ids=(EOS,),
        chunk_tokens=chunk_tokens,
        prompts=PromptQueue(order, window_size=4),
        max_waiting_requests=max_waiting_requests,
        layerwise_min_tokens=layerwise_min_tokens,
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


def pull_of(
    request_id: str, blocks: int = 2, portion: int = 0, max_bytes: int | None = None, attempt: int = 0
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
    assert (send.source_blocks, send.spans) == ((0,), (KVSpan(range(3), range(4)),))
    assert only(handle(state, events.CancelArrived(RequestId("r1"), 0)), events.WithdrawOffer)
    assert state.blocks.free_blocks == 7
    answer = only(handle(state, sent("r1")), events.AnswerPull).answer
    assert isinstance(answer, ErrorReply)
    assert answer.code == RequestCancelled.code
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
        sent("r1"),
        events.LayersComputed(4),
    ):
        with pytest.raises(ValueError, match=r"r1|slices"):
            handle(state, event)
        state.check()
    assert handle(state, events.ChunkFinished((TOKEN,)))


def layerwise(tokens: int = 12, chunk_tokens: int = 8) -> PrefillState:
    """A prompt of more than a chunk, offered, its first chunk in flight."""
    state = make_state(chunk_tokens=chunk_tokens, layerwise_min_tokens=8)
    commands = arrive(state, "r1", tokens)
    offer = only(commands, events.OfferSequence)
    assert (offer.task.is_early, offer.task.request.output_ids, offer.task.kv_tokens) == (True, (), tokens)
    assert only(commands, events.RunChunk).report_every is not None
    return state


def delivered(commands: list[events.PrefillCommand]) -> KVDelivered:
    answer = only(commands, events.AnswerPull).answer
    assert isinstance(answer, KVDelivered)
    return answer


def test_a_long_prompts_kv_follows_its_computation_layer_by_layer() -> None:
    """Splitwise 4.4; the first token comes with the last of the KV."""
    state = layerwise()
    assert handle(state, events.PullArrived(pull_of("r1", 3))) == []
    [send] = handle(state, events.LayersComputed(1))
    assert isinstance(send, events.SendKV)
    assert send.spans == (KVSpan(range(1), range(8)),)
    assert handle(state, events.LayersComputed(2)) == []
    handle(state, events.LayersComputed(3))
    assert delivered(handle(state, sent("r1"))) == KVDelivered(24, 0.5, is_last=False)
    [send] = handle(state, events.PullArrived(pull_of("r1", 3, portion=1)))
    assert isinstance(send, events.SendKV)
    assert send.spans == (KVSpan(range(1, 3), range(8)),)
    handle(state, events.ChunkFinished((None,)))
    assert not delivered(handle(state, sent("r1"))).is_last
    assert handle(state, events.PullArrived(pull_of("r1", 3, portion=2))) == []
    send = only(handle(state, events.LayersComputed(3)), events.SendKV)
    assert send.spans == (KVSpan(range(3), range(8, 12)),)
    assert handle(state, sent("r1")) == [], "the first token is still to come"
    answer = delivered(handle(state, events.ChunkFinished((TOKEN,))))
    assert (answer.is_last, answer.first_token) == (True, 7)
    assert state.is_idle
    assert state.blocks.free_blocks == 8


def test_a_portion_holds_no_more_than_was_asked_for_and_is_not_sent_twice() -> None:
    state = make_state()
    arrive(state, "r1", 7)
    handle(state, events.ChunkFinished((TOKEN,)))
    spans = []
    portion = 0
    answer = None
    while answer is None or not answer.is_last:
        pull = pull_of("r1", portion=portion, max_bytes=19)
        [send] = handle(state, events.PullArrived(pull))
        assert isinstance(send, events.SendKV)
        spans.append(send.spans)
        answer = delivered(handle(state, sent("r1")))
        if not answer.is_last:
            assert delivered(handle(state, events.PullArrived(pull))) == answer
            with pytest.raises(UnknownRequest, match="portion 9"):
                handle(state, events.PullArrived(pull_of("r1", portion=9)))
        portion += 1
    assert spans == [
        (KVSpan(range(1), range(7)), KVSpan(range(1, 2), range(2))),
        (KVSpan(range(1, 2), range(2, 7)), KVSpan(range(2, 3), range(4))),
        (KVSpan(range(2, 3), range(4, 7)),),
    ]


@pytest.mark.parametrize("is_in_time", [True, False])
def test_an_early_offer_that_came_too_early_is_made_again_with_the_first_token(is_in_time: bool) -> None:
    state = layerwise(8)
    refused = events.OfferRefused(owner_of("r1"), ErrorReply(Overloaded.code, "full"), is_early=True)
    if is_in_time:
        assert handle(state, refused) == []
        with pytest.raises(UnknownRequest, match="has not been offered"):
            handle(state, events.PullArrived(pull_of("r1")))
        commands = handle(state, events.ChunkFinished((TOKEN,)))
    else:
        assert len(handle(state, events.ChunkFinished((TOKEN,)))) == 1
        commands = handle(state, refused)
    task = only(commands, events.OfferSequence).task
    assert (task.is_early, task.request.output_ids) == (False, (7,))
    assert only(handle(state, events.PullArrived(pull_of("r1"))), events.SendKV)


def test_short_prompts_and_those_of_one_token_to_draw_are_not_offered_early() -> None:
    for tokens, max_tokens in ((7, 8), (8, 1)):
        state = make_state(layerwise_min_tokens=8)
        [chunk] = arrive(state, "r1", tokens, max_tokens)
        assert isinstance(chunk, events.RunChunk)
        assert chunk.report_every is None


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_sequence_that_its_first_token_ends_is_withdrawn_and_its_pull_answered(is_asked: bool) -> None:
    state = layerwise(8)
    if is_asked:
        handle(state, events.PullArrived(pull_of("r1")))
    commands = handle(state, events.ChunkFinished((SampledToken(EOS),)))
    assert only(commands, events.WithdrawOffer).decode_instance == DECODE
    answers = [each.answer for each in commands if isinstance(each, events.AnswerPull)]
    assert [each.code for each in answers if isinstance(each, ErrorReply)] == (
        [RequestCancelled.code] if is_asked else []
    )
    with pytest.raises(RequestCancelled, match="has ended"):
        handle(state, events.PullArrived(pull_of("r1")))
    assert state.is_idle


def test_what_ends_while_kv_is_in_the_air_is_answered_when_it_is_not() -> None:
    for ending in (
        events.ChunkFailed(FAILED),
        events.ChunkFinished((SampledToken(EOS),)),
        events.CancelArrived(RequestId("r1"), 0),
        events.DrainExpired(),
        events.DecodeInstanceGone(DECODE, LIFE),
    ):
        state = layerwise(8)
        handle(state, events.PullArrived(pull_of("r1")))
        handle(state, events.LayersComputed(1))
        commands = handle(state, ending)
        assert not [each for each in commands if isinstance(each, events.AnswerPull)]
        assert state.blocks.free_blocks == 6
        assert only(handle(state, sent("r1")), events.AnswerPull)
        if state.sequences:
            handle(state, events.ChunkFinished((TOKEN,)))
        assert state.is_idle
        assert state.blocks.free_blocks == 8


def test_a_portion_that_fails_ends_the_sequence_and_leaves_the_news_to_the_decode_instance() -> None:
    state = layerwise()
    handle(state, events.PullArrived(pull_of("r1", 3)))
    handle(state, events.LayersComputed(2))
    [answer] = handle(state, events.SendFailed(owner_of("r1"), FAILED))
    assert answer == events.AnswerPull(owner_of("r1"), 0, FAILED)
    assert handle(state, events.ChunkFinished((None,))) == []
    assert state.is_idle


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([1, 5, 64]),
    st.sampled_from(["fcfs", "sjf", "ljf"]),
    st.sampled_from([1, 10, 1000]),
)
def test_whatever_happens_nothing_is_lost_or_leaked(
    seed: int, block_size: int, chunk_tokens: int, order: PrefillOrder, layerwise_min_tokens: int
) -> None:
    """A random walk over legal events, then everything that is under way ends: all blocks are free."""
    chance = random.Random(seed)
    state = make_state(
        40 // block_size + 1, block_size, chunk_tokens, order, layerwise_min_tokens=layerwise_min_tokens
    )
    walk = Walk(state, chance)
    for _ in range(160):
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
        self.layers: int | None = None
        self.offers: dict[BlockOwner, bool] = {}
        self.portions: dict[BlockOwner, int] = {}
        self.asked: set[BlockOwner] = set()
        self.sends: list[BlockOwner] = []
        self.received: dict[BlockOwner, set[tuple[int, int]]] = {}
        self.arrived: set[RequestId] = set()
        self.ended: set[RequestId] = set()

    def do(self, event: events.PrefillEvent) -> None:
        for command in handle(self.state, event):
            match command:
                case events.RunChunk(slices, report_every):
                    assert not self.chunk, "two chunks at once"
                    assert sum(piece.tokens for piece in slices) <= self.state.chunk_tokens
                    self.chunk, self.layers = slices, None if report_every is None else 0
                case events.OfferSequence(owner, _, task):
                    assert owner not in self.offers, "offered twice"
                    self.offers[owner] = task.is_early
                case events.WithdrawOffer(owner):
                    self.offers.pop(owner, None)
                case events.SendKV(owner, pull, _, spans):
                    assert owner in self.asked
                    assert owner not in self.sends
                    self.sends.append(owner)
                    self.receive(owner, pull.max_bytes, spans)
                case events.AnswerPull(owner, portion, answer):
                    assert owner not in self.sends, "answered while bytes are in the air"
                    assert portion == self.portions[owner]
                    self.asked.remove(owner)
                    self.take_answer(owner, answer)
                case events.PublishToken(_, event_, _, _) if event_.finish_reason is not None:
                    self.ended.add(event_.request_id)
                case events.PublishFailure(_, failure):
                    self.ended.add(failure.request_id)

    def receive(self, owner: BlockOwner, max_bytes: int | None, spans: tuple[KVSpan, ...]) -> None:
        parts = {(layer, at) for span in spans for layer in span.layers for at in span.positions}
        assert parts
        assert not parts & self.received.setdefault(owner, set()), "sent twice"
        limit = 1000 if max_bytes is None else max(1, max_bytes // LAYOUT.token_layer_bytes)
        assert len(parts) <= limit
        sequence = self.state.sequences[owner]
        in_chunk = {piece.owner: piece.tokens for piece in self.chunk}
        for layer, at in parts:
            is_computed = at < sequence.computed_tokens
            is_in_chunk = at < sequence.computed_tokens + in_chunk.get(owner, 0) and layer < (
                self.layers or 0
            )
            assert is_computed or is_in_chunk, "KV was sent before it was there"
        self.received[owner] |= parts

    def take_answer(self, owner: BlockOwner, answer: KVDelivered | ErrorReply) -> None:
        if isinstance(answer, KVDelivered) and not answer.is_last:
            self.portions[owner] += 1
            return
        self.offers.pop(owner, None)
        self.ended.add(owner.request_id)
        if isinstance(answer, KVDelivered):
            assert answer.first_token is not None
            tokens = max(at for _, at in self.received[owner]) + 1
            assert len(self.received[owner]) == tokens * LAYOUT.layers, "some KV was never sent"

    def step(self) -> None:
        choice = self.chance.random()
        if choice < 0.3:
            self.arrive()
        elif choice < 0.45 and self.chunk:
            self.end_chunk()
        elif choice < 0.6 and self.chunk and self.layers is not None and self.layers < LAYOUT.layers:
            self.layers += self.chance.randint(1, LAYOUT.layers - self.layers)
            self.do(events.LayersComputed(self.layers))
        elif choice < 0.75 and self.offers:
            self.ask(self.chance.choice(list(self.offers)))
        elif choice < 0.78 and self.offers:
            self.refuse(self.chance.choice(list(self.offers)))
        elif choice < 0.9 and self.sends:
            self.end_send()
        elif choice < 0.96 and self.arrived:
            request_id = self.chance.choice(sorted(self.arrived))
            self.ended.add(request_id)
            self.do(events.CancelArrived(request_id, 0))
        elif choice < 0.965:
            self.ended |= self.arrived
            self.do(events.DecodeInstanceGone(DECODE, LIFE))
        elif choice < 0.97:
            self.ended |= self.arrived
            self.do(events.GatewayGone(GATEWAY))

    def arrive(self) -> None:
        request_id = RequestId(f"r{len(self.arrived)}")
        request = make_request(request_id, self.chance.randint(1, 30), self.chance.choice([1, 5]))
        self.arrived.add(request_id)
        self.do(events.TaskArrived(PrefillTask(request, DECODE, LIFE)))

    def ask(self, owner: BlockOwner) -> None:
        """For its next portion, of any size."""
        if owner in self.asked:
            return
        self.asked.add(owner)
        portion = self.portions.setdefault(owner, 0)
        max_bytes = self.chance.choice([None, 1, 10, 50])
        self.do(events.PullArrived(pull_of(owner.request_id, 60, portion, max_bytes)))

    def refuse(self, owner: BlockOwner) -> None:
        """Only what nobody has asked for yet; an early offer may have come too early."""
        if owner in self.asked or self.portions.get(owner):
            return
        is_early = self.offers.pop(owner)
        error = self.chance.choice([FAILED, ErrorReply(Overloaded.code, "full")])
        self.do(events.OfferRefused(owner, error, is_early=is_early))

    def end_send(self) -> None:
        owner = self.sends.pop(self.chance.randrange(len(self.sends)))
        if self.chance.random() < 0.1:
            self.do(events.SendFailed(owner, FAILED))
        else:
            self.do(events.SendFinished(owner, 1, 0.1))

    def end_chunk(self) -> None:
        chunk, self.chunk, self.layers = self.chunk, (), None
        if self.chance.random() < 0.05:
            self.do(events.ChunkFailed(ErrorReply("internal_error", "broken")))
            return
        tokens = [SampledToken(self.chance.choice([EOS, 7, 8])) if piece.is_last else None for piece in chunk]
        self.do(events.ChunkFinished(tuple(tokens)))

    def finish(self) -> None:
        """Everybody pulls to the end; a state that waits for nothing is a deadlock."""
        while not self.state.is_idle:
            waiting = [owner for owner in self.offers if owner not in self.asked]
            assert self.chunk or self.sends or waiting, "sequences wait, and nothing is under way"
            if self.sends:
                self.end_send()
            elif self.chunk:
                self.end_chunk()
            else:
                self.ask(waiting[0])


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
