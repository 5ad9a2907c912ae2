"""Whose core it is of which what prompts bring about is taken, by its closed forms."""

import pytest

from services.simulator.clock import Clock
from services.simulator.host import NO_LONGER, Host, PacedWork
from services.simulator.host_config import HostConfig
from services.simulator.seat import OF_ARRIVAL, Seat
from tests.services.simulator.meshes import mesh, pool, run
from tests.services.simulator.test_host import CONTENTION


class Computing:
    """An engine at a pass of a second."""

    def __init__(self, clock: Clock, host: Host) -> None:
        self.clock, self.seat, self.course = clock, Seat(host), PacedWork(0.0, 1.0)
        self.seat.on_change = self.change_pace
        self.seat.begin(1.0, 0, 0)

    def change_pace(self) -> None:
        self.course.change_pace(self.clock.now, self.seat.pace_of(1.0))


def seated(cores: int, passes: int) -> tuple[Clock, list[Computing]]:
    """A prompt brings about 0.4 seconds of a core."""
    clock = Clock()
    host = Host(HostConfig(cores=cores, prompt_s=0.4), clock)
    return clock, [Computing(clock, host) for _ in range(passes)]


def test_what_a_prompt_brings_about_is_done_on_the_core_of_who_computes_it() -> None:
    """Two engines on two cores: the one to which it comes loses as much, the other nothing."""
    clock, (own, other) = seated(cores=2, passes=2)
    clock.at(0.1, own.seat.take_prompt)
    clock.run_until(0.3)
    # Meanwhile half of the core is its pass's.
    assert own.course.done_by(0.3) == pytest.approx(0.1 + 0.1)
    assert other.course.done_by(0.3) == pytest.approx(0.3)
    clock.run_until(0.9)
    assert own.course.done_by(0.9) == pytest.approx(0.9 - OF_ARRIVAL * 0.4)
    assert other.course.done_by(0.9) == pytest.approx(0.9)
    clock.at(1.0, other.seat.take_sequence)
    clock.run_until(2.0)
    assert own.course.done_by(2.0) == pytest.approx(2.0 - 0.2)
    assert other.course.done_by(2.0) == pytest.approx(2.0 - (1 - OF_ARRIVAL) * 0.4)


def test_waits_are_what_a_pass_was_without_a_core() -> None:
    """Beside another one's on one core, and alone from then on."""
    clock, (own, other) = seated(cores=1, passes=2)
    clock.at(0.6, other.seat.end)
    clock.at(1.0, own.seat.end)
    clock.run_until(2.0)
    assert own.seat.waited_s == pytest.approx(0.6 / 2)
    assert other.seat.waited_s == pytest.approx(0.6 / 2)


def test_what_a_prompt_brings_about_costs_nobody_anything_while_a_core_is_idle() -> None:
    clock, [own] = seated(cores=2, passes=1)
    clock.at(0.1, own.seat.take_prompt)
    clock.at(0.3, own.seat.take_sequence)
    clock.run_until(0.9)
    # While it is there the two of them are one whose two threads have a core each.
    assert own.course.done_by(0.9) == pytest.approx(0.9)


def test_what_comes_while_nothing_is_computed_takes_of_everybody_s_cores() -> None:
    """Of a core that one pass had two prompts' arrivals take their part, until they are done."""
    clock, [own] = seated(cores=1, passes=1)
    idle = Seat(own.seat.host)
    clock.at(0.1, idle.take_prompt)
    clock.at(0.1, idle.take_prompt)
    clock.run_until(2.0)
    # Together they get as much as the pass.
    assert own.course.done_by(0.9) == pytest.approx(0.1 + 0.8 / 2)
    assert own.course.done_by(2.0) == pytest.approx(2.0 - 0.4)


def test_an_engine_that_has_ended_makes_nobody_s_passes_longer_though_work_is_left() -> None:
    clock = Clock()
    host = Host(HostConfig(cores=3, prompt_s=0.4, **CONTENTION), clock)
    own, other = Computing(clock, host), Computing(clock, host)
    own.seat.take_prompt()
    assert host.longer_for(other.seat) != NO_LONGER
    own.seat.end()
    assert host.longer_for(other.seat) == NO_LONGER
    clock.run_until(0.1)
    assert other.course.done_by(0.1) == pytest.approx(0.1)


def test_who_leaves_takes_its_work_along() -> None:
    clock, [own, leaving] = seated(cores=1, passes=2)
    leaving.seat.take_prompt()
    clock.at(0.1, leaving.seat.leave)
    clock.run_until(0.5)
    assert own.course.done_by(0.5) == pytest.approx(0.1 / 2 + 0.4)


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("mixed",)])
def test_a_prompt_takes_of_the_cores_as_it_comes_and_as_it_is_decoded(roles: tuple[str, ...]) -> None:
    """On one core: a first token comes later by the part that comes with it, and the end by all of it."""

    def times(**costs: float) -> tuple[float, float]:
        records = run(
            mesh(*map(pool, roles), host={"cores": 1, **costs}), (0.0, 100, 40), (0.0, 100, 1)
        ).records
        return records.first_token_s[0], records.end_s[0]

    (first_s, end_s), (later_s, later_end_s) = times(), times(prompt_s=0.004)
    assert later_s > first_s
    # Of the second prompt, whose first token is all, only half.
    assert later_end_s - end_s == pytest.approx(0.004 + 0.002)
