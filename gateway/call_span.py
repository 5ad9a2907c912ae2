"""A call's span for OpenTelemetry: from its arrival to its last byte, over those of all who work for it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from common.errors import RequestCancelled, RequestError
from common.spans import TRACEPARENT, Attribute, SpanEvent, spans
from gateway.calls import Call
from gateway.exchange import Exchange

NAME = "gateway.request"
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
"""As OpenTelemetry's conventions for generative AI name them."""


@contextmanager
def traced(exchange: Exchange, call: Call) -> Iterator[None]:
    """Begins the span and names it in each choice's request, which no scheduler has seen yet."""
    parent = exchange.header(TRACEPARENT.encode()).decode("latin-1") or None
    span = spans.begin(NAME, exchange.arrived_s, parent)
    if span is None:
        yield
        return
    for generation in call.generations:
        generation.request = msgspec.structs.replace(generation.request, traceparent=span.traceparent)
    error: str | None = None
    try:
        yield
    except RequestError as exc:
        # Nothing failed where a client left; an event says so.
        has_left = isinstance(exc, RequestCancelled) and exchange.disconnected.is_set()
        error = None if has_left else exc.code
        raise
    except Exception as exc:
        error = type(exc).__name__
        raise
    finally:
        span.end(asked(exchange, call) | answered(call), _events(exchange, call), error)


def asked(exchange: Exchange, call: Call) -> dict[str, Attribute]:
    """What the client wants. Its stop strings are text of its own, and stay away."""
    sampling = call.generations[0].request.sampling
    facts: dict[str, Attribute] = {
        "gen_ai.operation.name": OPERATIONS[exchange.scope["path"]],
        "gen_ai.provider.name": "lamella",
        "gen_ai.request.model": call.head.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.choice.count": len(call.generations),
        "gen_ai.request.stream": call.is_streamed,
        "lamella.http_request": exchange.request_id,
        "lamella.requests": [each.request.request_id for each in call.generations],
        "lamella.service_class": call.service_class,
    }
    if sampling.top_k:
        facts["gen_ai.request.top_k"] = sampling.top_k
    return facts


def answered(call: Call) -> dict[str, Attribute]:
    """Counts and times of what came of it, until now."""
    generations = call.generations
    facts: dict[str, Attribute] = {
        "gen_ai.response.id": call.head.call_id,
        "gen_ai.response.model": call.head.model,
        "gen_ai.response.finish_reasons": [each.finish_reason or "error" for each in generations],
        "gen_ai.usage.input_tokens": call.prompt_tokens,
        "gen_ai.usage.output_tokens": sum(len(each.output_ids) for each in generations),
    }
    to_first_s = generations[0].ttft_s
    if to_first_s is not None:
        facts["gen_ai.response.time_to_first_chunk"] = to_first_s
    return facts


def _events(exchange: Exchange, call: Call) -> list[SpanEvent]:
    events: list[SpanEvent] = []
    for generation in call.generations:
        if generation.first_token_s is not None:
            facts = {"lamella.request.id": generation.request.request_id}
            events.append(SpanEvent("first_token", generation.first_token_s, facts))
        events += generation.continued
    if exchange.disconnected.is_set():
        events.append(SpanEvent("cancel", time.monotonic(), {}))
    return events
