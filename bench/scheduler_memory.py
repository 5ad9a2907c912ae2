"""Whether the scheduler's memory stays flat over many requests, some of whose ends it never hears.

One process, no IO, virtual time: requests are placed, delivered or not, reported and ended as
``scheduler.service`` tells its state, a hundred a second; one in fifty is not delivered, and of one in a
hundred the end is lost. Instances always have work, so that nothing lost is found by their being idle.

    python -m bench.scheduler_memory [--requests 1000000] [--lines 10]
"""

import argparse
import gc
import random
from collections import deque
from pathlib import Path

import msgspec

from bench.placement import mesh_of, report_of, request_of
from common.config import MeshConfig
from common.messages import GenerationRequest
from scheduler import events
from scheduler.state import SchedulerState

INSTANCES, RUNNING, RATE_PER_S, REPORTS_PER_S = 10, 200, 100, 20
UNDELIVERED, LOST = 0.02, 0.01
SEED = 1


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def report(state: SchedulerState, number: int, now: float) -> None:
    """Of the next instance. Together they report the requests that run."""
    view = list(state.instances.values())[number % INSTANCES]
    news = report_of(view.record.instance_id, view.role, number)
    if view.role == "decode":
        news = msgspec.structs.replace(news, decode_running=2 * RUNNING // INSTANCES, decode_tokens=4000)
    state.handle(events.LoadReported(news), now)


def serve_one(
    state: SchedulerState, running: deque[GenerationRequest], number: int, chance: random.Random
) -> None:
    request, now = request_of(number), number / RATE_PER_S
    state.place(request, now)
    if chance.random() < UNDELIVERED:
        state.handle(events.TaskUndelivered(request.request_id, 0), now)
    else:
        state.handle(events.TaskAcknowledged(request.request_id, 0), now)
        running.append(request)
    if len(running) > RUNNING and chance.random() >= LOST:
        over = running.popleft()
        drew = len(over.prompt_ids), chance.randint(1, 256), False, 0
        state.handle(events.RequestOver(over.request_id, *drew, ttft_s=0.1, tpot_s=0.02), now)
    elif len(running) > RUNNING:
        running.popleft()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--lines", type=int, default=10, help="How often to say what there is.")
    options = parser.parse_args()
    state = mesh_of(INSTANCES, "least_loaded", lease_s=MeshConfig().lease_s)
    running: deque[GenerationRequest] = deque()
    chance = random.Random(SEED)
    for number in range(1, options.requests + 1):
        now = number / RATE_PER_S
        serve_one(state, running, number, chance)
        if number % (RATE_PER_S // REPORTS_PER_S) == 0:
            report(state, number // (RATE_PER_S // REPORTS_PER_S), now)
        if number % RATE_PER_S == 0:
            state.handle(events.TimePassed(), now)
        if number % max(1, options.requests // options.lines) == 0:
            gc.collect()
            print(
                f"{number:>9,} requests: {resident_mib():6.1f} MiB, {len(state.requests):,} booked",
                flush=True,
            )


if __name__ == "__main__":
    main()
