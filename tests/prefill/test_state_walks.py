"""Random walks over the prefill room's legal events: whatever happens, nothing is lost or leaked."""

import random
from collections import deque
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import PrefillBatching, PrefillOrder
from common.errors import NoInstanceReady, Overloaded
from common.ids import RequestId
from common.kv.blocks import BlockOwner, blocks_for
from common.kv.layout import KVSpan
from common.messages import ErrorReply, KVDelivered, PrefillTask, SampledToken
from common.sequences import PublishFailure
from prefill import events
from prefill.state import PrefillState
from scheduler.policy.prefill_batching import PROMPT_ORDERS, fill_chunk
from tests.prefill.states import (
    DECODE,
    EOS,
    EVERYTHING,
    FAILED,
    HOME,
    LAYOUT,
    LIFE,
    handle,
    make_state,
    pull_of,
)
from tests.requests import GATEWAY, make_request


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([1, 5, 64]),
    st.sampled_from(sorted(PROMPT_ORDERS)),
    st.sampled_from([1, 10, 1000]),
    st.sampled_from(get_args(PrefillBatching)),
    st.booleans(),
)
def test_whatever_happens_nothing_is_lost_or_leaked(
    seed: int,
    block_size: int,
    chunk_tokens: int,
    order: PrefillOrder,
    layerwise_min_tokens: int,
    batching: PrefillBatching,
    is_pipeline: bool,
) -> None:
    """A random walk over legal events, then everything that is under way ends: all blocks are free."""
    chance = random.Random(seed)
    state = make_state(
        40 // block_size + 1,
        block_size,
        chunk_tokens,
        order,
        layerwise_min_tokens=layerwise_min_tokens,
        batching=batching,
    )
    walk = Walk(state, chance, is_pipeline=is_pipeline)
    for _ in range(160):
        walk.step()
    walk.finish()
    assert state.is_idle
    assert state.blocks.free_blocks == state.blocks.total_blocks
    assert walk.ended == walk.arrived


