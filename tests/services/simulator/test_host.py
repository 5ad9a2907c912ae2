"""Passes that share one machine's cores: max-min fairness, by its closed forms."""

from collections.abc import Sequence
from typing import Any

import pytest

from common.errors import ConfigError
from common.messages import Phase
from common.room_mates import RoomMates
from prefill.events import ChunkSlice
from services.simulator.clock import Clock
from services.simulator.cluster import Cluster
from services.simulator.engine import EngineSettings, SimulatedEngine
from services.simulator.host import Host, PacedWork, Wanted
from services.simulator.host_config import HostConfig
from services.simulator.performance.linear import LinearPerformance
from services.simulator.seat import Seat
from tests.services.simulator.meshes import PERFORMANCE, mesh, pool, run

PREFILL_S = 0.01 + 100e-4
"""Of a prompt of 100 tokens."""


class Worker:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.changes = 0

    def change_pace(self) -> None:
        self.changes += 1


@pytest.mark.parametrize(("passes", "cores"), [(1, 1), (1, 2), (2, 2), (3, 2), (7, 2), (3, 4)])
def test_passes_share_cores_evenly_and_none_has_more_than_one(passes: int, cores: int) -> None:
    host = Host(HostConfig(cores=cores), Clock())
    workers = [Worker() for _ in range(passes)]
    for worker in workers:
        host.want(worker, Wanted(1.0))
    assert host.pace() == pytest.approx(min(1.0, cores / passes))
    for worker in workers:
        host.want(worker)
    assert host.pace() == 1.0
    # Whoever changes it knows; the others are told, and only where it does.
    told = 2 * sum(there - 1 for there in range(cores + 1, passes + 1))
    assert sum(worker.changes for worker in workers) == told


def test_what_is_taken_beside_passes_slows_them_by_its_share() -> None:
    host = Host(
        HostConfig(
            cores=2, idle_cores=0.2, pass_s=0.001, token_s=0.0005, prompt_s=0.004, prompt_token_s=1e-5
        ),
        Clock(),
    )
    assert host.beside_s(8, 100) == pytest.approx(0.001 + 8 * 0.0005 + 0.001)
    one, other = Worker(), Worker()
    seats = [Seat(host, each.change_pace) for each in (one, other)]
    seats[0].begin(0.05, 8, 100)
    assert seats[0].pace_of(0.05) == 1.0
    seats[1].begin(0.05, 8, 100)
    assert [each.pace_of(0.05) for each in seats] == pytest.approx([1.8 / (2 * (1 + 0.006 / 0.05))] * 2)
    assert (one.changes, other.changes) == (1, 0)


def test_a_course_gets_done_at_each_pace_what_that_lets_it() -> None:
    course = PacedWork(10.0, 1.0)
    course.change_pace(12.0, 0.5)
    course.change_pace(16.0, 0.25)
    course.change_pace(16.0, 1.0)
    for time_s, done_s in ((10.0, 0.0), (11.0, 1.0), (12.0, 2.0), (14.0, 3.0), (16.0, 4.0), (18.5, 6.5)):
        assert course.done_by(time_s) == pytest.approx(done_s)
        assert course.time_of(done_s) == pytest.approx(time_s)


def test_what_follows_gets_done_at_the_paces_since() -> None:
    course = PacedWork(10.0, 1.0)
    course.change_pace(12.0, 0.5)
    course.change_pace(16.0, 0.25)
    rest = course.after(14.0)
    assert rest.done_by(14.0) == 0.0
    assert rest.time_of(1.0) == pytest.approx(16.0)
    assert rest.time_of(2.0) == pytest.approx(20.0)
    assert course.after(11.0).time_of(2.0) == pytest.approx(14.0)


