"""One process of those between which collectives are measured: what ``communication`` starts.

A message is timed on the first process from its call until its part is done; the next follows at once, so
that nobody is waited for who has not been let go. A send is half of there and back.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Literal

import torch
import torch.distributed as dist

from services.profiling.operators.sizes import Effort

Collective = Literal["all_reduce", "all_gather", "send_recv"]
Taken = dict[tuple[Collective, int], list[float]]
"""ms by (operator, bytes)."""
HOST, LOOPBACK = "127.0.0.1", "lo"
TIMEOUT = timedelta(seconds=120)
BURST = 8
"""Of one size in one round; the first is none that counts."""
MS = 1e3


@dataclass(frozen=True, slots=True)
class Messages:
    """Of ``operator`` between so many ``workers``. ``sizes``: bytes that each puts in."""

    operator: Collective
    workers: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What one process is told. ``port``: of the store at which they meet. ``device``: cpu, or cuda."""

    rank: int
    workers: int
    messages: tuple[Messages, ...]
    dtype: torch.dtype
    device: str
    port: int
    effort: Effort


def take_part(part: Part, results: Connection) -> None:
    """The first process says what share is done, and at last what was taken; the others say nothing."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    backend, device = "gloo", torch.device("cpu")
    if part.device == "cuda":
        backend, device = "nccl", torch.device("cuda", part.rank)
        torch.cuda.set_device(device)
    store = dist.TCPStore(HOST, part.port, is_master=False, timeout=TIMEOUT)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=part.rank, world_size=part.workers, timeout=TIMEOUT, device_id=None
    )
    try:
        taken = _measure(part, device, results)
        if part.rank == 0:
            results.send(taken)
    finally:
        dist.destroy_process_group()


def _measure(part: Part, device: torch.device, results: Connection) -> Taken:
    calls: dict[tuple[Collective, int], Callable[[], float]] = {
        (each.operator, size): _call(each.operator, size, part, device)
        for each in part.messages
        for size in each.sizes
    }
    taken: Taken = defaultdict(list)
    ends_s = time.monotonic() + part.effort.limit_s
    for number in range(part.effort.rounds):
        if number and not _agrees(part.rank == 0 and time.monotonic() < ends_s, device):
            break
        for key, call in calls.items():
            each_ms = [call() for _ in range(BURST)]
            taken[key].extend(each_ms[1:])
        if part.rank == 0:
            results.send((number + 1) / part.effort.rounds)
    return dict(taken)


def _agrees(goes_on: bool, device: torch.device) -> bool:
    """Whether the first process goes on: what all do."""
    flag = torch.full((1,), float(goes_on), device=device)
    dist.broadcast(flag, 0)
    return bool(flag.item())


def _call(operator: Collective, size: int, part: Part, device: torch.device) -> Callable[[], float]:
    """Sends once; how many ms it took."""
    elements = max(1, size // part.dtype.itemsize)
    own = torch.zeros(elements, dtype=part.dtype, device=device)
    gathered = torch.zeros(part.workers * elements, dtype=part.dtype, device=device)

    def run() -> None:
        if operator == "all_reduce":
            dist.all_reduce(own)
        elif operator == "all_gather":
            dist.all_gather_single(gathered, own)
        elif part.rank == 0:
            dist.send(own, 1)
            dist.recv(own, 1)
        elif part.rank == 1:
            dist.recv(own, 0)
            dist.send(own, 0)

    ways = 2 if operator == "send_recv" else 1

    def taken_ms() -> float:
        began_s = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return MS * (time.perf_counter() - began_s) / ways

    return taken_ms
