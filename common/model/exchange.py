"""The memory through which a model worker and an attention worker exchange one step's attention.

Each side owns a region and the other writes into it (one-sided, host-bypassing: Lamina 2, section 4.1). Data
first, then a sequence number; the reader polls the number. Per layer there is no system call, no event loop,
no allocation. Numbers only grow: step s, layer l has number ``s · layers + l + 1``.

The *request* region lies with the attention worker: the step's plan, then Q, then K and V of each layer. The
*response* region lies with the model worker: the attention's output. A layer's tensors may be overwritten by
the next layer's because these are sent only after the output came back.

Relies on stores becoming visible in program order, as on x86-64.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from common.errors import ServiceError
from common.exchange_shape import ExchangeShape
from common.model.interface import SequenceChunk

PLAN, QUERY, KEY_VALUE = 0, 8, 16
"""Where each sequence number of the request region lies, in words of 8 bytes: a cache line each."""
OUTPUT = 0

SPINS = 400
YIELD_S = 0.0005
SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 0.00005, 0.001
LOOKS_PER_CHECK = 16
"""Sleeps between two looks at the clock and at whether the peer is still there."""


class PeerSilent(ServiceError):
    """The other side of an exchange did not answer in time, or is gone."""


@dataclass(frozen=True, slots=True)
class RequestRegion:
    """Views of one request region. ``shape``'s heads are this worker's share."""

    shape: ExchangeShape
    words: memoryview
    plan: memoryview
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class ResponseRegion:
    words: memoryview
    output: torch.Tensor


def request_region(memory: memoryview, shape: ExchangeShape) -> RequestRegion:
    words = memory.cast("q")
    plan_words = shape.plan_offset // 8
    return RequestRegion(
        shape,
        words,
        words[plan_words : plan_words + shape.plan_words],
        _tensor(memory, shape.q_offset, shape, shape.heads),
        _tensor(memory, shape.k_offset, shape, shape.kv_heads),
        _tensor(memory, shape.v_offset, shape, shape.kv_heads),
    )


def response_region(memory: memoryview, shape: ExchangeShape) -> ResponseRegion:
    return ResponseRegion(memory.cast("q"), _tensor(memory, shape.output_offset, shape, shape.heads))


def _tensor(memory: memoryview, offset: int, shape: ExchangeShape, heads: int) -> torch.Tensor:
    count = shape.max_tokens * heads * shape.head_dim
    flat = torch.frombuffer(memory, dtype=getattr(torch, shape.element_type), count=count, offset=offset)
    return flat.view(shape.max_tokens, heads, shape.head_dim)


def write_plan(region: RequestRegion, chunks: Sequence[SequenceChunk], step: int) -> None:
    """Announces step ``step``. Raises ValueError for a batch over the region's bounds."""
    words = [len(chunks)]
    for chunk in chunks:
        words += (chunk.start, chunk.length, len(chunk.block_table), *chunk.block_table)
    tokens = sum(chunk.length for chunk in chunks)
    if tokens > region.shape.max_tokens or len(words) > region.shape.plan_words:
        raise ValueError(f"a step of {tokens} tokens and {len(words)} words of plan: over {region.shape}")
    for index, word in enumerate(words):
        region.plan[index] = word
    region.words[PLAN] = step


def read_plan(region: RequestRegion) -> list[SequenceChunk]:
    plan = region.plan
    chunks = []
    place = 1
    for _ in range(plan[0]):
        start, length, blocks = plan[place : place + 3]
        place += 3
        chunks.append(SequenceChunk(tuple(plan[place : place + blocks]), start, length))
        place += blocks
    return chunks


def wait_until_reached(
    words: memoryview,
    place: int,
    number: int,
    timeout_s: float | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Polls until ``words[place] >= number``: spins, then yields the core, then sleeps ever longer.

    Raises PeerSilent after ``timeout_s``, or when ``is_over`` says that nobody will answer.
    """
    for _ in range(SPINS):
        if words[place] >= number:
            return
    began_s = time.monotonic()
    while time.monotonic() - began_s < YIELD_S:
        if words[place] >= number:
            return
        os.sched_yield()
    sleep_s = SHORTEST_SLEEP_S
    looks = 0
    while words[place] < number:
        time.sleep(sleep_s)
        sleep_s = min(1.5 * sleep_s, LONGEST_SLEEP_S)
        looks += 1
        if looks % LOOKS_PER_CHECK:
            continue
        waited_s = time.monotonic() - began_s
        if is_over():
            raise PeerSilent("the other side of the exchange is gone")
        if timeout_s is not None and waited_s > timeout_s:
            raise PeerSilent(f"the other side of the exchange has not answered for {waited_s:.1f} s")
