"""Plans over a day of traffic, in virtual time: instances of known laws that start and end as is planned."""

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from common.config import Config, InstanceConfig, ObjectivesConfig, ScalingConfig
from common.messages import Role
from common.performance import FittedTime
from common.scaling import ScaledService
from scheduler.planning import NOTHING_KNOWN, MeshSight, Plan, Planner, look_at
from scheduler.views import InstanceView
from services.bench.traces import read_trace
from tests.instance_records import make_record
from tests.load_reports import make_report

WINDOW_S = 10.0
SCALING = ScalingConfig(
    policy="on",
    window_s=WINDOW_S,
    up_cooldown_s=WINDOW_S,
    down_after_s=120.0,
    max_prefill=24,
    max_decode=24,
    max_mixed=24,
    max_attention=24,
)
CONFIG = Config(
    scaling=SCALING,
    objectives=ObjectivesConfig(ttft_s=2.0, tpot_s=0.1),
    instance=InstanceConfig(attention_partition="requests"),
)
CHUNK_S, TOKEN_S = 0.005, 0.0001
CHUNK_TIME = FittedTime((1000 * TOKEN_S, 0.0, CHUNK_S), 0.03, 500)
"""A prompt of 1,000 tokens takes 110 ms."""
STEP_TIME = FittedTime((0.0005, 0.0005, 0.02), 0.03, 500)
CAPACITY_TOKENS = 100_000.0
ONE_EACH: dict[ScaledService, int] = {"gateway": 1, "prefill": 1, "decode": 1}


