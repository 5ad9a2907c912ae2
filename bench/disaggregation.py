"""Decode with its attention in another process against decode alone: time between tokens, in turn.

One attention worker on this host over shared memory. ``off``: one batch. ``divided``: the batch cut into as
many as ``--batches``, which take turns. ``staggered``: as many batches of the whole size. Ratios are to
``local``, the same model with attention in its own process: of time between tokens, and of throughput.

    python bench/disaggregation.py [--batch 8] [--context 512] [--batches 2] [--rounds 11]
"""

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from attention.engine import AttentionLoop, ServedLane
from common.config import TransferConfig
from common.engine_thread import EngineThread
from common.exchange_shape import ExchangeShape
from common.host_cores import open_host_cores
from common.ids import BindingId
from common.kv.blocks import blocks_for
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.messages import SamplingParams
from common.model import kernels
from common.model.attention import LocalAttention
from common.model.default_model import default_model_directory
from common.model.exchange import Lane
from common.model.program import load_program
from common.model.runner import ModelRunner
from common.spec import AttentionSpec
from common.steps import Draw, SequenceStep
from common.transfer.buffers import SharedBuffer
from common.transfer.endpoint import TransferEndpoint
from common.transfer.interface import PeerInfo
from decode.pipeline import Replica, StaggeredEngine
from decode.remote_attention import Pools, RemoteAttention, WorkerExchange
from scheduler.policy.staggering import Staggering
from services.hosts.model_engine import use_cores

CACHE = Path("~/.cache/lamella")
BLOCK_SIZE = 256
SALT = 1 << 40
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


async def exchange_regions(
    pipe: Connection, nbytes: int, lanes: int
) -> tuple[TransferEndpoint, list[SharedBuffer], list[memoryview], list[object]]:
    endpoint = TransferEndpoint(TransferConfig(path="shared_memory"))
    await endpoint.start()
    own = [SharedBuffer(nbytes) for _ in range(lanes)]
    pipe.send(endpoint.offer({str(index): buffer for index, buffer in enumerate(own)}))
    peer: PeerInfo = await asyncio.to_thread(pipe.recv)
    mirrors = [await endpoint.mirror(peer, str(index)) for index in range(lanes)]
    return endpoint, own, [mirror.memory for mirror in mirrors], list(mirrors)


def filled_pool(layout: KVLayout, blocks: int) -> KVPool:
    """Memory that was never written is one page of zeros, whatever its size."""
    pool = KVPool(layout, blocks, torch.float32, torch.device("cpu"))
    pool.tensor.view(torch.float32).uniform_(-1, 1)
    return pool


def serve(
    pipe: Connection,
    shape: ExchangeShape,
    layout: KVLayout,
    blocks: int,
    specs: Sequence[AttentionSpec],
    lanes: int,
) -> None:
    """The attention worker's process."""
    kernels.use_compiled(CACHE)
    _, own, theirs, mirrors = asyncio.run(exchange_regions(pipe, shape.request_bytes, lanes))
    pool = filled_pool(layout, blocks)
    loop = AttentionLoop(lambda binding_id, error: print(error), open_host_cores("attention"))
    for request, response, mirror in zip(own, theirs, mirrors, strict=True):
        lane = Lane(shape, request.memory, response, mirror, SALT)  # type: ignore[arg-type]
        loop.add([ServedLane(BindingId("bench"), lane, pool, specs)])
    pipe.send("ready")
    loop.run()


def batch_of(rows: range, context: int) -> list[SequenceStep]:
    blocks = blocks_for(context + 1, BLOCK_SIZE)
    return [
        SequenceStep((17,), context, tuple(range(row * blocks, (row + 1) * blocks)), Draw(GREEDY, (), ()))
        for row in rows
    ]


async def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds between two tokens of every sequence, by variant."""
    kernels.use_compiled(CACHE)
    directory = default_model_directory(CACHE)
    program = load_program(directory, "float32", torch.device("cpu"), CACHE.expanduser(), weights="bf16")
    spec = program.spec
    layout = KVLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK_SIZE, 4)
    size = options.batch
    whole, *others = (
        batch_of(range(index * size, (index + 1) * size), options.context) for index in range(options.batches)
    )
    divided = [whole[index :: options.batches] for index in range(options.batches)]
    staggered_batches = [whole, *others]
    lane_count = 1 + options.batches
    blocks = size * blocks_for(options.context + 1, BLOCK_SIZE)
    local = ModelRunner(program, LocalAttention(filled_pool(layout, blocks), program.attention_specs))
    blocks *= options.batches
    shape = ExchangeShape(
        options.batch, 2 + options.batch * 64, spec.heads, spec.kv_heads, spec.head_dim, "float32"
    )
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    worker = context.Process(
        target=serve, args=(theirs, shape, layout, blocks, program.attention_specs, lane_count), daemon=True
    )
    worker.start()
    _, own, requests, mirrors = await exchange_regions(pipe, shape.response_bytes, lane_count)
    lanes = tuple(
        Lane(shape, request, response.memory, mirror, SALT)  # type: ignore[arg-type]
        for request, response, mirror in zip(requests, own, mirrors, strict=True)
    )
    await asyncio.to_thread(pipe.recv)
    pools = Pools()
    pools.add(
        0,
        (
            WorkerExchange(
                "worker", range(spec.heads), range(spec.kv_heads), lanes, lambda: not worker.is_alive()
            ),
        ),
    )
    remote = [RemoteAttention(pools, spec.layers, spec.heads, lane=lane) for lane in range(lane_count)]
    runners = [local.over(each, each.lost_chunks) for each in remote]
    thread = EngineThread(open_host_cores(), use_cores)
    staggering = Staggering(options.batches)
    count = staggering.replicas
    threads = [thread] if count == 1 else [EngineThread(name=f"replica {index}") for index in range(count)]
    replicas = [Replica(each, program) for each in threads]
    staggered = StaggeredEngine(thread, staggering, replicas, list(zip(runners[1:], remote[1:], strict=True)))

    async def rotate(batches: list[list[SequenceStep]]) -> None:
        await asyncio.gather(*(staggered.run(lane, batch) for lane, batch in enumerate(batches)))

    variants: dict[str, Callable[[], Awaitable[object]]] = {
        "local": lambda: thread.run(local.run, whole),
        "off": lambda: thread.run(runners[0].run, whole),
        "divided": lambda: rotate(divided),
        "staggered": lambda: rotate(staggered_batches),
    }
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for round_number in range(options.rounds + 1):
        for name, step in variants.items():
            began_s = time.perf_counter()
            await step()
            if round_number:
                taken[name].append(time.perf_counter() - began_s)
            # The worker's core claim and this thread's end before the next variant begins.
            await asyncio.sleep(0.05)
    staggered.close()
    thread.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    taken = asyncio.run(measure(options))
    medians = {name: statistics.median(each) for name, each in taken.items()}
    print(f"batch {options.batch}, context {options.context}, {options.batches} batches")
    for name, value in medians.items():
        tokens = options.batches if name == "staggered" else 1
        ratio = value / medians["local"]
        print(f"  {name:9} {1e3 * value:6.1f} ms  {ratio:.2f}x time  {tokens / ratio:.2f}x throughput")


if __name__ == "__main__":
    main()
