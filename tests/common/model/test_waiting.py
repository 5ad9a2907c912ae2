"""How one waits: awake as long as that helps, asleep from where it does not."""

import os
import time
from collections.abc import Iterator

import pytest

from common.bell import Bell, Bells
from common.exchange_shape import RecordPlace
from common.model import waiting as module
from common.model.waiting import (
    IDLE_SLEEP_S,
    LATE_S,
    LONGEST_SLEEP_S,
    LOOKS_PER_CHECK,
    SPINS,
    WANTED_S,
    YIELD_S,
    PeerSilent,
    Waiting,
    wait_until,
)
from common.transfer.buffers import SharedBuffer

PLACE = RecordPlace(0, 64, 3)


class Machine:
    """A clock that goes on by what is done. ``yield_s``: how late a yield comes back."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.yield_s = 2e-6
        self.yields = 0
        self.sleeps: list[float] = []

    def monotonic(self) -> float:
        self.now_s += 1e-7
        return self.now_s

    def sched_yield(self) -> None:
        self.yields += 1
        self.now_s += self.yield_s

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(time, "monotonic", machine.monotonic)
    monkeypatch.setattr(time, "sleep", machine.sleep)
    monkeypatch.setattr(os, "sched_yield", machine.sched_yield)
    return machine


@pytest.fixture
def bells() -> Iterator[Bells]:
    buffer = SharedBuffer(64, "lamella-bell")
    yield Bells([Bell(buffer.memory, 0)])
    buffer.close()


def pause(waiting: Waiting, times: int, bells: Bells | None = None) -> None:
    for _ in range(times):
        waiting.pause(bells)


def test_it_looks_then_yields_then_sleeps_ever_longer(machine: Machine) -> None:
    waiting = Waiting()
    pause(waiting, SPINS - 1)
    assert (machine.yields, machine.sleeps) == (0, [])
    while not machine.sleeps:
        waiting.pause()
    assert 0.9 * YIELD_S < machine.yields * machine.yield_s < 1.2 * YIELD_S
    pause(waiting, 20)
    assert machine.sleeps == sorted(machine.sleeps)
    assert machine.sleeps[-1] == LONGEST_SLEEP_S
    pause(waiting, 2000)
    assert machine.sleeps[-1] == IDLE_SLEEP_S


def test_a_yield_that_comes_back_late_is_the_last_one_for_a_while(
    machine: Machine, bells: Bells, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bells, "wait", machine.sleep)
    waiting = Waiting()
    machine.yield_s = 2 * LATE_S
    pause(waiting, SPINS, bells)
    assert (machine.yields, machine.sleeps) == (1, [])
    until_s = machine.now_s + WANTED_S
    # Other waits, too, do not yield until then.
    while machine.now_s < until_s - 0.001:
        waiting.restart()
        pause(waiting, SPINS, bells)
    assert machine.yields == 1
    # Who would have to be woken by a clock goes on yielding.
    waiting.restart()
    pause(waiting, SPINS)
    assert machine.yields == 2
    machine.yields = 1
    machine.now_s += WANTED_S
    machine.yield_s = 2e-6
    waiting.restart()
    pause(waiting, SPINS + 10, bells)
    assert machine.yields == 12


def test_it_sleeps_on_a_bell_where_there_is_one(
    machine: Machine, bells: Bells, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[float | str] = []
    monkeypatch.setattr(bells, "wait", heard.append)
    monkeypatch.setattr(bells, "listen", lambda: heard.append("listen"))
    waiting = Waiting()
    machine.yield_s = 2 * LATE_S
    for _ in range(SPINS + 2):
        waiting.pause(bells)
    assert heard == [LONGEST_SLEEP_S, "listen"] * 2
    assert machine.sleeps == []


def test_what_usually_takes_longer_is_waited_for_awake(machine: Machine) -> None:
    waiting = Waiting()
    usual_s = 4 * YIELD_S
    for _ in range(60):
        until_s = machine.now_s + usual_s
        while machine.now_s < until_s:
            waiting.pause()
        waiting.restart()
    machine.sleeps.clear()
    until_s = machine.now_s + 1.5 * usual_s
    while machine.now_s < until_s:
        waiting.pause()
    assert machine.sleeps == []


def test_who_is_gone_is_not_waited_for_long(machine: Machine) -> None:
    with pytest.raises(PeerSilent, match="is gone"):
        wait_until(lambda place, number: False, PLACE, 7, Waiting(), 60.0, lambda: True)
    assert 0 < len(machine.sleeps) <= LOOKS_PER_CHECK


def test_who_does_not_answer_is_given_up(machine: Machine) -> None:
    began_s = machine.now_s
    with pytest.raises(PeerSilent, match=r"has not answered for 0\.2 s"):
        wait_until(lambda place, number: False, PLACE, 7, Waiting(), 0.2, lambda: False)
    assert 0.2 < machine.now_s - began_s < 0.2 + LOOKS_PER_CHECK * 2 * LONGEST_SLEEP_S


def test_what_is_there_is_not_waited_for(machine: Machine) -> None:
    asked: list[tuple[RecordPlace, int]] = []

    def has_come(place: RecordPlace, number: int) -> bool:
        asked.append((place, number))
        return len(asked) == 3

    wait_until(has_come, PLACE, 7, Waiting(), 1.0, lambda: True)
    assert asked == [(PLACE, 7)] * 3
    assert module.SPINS > 3
    assert (machine.yields, machine.sleeps) == (0, [])