class FiveSteps:
    """A room with five steps to come, of a second each, none of which changes anything."""

    def __init__(self, clock: Clock, host: Host) -> None:
        performance = LinearPerformance(step_s=1.0)
        self.engine = SimulatedEngine(
            clock, self, EngineSettings(performance, "chunked", 512, 1.0), 4, RoomMates(), None, Seat(host)
        )
        self.left, self.ended_s = 5, 0.0

    def decode_shape(self) -> tuple[int, int]:
        return 1, 100

    def choose_work(self, phase: Phase, now: float) -> None:
        raise AssertionError(f"{phase} is not due")

    def steps_ahead(self) -> int:
        return self.left

    def end_steps(self, steps: int, first_end_s: float, ended_s: float, last_s: float) -> None:
        self.ended_s = ended_s
        self.left -= steps
        if self.left:
            self.engine.wait_step()

    def end_chunk(self, slices: Sequence[ChunkSlice]) -> None:
        raise AssertionError("there is no chunk")

    def end_layers(self, layers: int) -> None:
        raise AssertionError("there is no chunk")

    def wants_layers(self) -> bool:
        return False

    def look(self) -> None:
        self.engine.catch_up()
        self.engine.look_ahead()


@pytest.mark.parametrize("looked_at_s", [(), (2.8,), (1.2, 2.5, 2.8, 4.1)])
def test_to_look_at_steps_that_run_on_makes_none_of_them_longer(looked_at_s: tuple[float, ...]) -> None:
    clock = Clock()
    host = Host(HostConfig(cores=1), clock)
    rooms = FiveSteps(clock, host)
    rooms.engine.wait_step()
    clock.at(2.5, lambda: host.want(Worker(), Wanted(1.0)))
    for time_s in looked_at_s:
        clock.at(time_s, rooms.look)
    clock.run_until(100.0)
    # What is left when another thread comes takes twice as long.
    assert rooms.ended_s == pytest.approx(2.5 + 2 * 2.5)


def first_tokens_s(cluster: Cluster) -> list[float]:
    records = cluster.records
    return [first - arrival for first, arrival in zip(records.first_token_s, records.arrival_s, strict=True)]


@pytest.mark.parametrize(("instances", "cores"), [(1, 1), (2, 1), (3, 1), (3, 2), (5, 2), (2, 4)])
def test_prompts_of_as_many_instances_take_as_much_longer_as_there_are_too_few_cores(
    instances: int, cores: int
) -> None:
    simulated = mesh(pool("prefill", instances), pool("decode"), host={"cores": cores})
    cluster = run(simulated, *[(1.0, 100, 1)] * instances)
    taken_s = PREFILL_S * max(1.0, instances / cores)
    assert first_tokens_s(cluster) == pytest.approx([taken_s] * instances)
    busy_s = sum(each.engine.busy.prefill_s for each in cluster.instances.values())
    assert busy_s == pytest.approx(instances * taken_s)


def stream_s(*others: tuple[float, int, int], **host: Any) -> float:
    """How long a stream of 100 tokens takes on one core beside others' prompts."""
    sections = {"host": {"cores": 1} | host} if host else {}
    cluster = run(mesh(pool("prefill"), pool("decode"), **sections), (0.0, 100, 100), *others)
    return cluster.records.end_s[0] - cluster.records.arrival_s[0]


def test_steps_that_run_on_are_held_up_by_what_others_compute_meanwhile() -> None:
    alone_s = stream_s()
    assert stream_s(cores=2) == pytest.approx(alone_s)
    assert stream_s((0.5, 100, 1), cores=2) == pytest.approx(alone_s)
    # Both want the core: the stream is over when its own work and all of the prompts' are done.
    assert stream_s((0.5, 100, 1), cores=1) == pytest.approx(alone_s + PREFILL_S)
    others = ((0.5, 100, 1), (0.7, 100, 1), (1.1, 100, 1))
    assert stream_s(*others, cores=1) == pytest.approx(alone_s + 3 * PREFILL_S)


def test_what_is_taken_all_the_time_slows_what_there_is_no_core_for() -> None:
    alone_s = stream_s()
    assert stream_s(cores=1, idle_cores=0.25) == pytest.approx(alone_s / 0.75)
    assert stream_s(cores=2, idle_cores=0.25) == pytest.approx(alone_s)
    # A pass and its tokens bring about as much again.
    steps = 99
    more_s = stream_s(cores=1, pass_s=0.003, token_s=0.001, prompt_s=0.005) - alone_s
    assert more_s == pytest.approx(steps * 0.004 + (0.003 + 0.001 + 0.005))


