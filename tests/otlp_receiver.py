"""A collector that keeps what it is sent: OTLP over HTTP, protobuf, as any collector takes it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

WAIT_S = 30.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class SeenSpan:
    """Ids are hexadecimal, times ns since 1970."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, object]
    events: list[str]
    is_error: bool


@dataclass(slots=True)
class OtlpReceiver:
    """``bodies``: as they came."""

    url: str
    bodies: list[bytes] = field(default_factory=list)

    @property
    def spans(self) -> list[SeenSpan]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        return [
            span for body in self.bodies for span in _spans_of(ExportTraceServiceRequest.FromString(body))
        ]

    def wait_spans(self, trace_id: str, names: set[str]) -> list[SeenSpan]:
        """Of that trace, once there is one of each name. Fails with what came instead."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            found = [span for span in self.spans if span.trace_id == trace_id]
            if names <= {span.name for span in found}:
                return found
            assert time.monotonic() < deadline_s, f"{names} wanted, seen: {self.spans}"
            time.sleep(POLL_S)


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """Skips loudly where the optional packages are not installed."""
    for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        pytest.importorskip(package, reason="lamella[otel] is not installed")

    class Take(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
            receiver.bodies.append(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Tests print enough."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Take)
    receiver = OtlpReceiver(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _spans_of(request: Any) -> Iterator[SeenSpan]:
    for of_service in request.resource_spans:
        service = _attributes(of_service.resource.attributes)
        for scope in of_service.scope_spans:
            for span in scope.spans:
                yield SeenSpan(
                    str(service["service.name"]),
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _attributes(span.attributes),
                    [event.name for event in span.events],
                    span.status.code == 2,
                )


def _attributes(pairs: Any) -> dict[str, object]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