class Walk:
    """Plays everybody around the state. ``ended`` are requests whose fate somebody was told or decided."""

    def __init__(self, state: PrefillState, chance: random.Random, *, is_pipeline: bool) -> None:
        self.is_pipeline = is_pipeline
        self.state = state
        self.chance = chance
        self.chunks: deque[tuple[tuple[events.ChunkSlice, ...], bool]] = deque()
        self.has_advanced = False
        self.layers = 0
        self.offers: dict[BlockOwner, bool] = {}
        self.sought: list[BlockOwner] = []
        self.portions: dict[BlockOwner, int] = {}
        self.asked: set[BlockOwner] = set()
        self.sends: list[BlockOwner] = []
        self.received: dict[BlockOwner, set[tuple[int, int]]] = {}
        self.kept: list[BlockOwner] = []
        self.arrived: set[RequestId] = set()
        self.ended: set[RequestId] = set()

    def do(self, event: events.PrefillEvent) -> None:
        for command in handle(self.state, event):
            match command:
                case events.RunChunk(slices, report_every):
                    assert not self.chunks or self.has_advanced, "two chunks in one stage"
                    self.check_batch([piece.tokens for piece in slices])
                    self.chunks.append((slices, report_every is not None))
                    self.has_advanced = False
                case events.OfferSequence(owner, _, task):
                    assert owner not in self.offers, "offered twice"
                    self.offers[owner] = task.is_early
                case events.SeekDecode(owner):
                    assert owner not in self.offers, "offered while another instance is sought"
                    self.sought.append(owner)
                case events.WithdrawOffer(owner):
                    self.offers.pop(owner, None)
                case events.KeepHere(held_by, task):
                    assert task.request.output_ids, "a sequence stays without its first token"
                    held = len(self.state.blocks.block_table(held_by)) * self.state.layout.block_size
                    assert held >= task.kv_tokens, "KV was left behind"
                    self.kept.append(held_by)
                    self.ended.add(task.request.request_id)
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
                case PublishFailure(_, failure):
                    self.ended.add(failure.request_id)

    @property
    def oldest(self) -> tuple[events.ChunkSlice, ...]:
        return self.chunks[0][0] if self.chunks else ()

    def check_batch(self, tokens: list[int]) -> None:
        saturation = self.state.chunk_tokens
        if self.state.fill_batch is fill_chunk:
            assert sum(tokens) <= saturation
        elif len(tokens) > 1:
            assert max(tokens) < saturation
            assert 2 * sum(tokens) <= 3 * saturation

    def receive(self, owner: BlockOwner, max_bytes: int | None, spans: tuple[KVSpan, ...]) -> None:
        parts = {(layer, at) for span in spans for layer in span.layers for at in span.positions}
        assert parts
        assert not parts & self.received.setdefault(owner, set()), "sent twice"
        if max_bytes is not None:
            assert len(parts) <= max(1, max_bytes // LAYOUT.token_layer_bytes)
        sequence = self.state.sequences[owner]
        in_chunk = {piece.owner: piece.tokens for piece in self.oldest}
        for layer, at in parts:
            is_computed = at < sequence.computed_tokens
            is_in_chunk = at < sequence.computed_tokens + in_chunk.get(owner, 0) and layer < self.layers
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
        if choice < 0.05:
            self.take_over()
        elif choice < 0.3:
            self.arrive()
        elif choice < 0.4 and self.chunks:
            self.end_chunk()
        elif choice < 0.45 and self.is_pipeline and self.chunks and not self.has_advanced:
            self.has_advanced = True
            self.do(events.ChunkAdvanced())
        elif choice < 0.6 and self.chunks and self.chunks[0][1] and self.layers < LAYOUT.layers:
            self.layers += self.chance.randint(1, LAYOUT.layers - self.layers)
            self.do(events.LayersComputed(self.layers))
        elif choice < 0.75 and self.offers:
            self.ask(self.chance.choice(list(self.offers)))
        elif choice < 0.78 and self.offers:
            self.refuse(self.chance.choice(list(self.offers)))
        elif choice < 0.79 and self.offers:
            self.decline(self.chance.choice(list(self.offers)))
        elif choice < 0.82 and self.sought:
            self.end_search()
        elif choice < 0.9 and self.sends:
            self.end_send()
        elif choice < 0.96 and self.arrived:
            request_id = self.chance.choice(sorted(self.arrived))
            self.ended.add(request_id)
            self.do(events.CancelArrived(request_id, 0))
        elif choice < 0.963 and self.kept:
            self.let_go()
        elif choice < 0.964:
            self.do(events.RoleChanged(is_prefill=not self.state.is_admitting))
        elif choice < 0.965:
            sequences = self.state.sequences.values()
            staying = {each.request.request_id for each in sequences if each.decode_instance != DECODE}
            self.ended |= self.arrived - staying
            self.do(events.DecodeInstanceGone(DECODE, LIFE))
        elif choice < 0.97:
            self.ended |= self.arrived
            self.do(events.GatewayGone(GATEWAY))

    def arrive(self) -> None:
        request_id = RequestId(f"r{len(self.arrived)}")
        request = make_request(request_id, self.chance.randint(1, 30), self.chance.choice([1, 5]))
        decode_instance = self.chance.choice([DECODE, self.state.instance_id])
        task = events.TaskArrived(PrefillTask(request, decode_instance, LIFE))
        if not self.state.is_admitting:
            with pytest.raises(NoInstanceReady):
                handle(self.state, task)
            return
        self.arrived.add(request_id)
        self.do(task)

    def let_go(self) -> None:
        """The decode room has ended a sequence that stayed."""
        self.state.blocks.release(self.kept.pop())
        self.do(events.BlocksFreed())

    def take_over(self) -> None:
        """A sequence that ran in the decode room, which holds its blocks; its prompt may be here, too."""
        request_id = RequestId(f"r{len(self.arrived)}")
        if self.state.sequences and self.chance.random() < 0.3:
            request_id = self.chance.choice(list(self.state.sequences)).request_id
        tokens = self.chance.randint(1, 30)
        request = make_request(request_id, tokens, 40, output_ids=tuple(range(self.chance.randint(1, 9))))
        held_by = BlockOwner("handed-on", request_id, 0)
        needed = blocks_for(request.tokens - 1, self.state.layout.block_size)
        if self.state.blocks.try_allocate(held_by, needed):
            self.arrived.add(request_id)
            self.do(events.SequenceLeft(held_by, request, DECODE, LIFE, None))

    def ask(self, owner: BlockOwner) -> None:
        """For its next portion, of any size."""
        if owner in self.asked:
            return
        self.asked.add(owner)
        portion = self.portions.setdefault(owner, 0)
        max_bytes = self.chance.choice([1, 10, 50, EVERYTHING, None])
        self.do(events.PullArrived(pull_of(owner.request_id, 60, portion, max_bytes)))

    def refuse(self, owner: BlockOwner) -> None:
        """Only what nobody has asked for yet; an early offer may have come too early."""
        if owner in self.asked or self.portions.get(owner):
            return
        is_early = self.offers.pop(owner)
        error = self.chance.choice([FAILED, ErrorReply(Overloaded.code, "full")])
        self.do(events.OfferRefused(owner, error, is_early=is_early))

    def decline(self, owner: BlockOwner) -> None:
        """Only what is computed and nobody has asked for yet; here one of another instance says so, too."""
        is_early = self.offers[owner]
        if owner in self.asked or self.portions.get(owner) or is_early:
            return
        sequence = self.state.sequences[owner]
        if self.chance.random() < 0.2:
            stranger = DECODE if sequence.decode_instance != DECODE else HOME.decode_instance
            self.do(events.OfferDeclined(owner, stranger, self.state.instance_id))
        elif sequence.decode_instance == DECODE:
            del self.offers[owner]
            self.do(events.OfferDeclined(owner, DECODE, HOME.decode_instance))

    def end_search(self) -> None:
        """Of a sequence that is gone, too."""
        owner = self.sought.pop(self.chance.randrange(len(self.sought)))
        if self.chance.random() < 0.3:
            self.do(events.DecodeNotFound(owner, FAILED))
        else:
            self.do(events.DecodeFound(owner, HOME))

    def end_send(self) -> None:
        owner = self.sends.pop(self.chance.randrange(len(self.sends)))
        if self.chance.random() < 0.1:
            self.do(events.SendFailed(owner, FAILED))
        else:
            self.do(events.SendFinished(owner, 1, 0.1))

    def end_chunk(self) -> None:
        chunk, _ = self.chunks.popleft()
        self.layers = 0
        if self.chance.random() < 0.05:
            self.do(events.ChunkFailed(ErrorReply("internal_error", "broken")))
            return
        tokens = [SampledToken(self.chance.choice([EOS, 7, 8])) if piece.is_last else None for piece in chunk]
        self.do(events.ChunkFinished(tuple(tokens)))

    def finish(self) -> None:
        """Everybody pulls to the end; a state that waits for nothing is a deadlock."""
        while not self.state.is_idle:
            waiting = [owner for owner in self.offers if owner not in self.asked]
            is_under_way = self.chunks or self.sends or waiting or self.sought or self.kept
            assert is_under_way, "sequences wait, and nothing is under way"
            if self.sends:
                self.end_send()
            elif self.chunks:
                self.end_chunk()
            elif self.sought:
                self.end_search()
            elif self.kept:
                self.let_go()
            else:
                self.ask(waiting[0])
        while self.kept:
            self.let_go()
