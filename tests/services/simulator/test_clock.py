"""What is due happens in the order of its time, and of its scheduling where that is the same."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import pytest

from services.simulator.clock import Clock, Timer


@dataclass
class Told:
    """What happened, and when by the clock."""

    clock: Clock = field(default_factory=Clock)
    names: list[tuple[str, float]] = field(default_factory=list)

    def note(self, name: str, then: Callable[[], object] = lambda: None) -> Callable[[], None]:
        def happen() -> None:
            self.names.append((name, self.clock.now))
            then()

        return happen


def test_what_is_scheduled_for_now_comes_after_what_was_due_then_and_soon_before_it() -> None:
    told = Told()
    clock = told.clock
    clock.at(2.0, told.note("last"))

    def first() -> None:
        clock.at(1.0, told.note("third"))
        clock.soon(told.note("soon"))

    clock.at(1.0, told.note("first", first))
    clock.at(1.0, told.note("second", lambda: clock.at(0.5, told.note("late"))))
    clock.run_until(1.5)
    names = ["first", "soon", "second", "third", "late"]
    assert told.names == [(name, 1.0) for name in names]
    assert (clock.now, clock.events) == (1.5, 5)
    clock.run_until(3.0)
    assert told.names[-1] == ("last", 2.0)


def test_what_was_cancelled_does_not_happen_be_it_by_one_that_is_due_at_the_same_time() -> None:
    told = Told()
    clock = told.clock
    timers: list[Timer] = []
    timers.append(clock.at(1.0, told.note("cancelled before")))
    clock.at(1.0, told.note("first", lambda: clock.cancel(timers[1])))
    timers.append(clock.at(1.0, told.note("cancelled meanwhile")))
    clock.cancel(timers[0])
    clock.cancel(clock.at(2.0, told.note("alone")))
    clock.run_until(5.0)
    assert told.names == [("first", 1.0)]
    assert (clock.now, clock.events) == (5.0, 1)
    clock.cancel(timers[0])


def test_a_time_whose_first_timers_were_cancelled_has_come_before_anybody_is_asked_whether_it_is_over() -> (
    None
):
    told = Told()
    clock = told.clock
    for _ in range(2):
        clock.cancel(clock.at(1.0, told.note("cancelled")))
    clock.at(1.0, told.note("due"))
    asked: list[float] = []

    def is_over() -> bool:
        asked.append(clock.now)
        return False

    clock.run_until(2.0, is_over)
    assert told.names == [("due", 1.0)]
    assert asked == [0.0, 1.0]


def test_what_was_halted_goes_on_where_it_stood() -> None:
    told = Told()
    clock = told.clock
    clock.at(1.0, told.note("first", clock.halt))
    clock.at(1.0, told.note("second"))
    clock.run_until(9.0)
    assert (told.names, clock.now) == ([("first", 1.0)], 1.0)
    clock.at(1.0, told.note("third"))
    clock.at(0.0, told.note("from before"))
    clock.run_until(9.0, lambda: len(told.names) == 3)
    clock.run_until(9.0)
    assert [name for name, _ in told.names] == ["first", "second", "third", "from before"]
    assert clock.now == 9.0


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_turns_are_those_of_a_heap(seed: int) -> None:
    """Held to the plainest clock there is: everything in one heap by (time, turn)."""
    chance = random.Random(seed)
    clock, told = Clock(), list[tuple[float, int]]()
    heap: list[tuple[float, int]] = []
    timers: dict[int, Timer] = {}

    def schedule(time_s: float) -> None:
        timer = clock.at(time_s, happen)
        timers[timer.turn] = timer
        heappush(heap, (max(time_s, clock.now), timer.turn))

    def happen() -> None:
        told.append((clock.now, clock.turn))
        while True:
            expected = heappop(heap)
            if expected[1] in timers:
                break
        assert told[-1] == expected
        del timers[clock.turn]
        for _ in range(chance.choice((0, 0, 1, 2))):
            schedule(clock.now + chance.choice((-1.0, 0.0, 0.0, 0.5, 1.0, chance.random())))
        if timers and chance.random() < 0.3:
            turn = chance.choice(list(timers))
            clock.cancel(timers.pop(turn))
        if chance.random() < 0.1:
            clock.take_turn()
        if chance.random() < 0.1:
            clock.halt()

    for _ in range(50):
        schedule(float(chance.randint(0, 9)))
    for _ in range(200):
        clock.run_until(clock.now + chance.random())
    assert len(told) > 30
    assert clock.events == len(told)
