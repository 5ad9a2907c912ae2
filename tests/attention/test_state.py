"""Whom an attention worker serves."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.state import (
    AttentionCommand,
    AttentionEvent,
    AttentionState,
    BindArrived,
    BindingFailed,
    DrainStarted,
    InstanceLost,
    StartServing,
    StopServing,
    TellDraining,
    UnbindArrived,
)
from common.errors import InvalidRequest, NoInstanceReady, Overloaded, RequestError
from common.exchange_shape import ExchangeShape
from common.ids import BindingId, Incarnation, InstanceId
from common.kv.layout import KVLayout
from common.messages import BindAttention
from common.spec import AttentionSpec

LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=8, block_size=4, element_bytes=4)


def bind_of(instance: str = "decode-0", life: str = "i1", binding: str = "b1") -> BindAttention:
    return BindAttention(
        binding_id=BindingId(binding),
        decode_instance=InstanceId(instance),
        decode_incarnation=Incarnation(life),
        layout=LAYOUT,
        attention_specs=(AttentionSpec(3, 1, 8, 0.5), AttentionSpec(3, 1, 8, 0.5)),
        shape=ExchangeShape(8, 100, 3, 1, 8, "float32"),
        lanes=1,
        endpoint=b"",
        salt=7,
    )


BIND = bind_of()


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
        StopServing(BindingId("b1"))
    ]
    assert handle(state, UnbindArrived(BindingId("b2"))) == [StopServing(BindingId("b2"))]
    assert handle(state, BindingFailed(BindingId("b2"))) == []


def test_an_instances_next_binding_ends_its_former_one() -> None:
    state = make_state()
    handle(state, BindArrived(BIND))
    again = bind_of(life="i2", binding="b2")
    assert handle(state, BindArrived(again)) == [StopServing(BindingId("b1")), StartServing(again, 10)]


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
def test_every_binding_that_starts_stops_once(seed: int) -> None:
    chance = random.Random(seed)
    state = make_state(decode_instances=chance.randint(1, 3))
    serving: set[BindingId] = set()
    for step in range(60):
        instance, life = f"decode-{chance.randint(0, 3)}", f"i{chance.randint(0, 2)}"
        known = chance.choice(sorted(state.bindings)) if state.bindings else BindingId("b-none")
        possible: list[AttentionEvent] = [
            BindArrived(bind_of(instance, life, f"b{step}")),
            BindArrived(bind_of(instance, life, f"b{step}")),
            UnbindArrived(known),
            BindingFailed(known),
            InstanceLost(InstanceId(instance), Incarnation(life)),
        ]
        event = chance.choice(possible)
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
        assert serving == state.bindings.keys()
