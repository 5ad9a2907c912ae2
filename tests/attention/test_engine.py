"""A model worker and attention workers over real shared buffers, against attention in one process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from attention.engine import AttentionLoop
from common.errors import AttentionLost
from common.exchange_shape import ExchangeShape
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.model.attention import LocalAttention
from common.model.exchange import request_region, response_region
from common.model.interface import SequenceChunk
from common.model.program import ModelProgram
from common.transfer.buffers import SharedBuffer
from decode.remote_attention import RemoteAttention, WorkerExchange
from tests.common.model.conftest import MakeTiny, tiny

__all__ = ["tiny"]

CPU = torch.device("cpu")
BLOCKS = 12
BLOCK_SIZE = 4


def pool_of(layout: KVLayout) -> KVPool:
    return KVPool(layout, BLOCKS, torch.float32, CPU)


@contextmanager
def attention_workers(program: ModelProgram, count: int) -> Iterator[RemoteAttention]:
    """``count`` loops on threads, each with its share of the heads; all ended afterwards."""
    spec = program.spec
    over = threading.Event()
    exchanges, threads = [], []
    for index in range(count):
        heads, kv_heads = spec.heads // count, spec.kv_heads // count
        shape = ExchangeShape(16, 256, heads, kv_heads, spec.head_dim, "float32")
        request_buffer = SharedBuffer(shape.request_bytes)
        response_buffer = SharedBuffer(shape.response_bytes)
        request = request_region(request_buffer.memory, shape)
        response = response_region(response_buffer.memory, shape)
        pool = pool_of(KVLayout(spec.layers, kv_heads, spec.head_dim, BLOCK_SIZE, 4))
        shares = [
            msgspec.structs.replace(each, heads=heads, kv_heads=kv_heads) for each in program.attention_specs
        ]
        loop = AttentionLoop(pool, shares, request, response, over.is_set)
        threads.append(threading.Thread(target=loop.run, daemon=True))
        exchanges.append(
            WorkerExchange(
                f"attention-{index}",
                range(index * heads, (index + 1) * heads),
                range(index * kv_heads, (index + 1) * kv_heads),
                request,
                response,
                over.is_set,
            )
        )
    for thread in threads:
        thread.start()
    try:
        yield RemoteAttention(exchanges, spec.layers, spec.heads)
    finally:
        over.set()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


STEPS = (
    ([SequenceChunk((3, 1), 0, 5)], [9, 4, 2, 7, 1]),
    ([SequenceChunk((0,), 0, 3), SequenceChunk((3, 1), 5, 1)], [5, 6, 8, 3]),
    ([SequenceChunk((0,), 3, 1), SequenceChunk((3, 1), 6, 1), SequenceChunk((5,), 0, 1)], [1, 2, 3]),
    ([SequenceChunk((3, 1), 7, 1)], [11]),
)
"""Batches that sequences join and leave, and a prompt that arrives beside decode."""


def logits_of(program: ModelProgram, attention: Any) -> list[torch.Tensor]:
    results = []
    for chunks, tokens in STEPS:
        attention.begin(chunks)
        positions = [chunk.start + each for chunk in chunks for each in range(chunk.length)]
        rows = torch.arange(len(tokens))
        results.append(program.run(torch.tensor(tokens), torch.tensor(positions), attention, rows))
    return results


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_disaggregated_attention_gives_the_logits_of_one_process(family: str, tiny: MakeTiny) -> None:
    program = tiny(family).program
    spec = program.spec
    local = LocalAttention(
        pool_of(KVLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK_SIZE, 4)), program.attention_specs
    )
    expected = logits_of(program, local)
    for count in (1, 2):
        with attention_workers(program, count) as remote:
            for got, wanted in zip(logits_of(program, remote), expected, strict=True):
                torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_a_worker_that_stops_answering_is_lost(tiny: MakeTiny) -> None:
    program = tiny("llama").program
    with attention_workers(program, 1) as remote:
        logits_of(program, remote)
        silent = replace(remote._workers[0], is_gone=lambda: True)
    lost = RemoteAttention([silent], program.spec.layers, program.spec.heads)
    lost._step = remote._step
    with pytest.raises(AttentionLost, match="attention-0: the other side of the exchange is gone"):
        logits_of(program, lost)


def test_a_step_over_the_exchanges_bounds_is_refused(tiny: MakeTiny) -> None:
    program = tiny("llama").program
    with attention_workers(program, 1) as remote, pytest.raises(ValueError, match="17 tokens"):
        remote.begin([SequenceChunk((0, 1, 2, 3, 4), 0, 17)])
