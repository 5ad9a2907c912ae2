"""Whom an attention worker serves."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.state import (
    KEEP_S,
    AttentionCommand,
    AttentionEvent,
    AttentionState,
    BindArrived,
    BindingFailed,
    DrainStarted,
    DropKV,
    InstanceLost,
    KeepExpired,
    KeepKV,
    StartServing,
    StopServing,
    TellDraining,
    UnbindArrived,
)
from common.errors import (
    HandoverFailed,
    InvalidRequest,
    NoInstanceReady,
    Overloaded,
    RequestError,
    UnknownRequest,
)
from common.exchange_shape import ExchangeShape
from common.ids import BindingId, Incarnation, InstanceId
from common.kv.layout import KVLayout
from common.messages import InstanceLife
from common.messages.attention import BindAttention
from common.spec import AttentionSpec

LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=8, block_size=4, element_bytes=4)


def bind_of(instance: str = "decode-0", life: str = "i1", binding: str = "b1") -> BindAttention:
    return BindAttention(
        binding_id=BindingId(binding),
        decode_instance=InstanceId(instance),
        decode_incarnation=Incarnation(life),
        layout=LAYOUT,
        first_head=0,
        attention_specs=(AttentionSpec(3, 1, 8, 0.5), AttentionSpec(3, 1, 8, 0.5)),
        shape=ExchangeShape(8, 100, 3, 1, 8, "float32"),
        lanes=1,
        endpoint=b"",
        salt=7,
    )


BIND = bind_of()
FORMER = InstanceLife(BIND.decode_instance, BIND.decode_incarnation)


def make_state(
    kv_bytes: int = 10 * LAYOUT.block_bytes, exchange_bytes: int = 1 << 20, decode_instances: int = 1
) -> AttentionState:
    return AttentionState("attention-0", kv_bytes, exchange_bytes, decode_instances)


def handle(state: AttentionState, event: AttentionEvent) -> list[AttentionCommand]:
    commands = state.handle(event)
    state.check()
    return commands


def test_instances_share_the_memory_evenly_until_they_are_gone() -> None:
    state = make_state(decode_instances=2)
    other = bind_of("decode-1", "i2", "b2")
    assert handle(state, BindArrived(BIND)) == [StartServing(BIND, 5)]
    assert handle(state, BindArrived(other)) == [StartServing(other, 5)]
    with pytest.raises(Overloaded, match=r"attention\.decode_instances = 2"):
        handle(state, BindArrived(bind_of("decode-2", "i3", "b3")))
    assert handle(state, InstanceLost(InstanceId("decode-0"), Incarnation("older"))) == []
    assert handle(state, InstanceLost(InstanceId("decode-0"), Incarnation("i1"))) == [
        KeepKV(BindingId("b1"), KEEP_S)
    ]
    assert handle(state, UnbindArrived(BindingId("b2"))) == [StopServing(BindingId("b2"))]
    assert handle(state, BindingFailed(BindingId("b2"))) == []


def test_an_instances_next_life_ends_its_former_ones_binding_and_finds_the_kv_kept() -> None:
    state = make_state()
    handle(state, BindArrived(BIND))
    again = bind_of(life="i2", binding="b2")
    assert handle(state, BindArrived(again)) == [KeepKV(BindingId("b1"), KEEP_S), StartServing(again, 10)]
    assert state.kept_for(BindingId("b2"), FORMER) == "b1"
    assert handle(state, KeepExpired(BindingId("b1"))) == [DropKV(BindingId("b1"))]
    with pytest.raises(UnknownRequest, match="keeps no KV of decode-0"):
        state.kept_for(BindingId("b2"), FORMER)


def test_a_life_that_says_so_or_binds_again_leaves_nothing() -> None:
    state = make_state()
    handle(state, BindArrived(BIND))
    again = bind_of(binding="b2")
    assert handle(state, BindArrived(again)) == [StopServing(BindingId("b1")), StartServing(again, 10)]
    assert handle(state, BindingFailed(BindingId("b2"))) == [KeepKV(BindingId("b2"), KEEP_S)]
    third = bind_of(binding="b3")
    assert handle(state, BindArrived(third)) == [DropKV(BindingId("b2")), StartServing(third, 10)]
    assert handle(state, UnbindArrived(BindingId("b3"))) == [StopServing(BindingId("b3"))]
    assert state.kept == {}


def test_the_oldest_that_is_kept_makes_room_and_a_draining_worker_keeps_nothing() -> None:
    state = make_state()
    for life in ("i1", "i2"):
        handle(state, BindArrived(bind_of(life=life, binding=f"b-{life}")))
    assert handle(state, InstanceLost(InstanceId("decode-0"), Incarnation("i2"))) == [
        DropKV(BindingId("b-i1")),
        KeepKV(BindingId("b-i2"), KEEP_S),
    ]
    handle(state, BindArrived(bind_of(life="i3", binding="b-i3")))
    assert handle(state, DrainStarted()) == [
        TellDraining(BindingId("b-i3"), InstanceId("decode-0")),
        DropKV(BindingId("b-i2")),
    ]
    assert handle(state, BindingFailed(BindingId("b-i3"))) == [StopServing(BindingId("b-i3"))]


def test_kv_goes_on_only_with_the_same_heads_of_the_same_model() -> None:
    state = make_state(decode_instances=2)
    handle(state, BindArrived(BIND))
    handle(state, InstanceLost(InstanceId("decode-0"), Incarnation("i1")))
    others = (
        msgspec.structs.replace(bind_of("decode-1", "i2", "b2"), first_head=1),
        msgspec.structs.replace(
            bind_of("decode-2", "i3", "b3"), attention_specs=(AttentionSpec(3, 1, 8, 0.25),) * 2
        ),
    )
    for other in others:
        handle(state, BindArrived(other))
        with pytest.raises(HandoverFailed, match="other heads or another model"):
            state.kept_for(other.binding_id, FORMER)
    with pytest.raises(UnknownRequest, match="serves no binding b1"):
        state.kept_for(BindingId("b1"), FORMER)


def test_a_draining_worker_tells_whom_it_serves_and_takes_nobody_new() -> None:
    state = make_state(decode_instances=2)
    handle(state, BindArrived(BIND))
    assert handle(state, DrainStarted()) == [TellDraining(BindingId("b1"), InstanceId("decode-0"))]
    with pytest.raises(NoInstanceReady, match="draining"):
        handle(state, BindArrived(bind_of("decode-1", "i2", "b2")))


@pytest.mark.parametrize(
    ("state", "bind", "reason"),
    [
        (make_state(kv_bytes=LAYOUT.block_bytes - 1), BIND, r"attention\.kv_bytes"),
        (make_state(exchange_bytes=64), BIND, r"attention\.exchange_bytes = 64"),
        (make_state(), msgspec.structs.replace(BIND, attention_specs=()), "0 attention specs for 2 layers"),
        (make_state(), msgspec.structs.replace(BIND, lanes=0), "lanes = 0"),
        (
            make_state(),
            msgspec.structs.replace(BIND, shape=msgspec.structs.replace(BIND.shape, head_dim=4)),
            "not the layout's",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_and_the_worker_stays_free(
    state: AttentionState, bind: BindAttention, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        handle(state, BindArrived(bind))
    assert state.bindings == {}


@given(st.integers(0, 1 << 32))
def test_every_binding_that_starts_stops_once_and_what_is_kept_is_dropped_once(seed: int) -> None:
    chance = random.Random(seed)
    state = make_state(decode_instances=chance.randint(1, 3))
    serving: set[BindingId] = set()
    kept: set[BindingId] = set()
    for step in range(60):
        instance, life = f"decode-{chance.randint(0, 3)}", f"i{chance.randint(0, 2)}"
        known = chance.choice(sorted({*state.bindings, *state.kept, BindingId("b-none")}))
        possible: list[AttentionEvent] = [
            BindArrived(bind_of(instance, life, f"b{step}")),
            BindArrived(bind_of(instance, life, f"b{step}")),
            UnbindArrived(known),
            BindingFailed(known),
            KeepExpired(chance.choice(sorted({*state.kept, BindingId("b-none")}))),
            InstanceLost(InstanceId(instance), Incarnation(life)),
        ]
        event = DrainStarted() if step == 50 else chance.choice(possible)
        try:
            commands = handle(state, event)
        except RequestError:
            continue
        for command in commands:
            match command:
                case StartServing(bind):
                    serving.add(bind.binding_id)
                case StopServing(binding_id):
                    serving.remove(binding_id)
                case KeepKV(binding_id):
                    serving.remove(binding_id)
                    kept.add(binding_id)
                case DropKV(binding_id):
                    kept.remove(binding_id)
        assert serving == state.bindings.keys()
        assert kept == state.kept.keys()
