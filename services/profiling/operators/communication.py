"""Collectives between real processes: all-reduce, all-gather, sends, by bytes and participants (Vidur 4.3).

On processors they are processes of this machine, over gloo on 127.0.0.1: shards on one host, whose messages
go through its memory, and which share its cores. On CUDA devices each process has one of its own, over nccl;
how many there are bounds how many can take part.
"""

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import torch
import torch.distributed as dist

from common.errors import ConfigError, ServiceError
from services.profiling.operators.laps import statistics_of
from services.profiling.operators.measuring import Progress, Row
from services.profiling.operators.message_worker import HOST, Messages, Part, Taken, take_part
from services.profiling.operators.sizes import Effort

SILENCE_S = 180.0
"""Longer than the slowest round of any size between processes that share few cores."""
JOIN_TIMEOUT_S = 10.0
POLL_S = 1.0


class CommunicationError(ServiceError):
    """A process that took part in a collective ended, or was not heard of."""


def check_participants(device: torch.device, workers: Sequence[int]) -> None:
    """Raises ConfigError where a device of its own is not there for each."""
    there, most = torch.cuda.device_count(), max(workers, default=0)
    if device.type == "cuda" and most > there:
        rule = (
            f"messages between {most} need as many CUDA devices, and this machine has {there}: measure with"
            ' --no-communication, and simulate with communication = "roofline", which goes by the links of'
            " the device's catalogue entry"
        )
        raise ConfigError("--tp", most, rule)


def measure_messages(
    messages: Sequence[Messages], dtype: torch.dtype, device: torch.device, effort: Effort, progress: Progress
) -> dict[str, list[Row]]:
    """Rows by operator. Raises CommunicationError."""
    found: dict[str, list[Row]] = {each.operator: [] for each in messages}
    groups = sorted({each.workers for each in messages})
    share = Effort(effort.rounds, effort.limit_s / max(1, len(groups)))
    for index, workers in enumerate(groups):
        own = tuple(each for each in messages if each.workers == workers)

        def group_progress(done: float, before: int = index) -> None:
            progress((before + done) / len(groups))

        taken = _measure_group(own, workers, dtype, device, share, group_progress)
        for each in own:
            found[each.operator] += [_row(each, size, taken[each.operator, size]) for size in each.sizes]
    return found


def _row(messages: Messages, size: int, taken_ms: list[float]) -> Row:
    sizes: dict[str, object] = {
        "rank": 0,
        "num_workers": messages.workers,
        "size": size,
        "collective": messages.operator,
        "devices_per_node": messages.workers,
        "max_devices_per_node": messages.workers,
    }
    return {**statistics_of(messages.operator, taken_ms), **sizes}


def _measure_group(
    messages: tuple[Messages, ...],
    workers: int,
    dtype: torch.dtype,
    device: torch.device,
    effort: Effort,
    progress: Progress,
) -> Taken:
    """In processes that meet at this one's store."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    context = multiprocessing.get_context("spawn")
    results, end = context.Pipe(duplex=False)
    processes = [
        context.Process(
            target=take_part,
            args=(Part(rank, workers, messages, dtype, device.type, store.port, effort), end),
            daemon=True,
        )
        for rank in range(workers)
    ]
    try:
        for process in processes:
            process.start()
        end.close()
        return _heard(results, processes, progress)
    finally:
        for process in processes:
            process.join(JOIN_TIMEOUT_S)
            if process.is_alive():
                process.kill()
        results.close()


def _heard(results: Connection, processes: Sequence[SpawnProcess], progress: Progress) -> Taken:
    heard_s = time.monotonic()
    while True:
        running = (each.sentinel for each in processes if each.exitcode is None)
        ready = wait([results, *running], timeout=POLL_S)
        if results in ready:
            try:
                said = results.recv()
            except EOFError as exc:
                raise CommunicationError("the processes that send messages to one another ended") from exc
            heard_s = time.monotonic()
            if isinstance(said, float):
                progress(said)
                continue
            taken: Taken = said
            return taken
        failed = [each.exitcode for each in processes if each.exitcode]
        if failed:
            raise CommunicationError(f"a process that sends messages ended with status {failed[0]}")
        if time.monotonic() - heard_s > SILENCE_S:
            raise CommunicationError(f"no message between processes in {SILENCE_S:g} s")
