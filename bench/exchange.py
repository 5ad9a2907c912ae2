"""Round trip of one layer's exchange between a model and an attention worker, attention itself left out.

Two processes on this machine: Q, K and V of a batch go out, an output of Q's shape comes back at once. By
path: shared memory, and Mooncake over the loopback. The default model's shape (9 heads, 3 KV heads of 64).

    python bench/exchange.py [--batch 8] [--rounds 3000]
"""

import argparse
import asyncio
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import torch

from common.config import TransferConfig
from common.exchange_shape import ExchangeShape
from common.model.exchange import Lane
from common.model.waiting import Waiting, wait_until
from common.transfer.buffers import SharedBuffer
from common.transfer.endpoint import TransferEndpoint
from common.transfer.interface import PeerInfo

SALT = 1 << 40
ROUNDS_A_TURN = 500
TIMEOUT_S = 10.0


def shape_of(batch: int) -> ExchangeShape:
    return ExchangeShape(batch, 2 + batch * 8, 9, 3, 64, "float32")


def config_of(path: str) -> TransferConfig:
    return TransferConfig(path=path)  # type: ignore[arg-type]


async def open_lane(path: str, shape: ExchangeShape, pipe: Connection, is_model: bool) -> Lane:
    """This side's end; the other does the same through the pipe's other end."""
    endpoint = TransferEndpoint(config_of(path))
    await endpoint.start()
    own = SharedBuffer(shape.response_bytes if is_model else shape.request_bytes)
    pipe.send(endpoint.offer({"region": own}))
    peer: PeerInfo = await asyncio.to_thread(pipe.recv)
    mirror = await endpoint.mirror(peer, "region")
    request, response = (mirror.memory, own.memory) if is_model else (own.memory, mirror.memory)
    lane = Lane(shape, request, response, mirror, SALT)
    lane.endpoint = endpoint  # type: ignore[attr-defined]  # lives as long as the lane
    return lane


def serve(path: str, batch: int, rounds: int, pipe: Connection) -> None:
    """The attention worker: answers as soon as K and V are there."""
    torch.set_num_threads(1)
    lane = asyncio.run(open_lane(path, shape_of(batch), pipe, is_model=False))
    records = lane.records(0, batch)
    waiting = Waiting()
    for number in range(1, rounds + 1):
        for place in (records.q_place, records.kv_place):
            wait_until(lane.has_request, place, number, waiting, TIMEOUT_S, lambda: False, lane.bells)
        records.output.copy_(records.q)
        lane.send(records.output_place, number)
    pipe.recv()


def ask(lane: Lane, batch: int, first: int, rounds: int) -> list[float]:
    """Seconds of each round."""
    records = lane.records(0, batch)
    q, k, v = (torch.randn(batch, heads, 64) for heads in (9, 3, 3))
    waiting = Waiting()
    seconds = []
    for number in range(first, first + rounds):
        began_s = time.perf_counter()
        records.q.copy_(q)
        lane.send(records.q_place, number)
        records.k.copy_(k)
        records.v.copy_(v)
        lane.send(records.kv_place, number)
        wait_until(
            lane.has_response, records.output_place, number, waiting, TIMEOUT_S, lambda: False, lane.bells
        )
        output = records.output.clone()
        seconds.append(time.perf_counter() - began_s)
        assert torch.equal(output, q)
    return seconds


def measure(batch: int, rounds: int) -> dict[str, list[float]]:
    """The paths in turn, so that both see the same machine."""
    context = multiprocessing.get_context("spawn")
    lanes, pipes, workers = {}, {}, []
    for path in ("shared_memory", "mooncake"):
        pipes[path], theirs = context.Pipe()
        worker = context.Process(target=serve, args=(path, batch, rounds, theirs), daemon=True)
        worker.start()
        workers.append(worker)
        lanes[path] = asyncio.run(open_lane(path, shape_of(batch), pipes[path], is_model=True))
    seconds: dict[str, list[float]] = {path: [] for path in lanes}
    for first in range(1, rounds + 1, ROUNDS_A_TURN):
        for path, lane in lanes.items():
            seconds[path] += ask(lane, batch, first, min(ROUNDS_A_TURN, rounds + 1 - first))
    for path, worker in zip(pipes, workers, strict=True):
        pipes[path].send("done")
        worker.join(TIMEOUT_S)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"batch {options.batch}, fp32, µs")
    for path, seconds in measure(options.batch, options.rounds).items():
        cuts = statistics.quantiles(seconds, n=100)
        print(f"{path:14} p50 {1e6 * cuts[49]:7.1f}  p90 {1e6 * cuts[89]:7.1f}  p99 {1e6 * cuts[98]:8.1f}")


if __name__ == "__main__":
    main()
