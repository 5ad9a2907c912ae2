"""Attention workers on threads of this process, over real shared memory, bound as pools of a model worker."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import torch

from attention.engine import AttentionLoop, ServedLane
from common.exchange_shape import ExchangeShape
from common.ids import BindingId
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.model.exchange import Lane, Pace
from common.model.program import ModelProgram
from common.transfer.buffers import SharedBuffer, map_region
from common.transfer.interface import RegionInfo
from common.transfer.mirror import MappedMirror
from decode.remote_attention import Pools, RemoteAttention, WorkerExchange

WAIT_S = 10.0
BLOCKS = 36
BLOCK_SIZE = 4
SALT = 1 << 40
FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "opt",
    "gpt2",
    "gemma3",
    "gemma2",
    "phi3",
    "mixtral",
    "qwen3-moe",
)
"""All that docs/operating.md says are served."""


def mirror_of(buffer: SharedBuffer) -> MappedMirror:
    """As another process would map it."""
    region = RegionInfo("region", buffer.address, buffer.nbytes, buffer.handle)
    return MappedMirror(map_region(os.getpid(), region))


def lanes_of(shape: ExchangeShape, pace: Pace | None = None) -> tuple[Lane, Lane]:
    """(the model worker's end, the attention worker's end)"""
    request, response = SharedBuffer(shape.request_bytes), SharedBuffer(shape.response_bytes)
    to_worker, to_model = mirror_of(request), mirror_of(response)
    for buffer in (request, response):
        buffer.close()  # what is mapped stays; hundreds of tests would keep hundreds of descriptors
    return (
        Lane(shape, to_worker.memory, response.memory, to_worker, SALT, pace),
        Lane(shape, request.memory, to_model.memory, to_model, SALT, pace),
    )


@dataclass(slots=True)
class Workers:
    """``remote``: one attention a lane, over the same pools. ``stop(i)`` ends worker i as a kill would.

    ``lanes`` and ``kv``: each worker's ends of them, and its memory.
    """

    remote: tuple[RemoteAttention, ...]
    pools: Pools
    failures: list[tuple[BindingId, Exception]]
    stop: Callable[[int], None]
    lanes: list[list[ServedLane]]
    kv: list[KVPool]

    def wait_steps(self, steps: int) -> None:
        """Until every worker has ended that many: the last answer comes a moment before."""
        wait(lambda: all(sum(lane.steps for lane in lanes) == steps for lanes in self.lanes))

    def wait_in_step(self) -> None:
        """Until every worker is amid a step."""
        wait(lambda: all(any(lane.is_in_step for lane in lanes) for lanes in self.lanes))

    def wait_rested(self) -> None:
        """Until no worker is amid a step."""
        wait(lambda: not any(lane.is_in_step for lanes in self.lanes for lane in lanes))


def wait(has_come: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not has_come():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@contextmanager
def attention_workers(
    program: ModelProgram,
    count: int,
    *,
    by_heads: bool = True,
    mini_batches: int = 1,
    lanes: int = 1,
    pace: Pace | None = None,
) -> Iterator[Workers]:
    """``count`` workers; their threads have ended afterwards."""
    spec = program.spec
    parts = count if by_heads else 1
    heads, kv_heads = spec.heads // parts, spec.kv_heads // parts
    shape = ExchangeShape(16, 400, heads, kv_heads, spec.head_dim, "float32")
    shares = [
        msgspec.structs.replace(each, heads=heads, kv_heads=kv_heads) for each in program.attention_specs
    ]
    failures: list[tuple[BindingId, Exception]] = []
    loops, threads, exchanges = [], [], []
    served: list[list[ServedLane]] = []
    memories: list[KVPool] = []
    for index in range(count):
        pool = KVPool(
            KVLayout(spec.layers, kv_heads, spec.head_dim, BLOCK_SIZE, 4),
            BLOCKS,
            torch.float32,
            torch.device("cpu"),
        )
        ends = [lanes_of(shape, pace) for _ in range(lanes)]
        loop = AttentionLoop(lambda binding_id, error: failures.append((binding_id, error)))
        binding_id = BindingId(f"b{index}")
        served.append([ServedLane(binding_id, worker_end, pool, shares) for _, worker_end in ends])
        memories.append(pool)
        loop.add(served[index])
        thread = threading.Thread(target=loop.run, daemon=True)
        thread.start()
        loops.append(loop)
        threads.append(thread)
        part = index if by_heads else 0
        exchanges.append(
            WorkerExchange(
                f"attention-{index}",
                range(part * heads, (part + 1) * heads),
                range(part * kv_heads, (part + 1) * kv_heads),
                tuple(model_end for model_end, _ in ends),
                lambda thread=thread: not thread.is_alive(),  # type: ignore[misc]
            )
        )
    pools = Pools()
    if by_heads:
        pools.add(0, tuple(exchanges))
    else:
        for number, exchange in enumerate(exchanges):
            pools.add(number, (exchange,))

    def stop(index: int) -> None:
        loops[index].stop()
        threads[index].join(10)

    try:
        remote = tuple(
            RemoteAttention(pools, spec.layers, spec.heads, mini_batches, lane) for lane in range(lanes)
        )
        yield Workers(remote, pools, failures, stop, served, memories)
    finally:
        for index, thread in enumerate(threads):
            stop(index)
            assert not thread.is_alive()