@pytest.mark.parametrize("chunk_tokens", [30, 512])
def test_each_of_a_prompt_s_tokens_takes_of_the_core_once(chunk_tokens: int) -> None:
    instance = {"chunk_tokens": chunk_tokens}

    def first_token_s(**costs: float) -> float:
        simulated = mesh(pool("prefill"), pool("decode"), instance=instance, host={"cores": 1, **costs})
        return run(simulated, (0.0, 100, 2)).records.first_token_s[0]

    assert first_token_s(prompt_token_s=1e-4) - first_token_s() == pytest.approx(100 * 1e-4)


def test_who_wants_less_than_the_others_get_gets_it_all() -> None:
    one, other, woken = Worker(), Worker(), Worker()
    host = Host(HostConfig(cores=2), Clock())
    host.want(one, Wanted(1.0))
    host.want(woken, Wanted(0.5, 0.5))
    assert not host.is_full
    host.want(other, Wanted(1.5))
    assert host.is_full
    # What is left by who is woken is shared as the others want it.
    assert host.pace() == pytest.approx(1.5 / 2.5)
    assert host.pace(0.5) == 1.0
    # Of one core nobody gets more than anybody else, and at the most what it wants.
    host.want(woken, Wanted(1.6, 0.8))
    assert host.pace() == pytest.approx(2 / 4.5)
    assert host.pace(0.8) == pytest.approx(2 / 4.5 / 0.8)
    assert 2.5 * host.pace() + 1.6 * host.pace(0.8) == pytest.approx(2.0)
    host.want(one)
    host.want(woken)
    assert (host.pace(), host.is_full) == (1.0, False)


CONTENTION = {"beside_s_per_rate": 0.00004, "beside_share": 0.1}


def test_a_pass_takes_longer_by_what_another_computes_beside_it() -> None:
    host = Host(HostConfig(cores=2, **CONTENTION), Clock())
    one, other = Worker(), Worker()
    host.want(one, Wanted(1.0), passes_per_s=50)
    assert host.pace_of(one, 0.02) == 1.0, "alone"
    host.want(other, Wanted(1.0), passes_per_s=20)
    assert host.pace_of(one, 0.02) == pytest.approx(1 / (1 + 0.1 + 0.0008 / 0.02))
    assert host.pace_of(other, 0.05) == pytest.approx(1 / (1 + 0.1 + 0.002 / 0.05))
    assert one.changes == 1
    host.want(other, Wanted(1.0), passes_per_s=100)
    assert host.pace_of(one, 0.02) == pytest.approx(1 / (1 + 0.1 + 0.004 / 0.02))
    assert one.changes == 2
    host.want(other, Wanted(1.0), passes_per_s=100)
    assert one.changes == 2, "it is as it was"
    host.want(other)
    assert (one.changes, other.changes) == (3, 0)
    assert host.pace_of(one, 0.02) == 1.0


@pytest.mark.parametrize(("cores", "beside"), [(1, 0.0), (2, 0.5), (3, 1.0), (4, 1.0)])
def test_as_many_compute_beside_a_pass_as_there_are_other_cores(cores: int, beside: float) -> None:
    """Of three: each makes the others' longer by what it does, as much of the time as it has a core."""
    host = Host(HostConfig(cores=cores, **CONTENTION), Clock())
    workers = [Worker() for _ in range(3)]
    for worker, passes_per_s in zip(workers, (100, 50, 100), strict=True):
        host.want(worker, Wanted(1.0), passes_per_s=passes_per_s)
    step, chunk = (host.longer_for(workers[index]) for index in (0, 1))
    assert step == pytest.approx((beside * 0.006, beside * 0.2))
    assert chunk == pytest.approx((beside * 0.008, beside * 0.2))
    paces = min(1.0, cores / 3) / (1 + step.share + step.more_s / 0.02)
    assert host.pace_of(workers[0], 0.02) == pytest.approx(paces)


