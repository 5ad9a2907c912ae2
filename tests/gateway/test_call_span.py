"""What a gateway tells a collector of its calls: how each went, and none of its text."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest

from common.config import TelemetryConfig
from common.errors import InstanceLost, Overloaded
from tests.gateway.clients import PROMPT, TEXT, client_of, complete, in_background, with_peer
from tests.gateway.conftest import gateway_config
from tests.gateway.processes import GatewayProcess, running_gateway
from tests.gateway.scripted import ScriptedPeer
from tests.otlp_receiver import OtlpReceiver, SeenSpan, otlp_receiver

CLIENTS_SPAN = "00f067aa0ba902b7"
NAME = "gateway.request"


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def traced_gateway(
    nats_url: str, redis_url: str, receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    config = msgspec.structs.replace(
        gateway_config(nats_url, redis_url), telemetry=TelemetryConfig(otlp_endpoint=receiver.url)
    )
    with running_gateway(config, tmp_path_factory.mktemp("traced")) as process:
        yield process


def under(trace_id: str, *, is_sampled: bool = True) -> dict[str, Any]:
    """The header of a client that traces, as an option of its call."""
    return {"extra_headers": {"traceparent": f"00-{trace_id}-{CLIENTS_SPAN}-{'01' if is_sampled else '00'}"}}


def the_span(receiver: OtlpReceiver, trace_id: str) -> SeenSpan:
    (span,) = receiver.wait_spans(trace_id, {NAME})
    assert span.parent_id == CLIENTS_SPAN
    return span


def test_a_stream_that_went_on_elsewhere_says_when_and_why_it_was_resumed(
    traced_gateway: GatewayProcess, receiver: OtlpReceiver, ids: list[int]
) -> None:
    trace_id = "11" * 16

    async def script(peer: ScriptedPeer) -> None:
        answer = in_background(complete(traced_gateway, **under(trace_id)))
        first = await peer.next_request()
        peer.tokens(first, ids[:2])
        peer.fail(first, InstanceLost("it is gone"), can_continue=True)
        second = await peer.next_request()
        assert first.traceparent == second.traceparent is not None
        peer.tokens(second, ids[2:], finish="length")
        assert await answer == TEXT

    with_peer(traced_gateway, script)
    span = the_span(receiver, trace_id)
    assert (span.events, span.is_error) == (["first_token", "resume"], False)
    assert span.attributes["gen_ai.request.stream"] is True
    assert span.attributes["gen_ai.usage.input_tokens"] == len(PROMPT["prompt"])
    assert span.attributes["gen_ai.usage.output_tokens"] == len(ids)
    assert not any(word.encode() in body for word in TEXT.split() for body in receiver.bodies)


def test_a_call_that_is_refused_is_an_error_by_its_code(
    traced_gateway: GatewayProcess, receiver: OtlpReceiver
) -> None:
    trace_id = "22" * 16

    async def script(peer: ScriptedPeer) -> None:
        peer.refusals.append(Overloaded("full", retry_after_s=1.0))
        async with client_of(traced_gateway) as client:
            with pytest.raises(openai.InternalServerError):
                await client.completions.create(**PROMPT, **under(trace_id))

    with_peer(traced_gateway, script)
    span = the_span(receiver, trace_id)
    assert (span.is_error, span.attributes["error.type"], span.events) == (True, "overloaded", [])


def test_a_client_that_leaves_is_no_error(
    traced_gateway: GatewayProcess, receiver: OtlpReceiver, ids: list[int]
) -> None:
    trace_id = "33" * 16

    async def script(peer: ScriptedPeer) -> None:
        async with client_of(traced_gateway) as client:
            options = PROMPT | under(trace_id)
            call = asyncio.create_task(client.completions.create(**options, stream=True))
            peer.tokens(await peer.next_request(), ids[:1])
            await (await call).close()

    with_peer(traced_gateway, script)
    span = the_span(receiver, trace_id)
    assert (span.events, span.is_error) == (["first_token", "cancel"], False)


def test_who_asks_not_to_be_traced_is_not(traced_gateway: GatewayProcess, receiver: OtlpReceiver) -> None:
    unwanted, wanted = "44" * 16, "55" * 16

    async def script(peer: ScriptedPeer) -> None:
        for trace_id, is_sampled in ((unwanted, False), (wanted, True)):
            options = under(trace_id, is_sampled=is_sampled)
            answer = in_background(complete(traced_gateway, **options))
            request = await peer.next_request()
            assert (request.traceparent is not None) == is_sampled
            peer.tokens(request, [1000], finish="length")
            await answer

    with_peer(traced_gateway, script)
    the_span(receiver, wanted)
    assert not [span for span in receiver.spans if span.trace_id == unwanted]


def test_a_span_lasts_as_long_as_its_call(
    traced_gateway: GatewayProcess, receiver: OtlpReceiver, ids: list[int]
) -> None:
    trace_id, pause_s = "66" * 16, 0.3
    began_ns = time.time_ns()

    async def script(peer: ScriptedPeer) -> None:
        answer = in_background(complete(traced_gateway, **under(trace_id)))
        request = await peer.next_request()
        await asyncio.sleep(pause_s)
        peer.tokens(request, ids, finish="length")
        await answer

    with_peer(traced_gateway, script)
    ended_ns = time.time_ns()
    span = the_span(receiver, trace_id)
    assert began_ns <= span.began_ns <= span.ended_ns <= ended_ns
    assert span.ended_ns - span.began_ns >= pause_s * 1e9
    to_first_s = span.attributes["gen_ai.response.time_to_first_chunk"]
    assert isinstance(to_first_s, float)
    assert pause_s <= to_first_s <= (ended_ns - began_ns) / 1e9
