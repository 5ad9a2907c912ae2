"""Spans reach a collector over OTLP as they were told; without one nothing is loaded."""

import subprocess
import sys
import time
from pathlib import Path

import nats
import pytest

from common.bus import Bus
from common.config import TelemetryConfig
from common.config_file import load_config
from common.errors import ConfigError
from common.ids import GatewayId, RequestId
from common.messages import Acknowledged, GenerationRequest, SamplingParams, SubmitRequest
from common.spans import SpanEvent, Spans
from common.subjects import Subjects
from tests.common.buses import WAIT_S, connected, run
from tests.otlp_receiver import otlp_receiver

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENTS_SPAN = "b7ad6b7169203331"


def client_says(is_sampled: bool) -> str:
    return f"00-{TRACE_ID}-{CLIENTS_SPAN}-{'01' if is_sampled else '00'}"


def test_spans_come_under_their_client_s_with_times_of_the_wall_clock() -> None:
    with otlp_receiver() as receiver:
        spans = Spans()
        spans.start(TelemetryConfig(otlp_endpoint=receiver.url), "gateway", "gateway-0")
        began_s, began_ns = time.monotonic() - 2.0, time.time_ns() - 2 * 10**9
        root = spans.begin("gateway.request", began_s, client_says(is_sampled=True))
        assert root is not None
        spans.record("prefill", root.traceparent, began_s + 0.5, {"lamella.attempt": 1}, began_s + 1.0)
        root.end(
            {"gen_ai.provider.name": "lamella"}, [SpanEvent("first_token", began_s + 1, {})], "overloaded"
        )
        most_ns = (time.monotonic() - began_s) * 1e9
        spans.stop()
        prefill, gateway = receiver.wait_spans(TRACE_ID, {"gateway.request", "prefill"})
    assert (gateway.service, gateway.parent_id, gateway.is_error) == ("gateway", CLIENTS_SPAN, True)
    assert gateway.attributes == {"gen_ai.provider.name": "lamella", "error.type": "overloaded"}
    assert gateway.events == ["first_token"]
    assert abs(gateway.began_ns - began_ns) < 0.2e9
    assert 2e9 - 1e6 < gateway.ended_ns - gateway.began_ns < most_ns + 1e6
    assert (prefill.parent_id, prefill.attributes) == (gateway.span_id, {"lamella.attempt": 1})
    assert prefill.began_ns - gateway.began_ns == pytest.approx(0.5e9, abs=0.05e9)
    assert prefill.ended_ns - prefill.began_ns == pytest.approx(0.5e9, abs=0.05e9)


def test_a_client_s_word_on_sampling_counts_and_else_the_share() -> None:
    with otlp_receiver() as receiver:
        spans = Spans()
        hardly_any = TelemetryConfig(otlp_endpoint=receiver.url, sampled_share=1e-9)
        spans.start(hardly_any, "gateway", "gateway-0")
        assert spans.begin("gateway.request", time.monotonic(), client_says(is_sampled=False)) is None
        assert spans.begin("gateway.request", time.monotonic(), None) is None
        assert spans.begin("gateway.request", time.monotonic(), "no traceparent") is None
        sampled = spans.begin("gateway.request", time.monotonic(), client_says(is_sampled=True))
        assert sampled is not None
        assert sampled.traceparent.startswith(f"00-{TRACE_ID}-")
        spans.stop()


def test_a_collector_that_is_away_costs_the_spans_and_seconds_at_most() -> None:
    with otlp_receiver() as receiver:
        gone = receiver.url
    spans = Spans()
    spans.start(TelemetryConfig(otlp_endpoint=gone), "gateway", "gateway-0")
    root = spans.begin("gateway.request", time.monotonic(), None)
    assert root is not None
    root.end({})
    began_s = time.monotonic()
    spans.stop()
    assert time.monotonic() - began_s < 10.0


def test_without_an_endpoint_nothing_of_the_library_is_loaded() -> None:
    question = (
        "import sys; from common.spans import spans; from common.config import TelemetryConfig;"
        "spans.start(TelemetryConfig(), 'gateway', 'gateway-0');"
        "assert spans.begin('x', 0.0, None) is None; spans.record('x', 'y', 0.0, {}, 1.0); spans.stop();"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_an_endpoint_comes_from_the_variable_that_others_read_too() -> None:
    config = load_config(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"})
    assert config.telemetry.otlp_endpoint == "http://collector:4318"
    with pytest.raises(ConfigError, match=r"telemetry.otlp_endpoint = .* must begin with http"):
        load_config(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"})


def test_an_empty_endpoint_is_none_and_leaves_the_file_s(tmp_path: Path) -> None:
    empty = {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}
    assert load_config(None, empty).telemetry.otlp_endpoint is None
    file = tmp_path / "lamella.toml"
    file.write_text('[telemetry]\notlp_endpoint = "http://collector:4318"\n')
    assert load_config(file, empty).telemetry.otlp_endpoint == "http://collector:4318"


def test_empty_variables_of_the_library_s_own_are_as_if_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the library has it since the version that is asked for (pyproject.toml)."""
    for name in ("ENDPOINT", "COMPRESSION", "TIMEOUT", "HEADERS", "CERTIFICATE"):
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_TRACES_{name}", "")
    with otlp_receiver() as receiver:
        spans = Spans()
        spans.start(TelemetryConfig(otlp_endpoint=receiver.url), "gateway", "gateway-0")
        root = spans.begin("gateway.request", time.monotonic(), client_says(is_sampled=True))
        assert root is not None
        root.end({"lamella.attempt": 1})
        spans.stop()
        [span] = receiver.wait_spans(TRACE_ID, {"gateway.request"})
    assert span.attributes == {"lamella.attempt": 1}


def test_calls_about_a_traced_request_say_so_in_their_nats_header(nats_url: str, namespace: str) -> None:
    """So whoever looks at NATS, its own tracing included, can follow a request without reading messages."""

    async def work() -> None:
        stranger = await nats.connect(nats_url)
        subject = Subjects(namespace).submit()
        heard = await stranger.subscribe(subject)
        await stranger.flush()
        async with connected(nats_url, namespace) as bus:
            for traceparent in (None, client_says(is_sampled=True)):
                await answered(bus, subject, SubmitRequest(request_of(traceparent)))
        headers = [(await heard.next_msg(WAIT_S)).headers for _ in range(2)]
        await stranger.close()
        assert headers == [None, {"traceparent": client_says(is_sampled=True)}]

    async def answered(bus: Bus, subject: str, message: SubmitRequest) -> None:
        async def answer(_: SubmitRequest) -> Acknowledged:
            return Acknowledged()

        if not message.request.traceparent:
            await bus.serve(subject, SubmitRequest, answer)
        await bus.call(subject, message, Acknowledged, WAIT_S)

    run(work())


def request_of(traceparent: str | None) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId("r-1"),
        gateway_id=GatewayId("gateway-0"),
        prompt_ids=(1, 2),
        sampling=SamplingParams(max_tokens=1),
        traceparent=traceparent,
    )