def test_a_prompt_and_a_stream_beside_it_take_each_other_s_time() -> None:
    steps = {**PERFORMANCE, "step_s": 0.01, "per_sequence_s": 0.0, "per_context_token_s": 0.0}
    pools = pool("prefill"), pool("decode", performance=steps)

    def ended_s(*others: tuple[float, int, int]) -> tuple[float, list[float]]:
        cluster = run(mesh(*pools, host={"cores": 2} | CONTENTION), (0.0, 100, 100), *others)
        return cluster.records.end_s[0], first_tokens_s(cluster)

    alone_s, _ = ended_s()
    beside_s, [_, prompt_s] = ended_s((0.5, 100, 1))
    # Beside steps of 10 ms, and these beside passes of 20.
    assert prompt_s == pytest.approx(1.1 * PREFILL_S + 0.004)
    lost = 1 - 1 / (1 + 0.1 + 0.002 / 0.01)
    assert beside_s - alone_s == pytest.approx(lost * prompt_s)


def test_steps_of_few_cost_a_neighbour_more_than_steps_of_many() -> None:
    """Each reads the weights: a step of one sequence takes 5 ms here, one of eleven 55."""
    steps = {**PERFORMANCE, "step_s": 0.0, "per_sequence_s": 0.005, "per_context_token_s": 0.0}

    def prompt_s(streams: int) -> float:
        simulated = mesh(pool("prefill"), pool("decode", performance=steps), host={"cores": 2} | CONTENTION)
        return first_tokens_s(run(simulated, *[(0.0, 100, 400)] * streams, (1.0, 100, 1)))[-1]

    for streams in (1, 11):
        assert prompt_s(streams) == pytest.approx(1.1 * PREFILL_S + 0.00004 * 200 / streams)


def test_who_dies_computes_beside_nobody() -> None:
    clock = Clock()
    host = Host(HostConfig(cores=2, **CONTENTION), clock)
    dying, other = FiveSteps(clock, host), FiveSteps(clock, host)
    for each in (dying, other):
        each.engine.wait_step()
    clock.at(2.0, dying.engine.die)
    clock.run_until(100.0)
    # Of its five seconds so much was done beside the other's steps of one.
    done_s = 2.0 / (1 + 0.1 + 0.00004)
    assert other.ended_s == pytest.approx(2.0 + 5.0 - done_s)


def test_who_is_short_of_cores_again_meanwhile_stays_so_as_long_from_then_on() -> None:
    clock = Clock()
    host = Host(HostConfig(cores=1, turns_hold_s=0.5), clock)
    one, other = Worker(), Worker()
    host.want(one, Wanted(1.0))
    host.want(other, Wanted(1.0))
    clock.run_until(1.0)
    host.want(other)
    clock.run_until(1.4)
    assert (host.is_full, host.is_short) == (False, True)
    host.want(other, Wanted(1.0))
    host.want(other)
    clock.run_until(1.8)
    told = one.changes
    assert host.is_short
    clock.run_until(2.0)
    assert not host.is_short
    assert one.changes == told + 1


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ({"cores": 0}, "host.cores"),
        ({"cores": 2, "idle_cores": 2.0}, "host.idle_cores"),
        ({"cores": 2, "token_s": -1.0}, "host.token_s"),
        ({"cores": 2, "prompt_token_s": -1.0}, "host.prompt_token_s"),
        ({"cores": 2, "turns_share": -0.1}, "host.turns_share"),
        ({"cores": 2, "turns_hold_s": -0.1}, "host.turns_hold_s"),
        ({"cores": 2, "beside_share": -0.1}, "host.beside_share"),
        ({"cores": 2, "threads": 1}, "host"),
    ],
)
def test_a_host_that_cannot_be_is_refused(host: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        mesh(pool("mixed"), host=host)


def test_stages_have_cores_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"pool\.mixed\.pipeline"):
        mesh(pool("mixed", pipeline=2), host={"cores": 2})
