"""Messages survive the wire as the unions they travel in; errors survive as themselves."""

from types import UnionType

import msgspec
import pytest

from common.errors import REQUEST_ERRORS, InternalError, Overloaded, RequestError
from common.ids import Incarnation, InstanceId, RequestId
from common.kv.layout import KVLayout
from common.messages import (
    Announcement,
    CancelRequest,
    DecodeTask,
    ErrorReply,
    FlipRole,
    GatewayEvent,
    GatewayGone,
    InstanceCall,
    InstanceEvent,
    InstanceGone,
    InstanceLife,
    KVDestination,
    KVLinkFailed,
    KVLinkWorks,
    LeaveSequence,
    OfferDeclined,
    Placement,
    PlaceMoved,
    PrefillTask,
    PullKV,
    RequestEnded,
    SampledToken,
    SchedulerCall,
    SchedulerEvent,
    SequenceFailed,
    SequenceMoved,
    TokenBatch,
    TokenEvent,
    as_request_error,
    error_reply,
)
from tests.requests import GATEWAY, make_request

REQUEST = RequestId("r1")
INSTANCE = InstanceId("decode-0")
LIFE = Incarnation("i")
POOL = KVDestination(b"\x00\xff", 0, 3, 64)
LAYOUT = KVLayout(layers=2, kv_heads=3, head_dim=4, block_size=16, element_bytes=2)
TOKEN = TokenEvent(REQUEST, 1, 4, SampledToken(9, -0.5, ((9, -0.5), (3, -1.25))), "length")
TRAVELLERS: list[tuple[UnionType, msgspec.Struct]] = [
    (InstanceEvent, LeaveSequence(REQUEST, 1, INSTANCE, epoch=3)),
    (InstanceEvent, OfferDeclined(REQUEST, 1, INSTANCE, INSTANCE)),
    (InstanceCall, PrefillTask(make_request(stop_token_ids=(1, 2)), INSTANCE, Incarnation("i"))),
    (InstanceCall, DecodeTask(make_request(output_ids=(5,)), INSTANCE, Incarnation("i"), 4)),
    (
        InstanceCall,
        PullKV(REQUEST, 0, Incarnation("i"), INSTANCE, (3, 1), LAYOUT, (POOL,), 0, 1 << 20),
    ),
    (InstanceCall, FlipRole("prefill")),
    (GatewayEvent, TokenBatch(INSTANCE, (TOKEN, TokenEvent(REQUEST, 0, 0, SampledToken(1))))),
    (SchedulerCall, PlaceMoved(make_request(output_ids=(5,)), InstanceLife(INSTANCE, LIFE))),
    (GatewayEvent, SequenceMoved(REQUEST, 0, Placement(INSTANCE, LIFE, INSTANCE, LIFE), 7)),
    (GatewayEvent, SequenceFailed(REQUEST, 0, ErrorReply("x", "y", None, 1.5), True, INSTANCE)),
    (InstanceEvent, CancelRequest(REQUEST, 2)),
    (InstanceEvent, GatewayGone(GATEWAY)),
    (Announcement, InstanceGone(INSTANCE, Incarnation("i"))),
    (SchedulerEvent, RequestEnded(REQUEST)),
    (SchedulerEvent, KVLinkFailed(INSTANCE, InstanceId("decode-1"))),
    (SchedulerEvent, KVLinkWorks(INSTANCE, InstanceId("decode-1"))),
]


@pytest.mark.parametrize(
    ("union", "message"), TRAVELLERS, ids=[type(each).__name__ for _, each in TRAVELLERS]
)
def test_a_message_comes_back_as_it_was_sent(union: UnionType, message: msgspec.Struct) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=union) == message


def test_a_message_of_another_conversation_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(RequestEnded(REQUEST)), type=InstanceCall)


@pytest.mark.parametrize("kind", REQUEST_ERRORS.values(), ids=REQUEST_ERRORS.keys())
def test_an_error_is_raised_on_the_other_side_as_what_it_was(kind: type[RequestError]) -> None:
    error = kind("why", param="n", retry_after_s=2.0)
    again = as_request_error(error_reply(error))
    assert type(again) is kind
    assert (again.message, again.param, again.retry_after_s) == ("why", "n", 2.0)


def test_an_unknown_code_becomes_an_internal_error() -> None:
    assert type(as_request_error(ErrorReply("from-a-later-version", "m"))) is InternalError
    assert Overloaded.code == "overloaded"
