"""Each traced sequence of a room becomes a span when it is not there any more, however that came."""

import time
from collections.abc import Iterator

import pytest

from common.config import TelemetryConfig
from common.ids import GatewayId, RequestId
from common.kv.blocks import BlockOwner
from common.messages import FinishReason, GenerationRequest, SampledToken, SamplingParams, TokenEvent
from common.room_spans import RoomSpans
from common.spans import spans
from tests.otlp_receiver import OtlpReceiver, otlp_receiver

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    """Of this process's own spans."""
    with otlp_receiver() as receiver:
        spans.start(TelemetryConfig(otlp_endpoint=receiver.url), "decode", "decode-0")
        yield receiver
        spans.stop()


def request(name: str, traceparent: str | None = TRACEPARENT) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(name),
        gateway_id=GatewayId("gateway-0"),
        prompt_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=9),
        traceparent=traceparent,
    )


def owner(name: str) -> BlockOwner:
    return BlockOwner("decode", RequestId(name), 0)


def token(name: str, index: int, finish: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(RequestId(name), 0, index, SampledToken(7), finish)


def test_a_span_ends_with_its_sequence_and_says_how(receiver: OtlpReceiver) -> None:
    room, began_s = RoomSpans("decode"), time.monotonic()
    for name in ("finished", "moved", "here"):
        room.begin(request(name), began_s)
    room.note_tokens([token("finished", 1), token("moved", 1), token("here", 1)])
    room.note_tokens([token("finished", 2, "length")])
    room.end_departed({owner("here")}, began_s + 0.5)
    spans.stop()
    found = {str(span.attributes["lamella.request.id"]): span for span in receiver.spans}
    assert found.keys() == {"finished", "moved"}
    told = {
        name: (span.attributes["lamella.ending"], span.attributes["gen_ai.usage.output_tokens"])
        for name, span in found.items()
    }
    assert told == {"finished": ("length", 2), "moved": ("left", 1)}
    for span in found.values():
        assert (span.name, span.trace_id) == ("decode", TRACE_ID)
        assert span.attributes["gen_ai.usage.input_tokens"] == 3
        assert span.ended_ns - span.began_ns == pytest.approx(0.5e9, abs=0.01e9)


def test_who_is_not_traced_leaves_no_span(receiver: OtlpReceiver) -> None:
    room, now = RoomSpans("decode"), time.monotonic()
    room.begin(request("untraced", traceparent=None), now)
    room.end_departed((), now)
    spans.stop()
    assert receiver.spans == []


def test_work_that_is_done_ends_the_span_once_though_the_sequence_stays(receiver: OtlpReceiver) -> None:
    room, now = RoomSpans("prefill"), time.monotonic()
    prompt = BlockOwner("prefill", RequestId("prompt"), 0)
    room.begin(request("prompt"), now)
    room.end(prompt, now + 0.1, {"lamella.queue_s": 0.02})
    room.end(prompt, now + 0.2, {})
    room.end_departed((), now + 0.3)
    spans.stop()
    (span,) = receiver.spans
    assert (span.name, span.attributes["lamella.queue_s"]) == ("prefill", 0.02)
