"""How long the scheduler decides where a request goes, by policy, with many instances and running requests.

One process, no IO: events and placements as ``scheduler.service`` gives them to the state. Between two
decisions a request ends and an instance reports, whose time is not counted. Then what it costs to judge, at
``--rate`` requests a second, what the other policies would have done (``scheduler.regret``).

    python bench/placement.py [--instances 100] [--running 1000] [--decisions 3000] [--peers 0]
"""

import argparse
import statistics
import time

from common.config import DecodePolicy, SchedulerConfig
from common.ids import GatewayId, Incarnation, InstanceId, RequestId
from common.messages import GenerationRequest, InstanceRecord, LoadReport, Role, SamplingParams
from common.messages.bookings import BookingsChanged
from common.performance import FittedTime
from scheduler import events
from scheduler.policy.dispatch import DECODE_POLICIES
from scheduler.regret import RegretLog
from scheduler.state import SchedulerState

BLOCKS, BLOCK_SIZE = 4096, 256
LIFE = Incarnation("1")
STEP = FittedTime((2e-3, 1e-3, 0.02), 0.02, 1000)


def mesh_of(instances: int, policy: DecodePolicy, peers: int = 0, lease_s: float = 3600.0) -> SchedulerState:
    """With ``peers`` other schedulers it has a group of its own."""
    settings = SchedulerConfig(decode_policy=policy, grouped=peers > 0)
    state = SchedulerState(lease_s, settings, incarnation=LIFE)
    for number in range(peers):
        heard = BookingsChanged(f"scheduler-{number}", Incarnation(f"peer-{number}"), 0)
        state.handle(events.PeerHeard(heard), 0.0)
    roles: list[Role] = ["prefill", "decode"]
    names = [
        (InstanceId(f"{roles[number % 2]}-{number // 2}"), roles[number % 2]) for number in range(instances)
    ]
    records = [
        InstanceRecord(
            instance_id=name,
            incarnation=LIFE,
            role=role,
            model="m",
            host="h",
            pid=1,
            http_url="",
            block_size=BLOCK_SIZE,
            total_blocks=BLOCKS,
            largest_pool_blocks=BLOCKS,
            context_length=8192,
            dtype="fp32",
        )
        for name, role in names
    ]
    state.handle(events.MembersRead(tuple(records)), 0.0)
    for name, role in names:
        state.handle(events.LoadReported(report_of(name, role)), 0.0)
    return state


def report_of(name: InstanceId, role: Role, sequence: int = 1) -> LoadReport:
    return LoadReport(
        instance_id=name,
        incarnation=LIFE,
        sequence=sequence,
        role=role,
        is_draining=False,
        pending_prefill_tokens=0,
        pending_prefill_requests=0,
        handovers_waiting=0,
        decode_running=0,
        decode_waiting=0,
        decode_tokens=0,
        total_blocks=BLOCKS,
        largest_pool_blocks=BLOCKS,
        free_blocks=BLOCKS,
        prefill_tokens_per_s=10_000.0,
        step_time=STEP,
    )


def request_of(number: int) -> GenerationRequest:
    prompt_ids = tuple(range(100 + number % 400))
    sampling = SamplingParams(max_tokens=256)
    return GenerationRequest(
        request_id=RequestId(f"r{number}"),
        gateway_id=GatewayId("g"),
        prompt_ids=prompt_ids,
        sampling=sampling,
    )


def measure(
    instances: int, running: int, decisions: int, policy: DecodePolicy, peers: int = 0
) -> list[float]:
    """CPU seconds of each decision: what else the machine does is not the rule's."""
    state = mesh_of(instances, policy, peers)
    views = list(state.instances.values())
    taken: list[float] = []
    for number in range(running + decisions):
        request = request_of(number)
        if number >= running:
            over = request_of(number - running)
            ended = events.RequestOver(over.request_id, len(over.prompt_ids), 50 + number % 300)
            state.handle(ended, float(number))
            view = views[number % instances]
            report = report_of(view.record.instance_id, view.role, number)
            state.handle(events.LoadReported(report), float(number))
        began_s = time.process_time()
        state.place(request, float(number))
        state.handle(events.TaskAcknowledged(request.request_id, 0), float(number))
        if number >= running:
            taken.append(time.process_time() - began_s)
    return taken


def measure_shadow(instances: int, running: int, decisions: int, rate: float) -> RegretLog:
    """What the other policies would have done, judged as live at ``rate`` requests a second."""
    state = mesh_of(instances, "least_loaded")
    regret = state.placer.regret
    for number in range(running + decisions):
        now = number / rate
        if number >= running:
            over = request_of(number - running)
            ended = events.RequestOver(over.request_id, len(over.prompt_ids), 50, ttft_s=0.1, tpot_s=0.03)
            state.handle(ended, now)
        state.place(request_of(number), now)
        state.handle(events.TaskAcknowledged(RequestId(f"r{number}"), 0), now)
        look = state.placer.look
        if number >= running and look is not None and regret.budget.may_spend(now):
            began_s = time.thread_time()
            regret.judge(look)
            regret.spend(time.thread_time() - began_s)
    return regret


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=100)
    parser.add_argument("--running", type=int, default=1000)
    parser.add_argument("--decisions", type=int, default=3000)
    parser.add_argument("--peers", type=int, default=0, help="Other schedulers: then each has a group.")
    parser.add_argument("--rate", type=float, default=50.0, help="Requests a second, for the shadow's share.")
    options = parser.parse_args()
    for policy in DECODE_POLICIES:
        taken = measure(options.instances, options.running, options.decisions, policy, options.peers)
        p99_s = statistics.quantiles(taken, n=100)[98]
        print(
            f"{policy:17}: p50 {1e6 * statistics.median(taken):6.0f} µs, p99 {1e6 * p99_s:6.0f} µs,"
            f" {len(taken) / sum(taken):,.0f} decisions/s"
        )
    regret = measure_shadow(options.instances, options.running, options.decisions, options.rate)
    judged = max(each.decisions for each in regret.policies.values())
    share = regret.spent_s * options.rate / options.decisions
    print(
        f"other policies   : {judged:,} of {options.decisions:,} decisions judged at {options.rate:g}/s,"
        f" {1e6 * regret.spent_s / judged:.0f} µs each, {share:.2%} of one core"
    )


if __name__ == "__main__":
    main()
