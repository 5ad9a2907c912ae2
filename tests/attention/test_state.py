import msgspec
import pytest

from attention.state import AttentionState, BindArrived, EndProcess, ModelWorkerGone, StartServing
from common.errors import InvalidRequest, Overloaded
from common.exchange_shape import ExchangeShape
from common.ids import InstanceId
from common.kv.layout import KVLayout
from common.messages import BindAttention
from common.spec import AttentionSpec

LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=8, block_size=4, element_bytes=4)
BIND = BindAttention(
    decode_instance=InstanceId("decode-0"),
    layout=LAYOUT,
    attention_specs=(AttentionSpec(3, 1, 8, 0.5), AttentionSpec(3, 1, 8, 0.5)),
    shape=ExchangeShape(8, 100, 3, 1, 8, "float32"),
    endpoint=b"",
    response_region="attention-response-0",
)


def make_state(kv_bytes: int = 10 * LAYOUT.block_bytes, exchange_bytes: int = 1 << 20) -> AttentionState:
    return AttentionState("attention-0", kv_bytes, exchange_bytes)


def test_the_first_who_binds_is_served_with_all_the_memory_until_it_is_gone() -> None:
    state = make_state()
    assert state.handle(BindArrived(BIND)) == [StartServing(BIND, 10)]
    state.check()
    with pytest.raises(Overloaded, match="serves decode-0"):
        state.handle(BindArrived(msgspec.structs.replace(BIND, decode_instance=InstanceId("decode-1"))))
    assert state.handle(ModelWorkerGone()) == [EndProcess()]
    state.check()
    with pytest.raises(ValueError, match="nobody"):
        state.handle(ModelWorkerGone())


@pytest.mark.parametrize(
    ("state", "bind", "reason"),
    [
        (make_state(kv_bytes=LAYOUT.block_bytes - 1), BIND, r"attention\.kv_bytes"),
        (make_state(exchange_bytes=64), BIND, r"attention\.exchange_bytes = 64"),
        (make_state(), msgspec.structs.replace(BIND, attention_specs=()), "0 attention specs for 2 layers"),
        (
            make_state(),
            msgspec.structs.replace(BIND, shape=msgspec.structs.replace(BIND.shape, head_dim=4)),
            "not the layout's",
        ),
        (
            make_state(),
            msgspec.structs.replace(
                BIND,
                layout=LAYOUT.of_heads(range(1)),
                shape=ExchangeShape(8, 100, 0, 1, 8, "float32"),
                attention_specs=(BIND.attention_specs[0],),
            ),
            "1 attention specs",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_and_the_worker_stays_free(
    state: AttentionState, bind: BindAttention, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        state.handle(BindArrived(bind))
    state.check()
    assert state.serves is None
