"""The one line that a gateway logs of each call, by the ids that its client and the other services know, and
that of each refusal.

Numbers and names only: of what was asked and answered there are counts, never text and never token ids.
"""

import logging
import time

from common.errors import RequestError
from common.latency import end_to_end_s
from gateway.calls import Call
from gateway.errors import status_of
from gateway.exchange import Exchange
from gateway.generation import Generation

log = logging.getLogger("lamella.gateway")


def log_call(exchange: Exchange, call: Call) -> None:
    """``http_request`` is the answer's ``x-request-id``; ``requests`` are in other services' lines, too."""
    generations = call.generations
    first = generations[0]
    log.info(
        "call_ended",
        extra={
            "http_request": exchange.request_id,
            "requests": [each.request.request_id for each in generations],
            "service_class": call.service_class,
            "prompt_tokens": call.prompt_tokens,
            "output_tokens": sum(len(each.output_ids) for each in generations),
            "attempts": sum(each.request.attempt + 1 for each in generations),
            "endings": [_ending(each) for each in generations],
            "ttft_s": None if first.ttft_s is None else round(first.ttft_s, 6),
            "duration_s": round(end_to_end_s(exchange.arrived_s, time.monotonic()), 6),
        },
    )


def log_refusal(exchange: Exchange, error: RequestError, *, is_told: bool) -> None:
    """A warning where the mesh is why. Where the client is, its error's words stay away: they are often its
    own, as are the names below a field; ``is_told``: whether such a refusal is a line at all."""
    facts: dict[str, object] = {"http_request": exchange.request_id, "status": status_of(error)}
    if status_of(error) >= 500:
        log.warning("request_refused", extra={**facts, "code": error.code, "error": error.message})
    elif is_told:
        field = None if error.param is None else error.param.partition(".")[0]
        log.info("request_refused", extra={**facts, "code": error.code, "field": field})


def _ending(generation: Generation) -> str:
    """Its finish reason, its error's code, or ``unfinished``: refused, or its client has left."""
    if generation.error is not None:
        return generation.error.code
    return generation.finish_reason or "unfinished"
