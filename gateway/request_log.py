"""The one line that a gateway logs of each call, by the ids that its client and the other services know.

Numbers and names only: of what was asked and answered there are counts, never text and never token ids.
"""

import logging
import time

from common.latency import end_to_end_s
from gateway.calls import Call
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


def _ending(generation: Generation) -> str:
    """Its finish reason, its error's code, or ``unfinished``: refused, or its client has left."""
    if generation.error is not None:
        return generation.error.code
    return generation.finish_reason or "unfinished"
