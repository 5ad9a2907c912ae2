"""Spans of requests for OpenTelemetry, sent by OTLP over HTTP to where `[telemetry] otlp_endpoint` says.

The only importer of opentelemetry, an optional extra: without an endpoint nothing of it is loaded. A request
carries the W3C traceparent of its gateway's span with it (``GenerationRequest.traceparent``): whoever works
for it, whenever and in whatever batch, knows whose span its own belongs under. One that is not sampled
carries none, and costs nothing. Attributes have OpenTelemetry's names for generative AI (``gen_ai.…``) where
there are such. Ids, counts and times only: no prompt, no answer.

Spans leave in batches from a thread of the library's; a collector that is away costs the spans, nothing else.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from common.config import TelemetryConfig
from common.errors import ConfigError

Attribute = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Attribute]

TRACEPARENT = "traceparent"
EXPORT_TIMEOUT_S = 3.0
"""Of one batch, and of what is left at the end."""


class SpanEvent(NamedTuple):
    """``at_s`` is on the process's monotonic clock."""

    name: str
    at_s: float
    attributes: Attributes


class RequestSpan:
    """A span under way, under which others come: ``traceparent`` names it. Ended once."""

    def __init__(self, span: Any, traceparent: str) -> None:
        self.traceparent = traceparent
        self._span = span

    def end(self, attributes: Attributes, events: Sequence[SpanEvent] = (), error: str | None = None) -> None:
        """It ends now. ``error``: the code of what ended it, None where nothing failed."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(dict(attributes))
        for event in events:
            self._span.add_event(event.name, dict(event.attributes), _wall_ns(event.at_s))
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class Spans:
    """One a process. Nothing is recorded before ``start``, nor without an endpoint."""

    def __init__(self) -> None:
        self._tracer: Any = None
        self._provider: Any = None

    @property
    def is_on(self) -> bool:
        return self._tracer is not None

    def start(self, settings: TelemetryConfig, kind: str, service_id: str) -> None:
        """Raises ConfigError where there is an endpoint and the library is not installed."""
        if settings.otlp_endpoint is None:
            return
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        except ImportError as exc:
            rule = f"needs the optional packages of lamella[otel] ({exc})"
            raise ConfigError("telemetry.otlp_endpoint", settings.otlp_endpoint, rule) from exc
        names = {"service.namespace": "lamella", "service.name": kind, "service.instance.id": service_id}
        exporter = OTLPSpanExporter(
            f"{settings.otlp_endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S
        )
        self._provider = TracerProvider(
            ParentBased(TraceIdRatioBased(settings.sampled_share)),
            Resource.create(names),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("lamella")

    def stop(self) -> None:
        """Sends what is left. Blocks, for ``EXPORT_TIMEOUT_S`` at most where nobody answers."""
        provider, self._provider, self._tracer = self._provider, None, None
        if provider is not None:
            provider.force_flush(round(EXPORT_TIMEOUT_S * 1000))
            provider.shutdown()

    def begin(self, name: str, began_s: float, traceparent: str | None) -> RequestSpan | None:
        """A request's first span in this mesh, under its client's if that sent one. ``began_s`` is on the
        monotonic clock. None where it is not sampled."""
        if self._tracer is None:
            return None
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(
            name, _context_of(traceparent), SpanKind.SERVER, start_time=_wall_ns(began_s)
        )
        return RequestSpan(span, _traceparent_of(span)) if span.is_recording() else None

    def record(
        self, name: str, traceparent: str | None, began_s: float, attributes: Attributes, ended_s: float
    ) -> None:
        """A span that is over, under ``traceparent``; nothing for None. Times on the monotonic clock."""
        if self._tracer is None or traceparent is None:
            return
        span = self._tracer.start_span(name, _context_of(traceparent), start_time=_wall_ns(began_s))
        span.set_attributes(dict(attributes))
        span.end(_wall_ns(ended_s))


spans = Spans()


def traceparent_of(message: object) -> str | None:
    """Of the request that a message is about, if it is about one that is traced."""
    traceparent: str | None = getattr(getattr(message, "request", None), "traceparent", None)
    return traceparent


def _wall_ns(monotonic_s: float) -> int:
    """What the wall clock said then, in ns since 1970, if nobody has set it since."""
    return time.time_ns() - round((time.monotonic() - monotonic_s) * 1e9)


def _context_of(traceparent: str | None) -> Any:
    """The library's context; an empty one for what is no traceparent."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {} if traceparent is None else {TRACEPARENT: traceparent}
    return TraceContextTextMapPropagator().extract(carrier, Context())


def _traceparent_of(span: Any) -> str:
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
    return carrier[TRACEPARENT]