@dataclass(slots=True)
class Day:
    """A mesh that does at once as is planned. Its prefill instances share a queue; ``late_requests`` of all
    had their first token too late."""

    config: Config = CONFIG
    chance: random.Random = field(default_factory=lambda: random.Random(7))
    workers: dict[ScaledService, int] = field(
        default_factory=lambda: {"gateway": 1, "prefill": 1, "decode": 1}
    )
    chunk_time: FittedTime | None = CHUNK_TIME
    now: float = 0.0
    requests: int = 0
    late_requests: int = 0
    late: frozenset[ScaledService] = frozenset()
    planner: Planner = field(init=False)
    _free_s: list[float] = field(default_factory=list)
    _is_late: bool = False

    def __post_init__(self) -> None:
        self.planner = Planner(self.config, self.now)

    def window(self, arrivals: list[tuple[float, int, int]]) -> Plan:
        """Of requests (seconds, prompt tokens, output tokens)."""
        for at_s, prompt_tokens, output_tokens in arrivals:
            self.planner.profiler.arrive(prompt_tokens, at_s)
            self.planner.profiler.end(output_tokens)
        self._prefill(
            [(at_s, CHUNK_S * -(-prompt // 512) + TOKEN_S * prompt) for at_s, prompt, _ in arrivals]
        )
        self.now += WINDOW_S
        plan = self.planner.plan(self.sight(), self.now)
        self.workers |= {each.service: each.desired for each in plan.counts}
        return plan

    def _prefill(self, prompts: list[tuple[float, float]]) -> None:
        """Of (arrival, seconds of work), each by the instance that is free first."""
        instances = max(1, self.workers.get("prefill", 0))
        free_s = sorted(self._free_s)[:instances]
        free_s += [self.now] * (instances - len(free_s))
        late = 0
        for at_s, work_s in prompts:
            ends_s = max(at_s, heapq.heappop(free_s)) + work_s
            heapq.heappush(free_s, ends_s)
            late += ends_s - at_s > self.config.objectives.ttft_s
        self._free_s = free_s
        self._is_late = late > 0.1 * len(prompts)
        self.late_requests += late
        self.requests += len(prompts)

    def poisson(self, rate_per_s: float, prompt_tokens: int = 1000, output_tokens: int = 200) -> Plan:
        at_s, arrivals = self.now, []
        while (at_s := at_s + self.chance.expovariate(rate_per_s)) < self.now + WINDOW_S:
            arrivals.append((at_s, prompt_tokens, output_tokens))
        return self.window(arrivals)

    def sight(self) -> MeshSight:
        late: frozenset[ScaledService] = self.late | {"prefill"} if self._is_late else self.late
        return MeshSight(dict(self.workers), 10, late, CAPACITY_TOKENS, self.chunk_time, STEP_TIME)


def reasons(plan: Plan) -> dict[ScaledService, str]:
    return {each.service: each.reason for each in plan.counts}


def test_over_a_synthetic_day_workers_follow_the_rate_both_ways_and_seldom_fall_short() -> None:
    day, counts = Day(), []
    for window in range(720):
        rate_per_s = 2.0 + 28.0 * math.sin(math.pi * window / 720) ** 2 + 30.0 * (300 <= window < 330)
        day.poisson(rate_per_s)
        counts.append((day.workers["prefill"], day.workers["decode"]))
    assert counts[5] == (1, 1)
    assert max(counts[:295])[0] >= 3
    assert max(counts[300:340])[0] > max(counts[:295])[0], "the peak within the peak"
    assert counts[-1][0] <= 2
    assert counts[-1][1] <= 2
    changes = sum(one != other for one, other in pairwise(counts))
    assert changes < 80, "over two hours of which every window has another rate"
    assert day.late_requests < 0.02 * day.requests
    fixed = max(prefill for prefill, _ in counts) * len(counts)
    assert sum(prefill for prefill, _ in counts) < 0.55 * fixed, "instance time saved"


def test_a_jump_is_planned_for_at_once_and_said() -> None:
    day = Day(config=msgspec.structs.replace(CONFIG, scaling=replace_pause(600.0)))
    for _ in range(20):
        day.poisson(3.0)
    before = day.workers["prefill"]
    plans = [day.poisson(30.0) for _ in range(2)]
    assert any("rate" in plan.changed for plan in plans)
    assert day.workers["prefill"] > before
    assert "first tokens within 2 s" in reasons(plans[-1])["prefill"]


def replace_pause(up_cooldown_s: float) -> ScalingConfig:
    return msgspec.structs.replace(SCALING, up_cooldown_s=up_cooldown_s)


def test_without_learned_speeds_nothing_changes_and_the_reason_says_so() -> None:
    day = Day(chunk_time=None)
    plan = [day.poisson(50.0) for _ in range(3)][-1]
    assert day.workers["prefill"] == 1
    assert reasons(plan)["prefill"] == NOTHING_KNOWN
    assert day.workers["decode"] > 1, "whose speed is known"


def test_what_has_not_come_up_yet_is_not_planned() -> None:
    day = Day(workers={"gateway": 1})
    assert set(reasons(day.poisson(1.0))) == {"gateway"}
    day.workers |= {"prefill": 1, "decode": 1}
    assert set(reasons(day.poisson(1.0))) == {"gateway", "prefill", "decode"}
    day.workers["decode"] = 0
    plan = day.poisson(1.0)
    assert {each.service: each.desired for each in plan.counts}["decode"] == 1, "it was lost"


def test_late_objectives_bring_one_more_than_the_estimate() -> None:
    day = Day()
    for _ in range(10):
        day.poisson(1.5)
    assert day.workers["decode"] == 1
    day.late = frozenset({"decode"})
    plan = day.poisson(1.5)
    assert day.workers["decode"] == 2
    assert "objectives were missed" in reasons(plan)["decode"]
    assert day.workers["prefill"] == 1


def test_instances_that_do_both_are_counted_as_such() -> None:
    day = Day(workers={"gateway": 1, "mixed": 1})
    for _ in range(30):
        plan = day.poisson(20.0)
    assert {each.service for each in plan.counts} == {"gateway", "mixed"}
    assert day.workers["mixed"] >= 4


def test_attention_workers_grow_with_the_context_where_they_hold_whole_sequences() -> None:
    day = Day(workers={"gateway": 1, "prefill": 1, "decode": 1, "attention": 1})
    for _ in range(30):
        day.poisson(10.0, prompt_tokens=4000, output_tokens=300)
    assert day.workers["attention"] > 1
    by_heads = msgspec.structs.replace(CONFIG, instance=InstanceConfig(attention_partition="heads"))
    plan = Day(config=by_heads, workers=dict(day.workers)).poisson(10.0)
    assert "attention" not in reasons(plan), "their number is fixed"


def test_what_is_seen_of_a_mesh_are_its_ready_instances_and_who_is_late() -> None:
    views = [
        view_of("p0", "prefill", pending_prefill_tokens=9000, pending_prefill_requests=3, chunk_tokens=256),
        view_of("p1", "prefill", pending_prefill_tokens=9000, pending_prefill_requests=1),
        view_of("d0", "decode", decode_running=2, decode_step_s=0.05, decode_tokens=100),
        view_of("d1", "decode", is_draining=True, decode_unadmitted=7),
    ]
    sight = look_at(views, 1, 0, 12, 2.0, 0.1)
    assert dict(sight.workers) == {"gateway": 1, "attention": 0, "prefill": 2, "decode": 1}
    assert sight.late == {"prefill"}, "nine seconds of prompts wait at p0; p1's only prompt is just long"
    assert sight.capacity_tokens == 64 * 16
    assert sight.chunk_tokens == (256 + 512) / 2
    slow = view_of("d2", "decode", decode_running=2, decode_step_s=0.2)
    assert look_at([slow], 1, 0, 0, 2.0, 0.1).late == {"decode"}
    taking_in = view_of("d3", "decode", decode_running=2, decode_step_s=0.05, decode_waiting=1)
    assert look_at([taking_in], 1, 0, 0, 2.0, 0.1).late == set(), "its KV is on its way, no more"
    full = view_of("d4", "decode", decode_running=8, decode_waiting=1, decode_unadmitted=1)
    assert look_at([full], 1, 0, 0, 2.0, 0.1).late == {"decode"}
    idle = [view_of("p0", "prefill"), view_of("p1", "prefill"), slow]
    assert look_at(idle, 1, 0, 0, 2.0, 0.3, waiting_tokens=4000).late == set()
    assert look_at(idle, 1, 0, 0, 2.0, 0.3, waiting_tokens=4002).late == {"prefill"}, "at the scheduler"


def test_an_instance_whose_role_was_changed_for_a_while_counts_by_its_home() -> None:
    """A decode instance that helps prompts out: one more prefill is missed, no decode, and none is mixed."""
    guest = view_of("d0", "mixed", home="decode", pending_prefill_tokens=9000, pending_prefill_requests=3)
    sight = look_at([view_of("p0", "prefill"), guest], 1, 0, 3, 2.0, 0.1)
    assert (sight.workers["prefill"], sight.workers["decode"]) == (1, 1)
    assert "mixed" not in sight.workers
    assert sight.late == {"prefill"}
    alone = view_of("m0", "mixed", decode_running=2, decode_step_s=0.2)
    assert look_at([alone], 1, 0, 2, 2.0, 0.1).late == {"mixed"}


def view_of(name: str, role: Role, **load: object) -> InstanceView:
    report = make_report(name, role, 64, "i", **{"prefill_tokens_per_s": 1000.0, **load})
    return InstanceView(make_record(name, role, "i"), 0.0, report)


def windows_of(path: Path) -> Iterator[list[tuple[float, int, int]]]:
    window: list[tuple[float, int, int]] = []
    end_s = WINDOW_S
    for request in read_trace(path).requests:
        assert request.arrival_s is not None, "this trace has times"
        while request.arrival_s >= end_s:
            yield window
            window, end_s = [], end_s + WINDOW_S
        window.append((request.arrival_s, request.prompt_tokens, request.output_tokens))


MOST_LATE = {"conv": 0.01, "code": 0.1}
"""Code comes in bursts shorter than a window: who only follows is late for their first."""


@pytest.mark.parametrize("name", MOST_LATE)
def test_a_recorded_hour_is_followed_with_fewer_instances_than_its_peak_needs(
    shared_directory: Path, name: str
) -> None:
    trace = shared_directory / "data" / "azure2023" / f"AzureLLMInferenceTrace_{name}.csv.gz"
    if not trace.is_file():
        pytest.skip(f"no trace at {trace}: the recorded hour is not judged")
    day = Day()
    counts = []
    for window in windows_of(trace):
        day.window(window)
        counts.append(day.workers["prefill"])
    assert day.late_requests < MOST_LATE[name] * day.requests
    assert sum(counts) < max(counts) * len(counts)
    assert max(counts) < SCALING.max_prefill
