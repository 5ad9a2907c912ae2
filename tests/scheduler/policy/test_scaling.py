"""When counts follow what is needed: limits, pauses, caution, and what was learned."""

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import ScalingConfig
from scheduler.policy.scaling import Asked, ServiceScaler, WorkerLaw
from scheduler.policy.worker_counts import Need

SETTINGS = ScalingConfig(window_s=10.0, up_cooldown_s=20.0, down_after_s=60.0, down_margin=0.15)
PER_WORKER = 4.0
"""Requests a second that one worker serves."""


def needed(rate_per_s: float) -> Need:
    return Need(max(1, -int(-rate_per_s // PER_WORKER)), "so many requests")


def needed_times(factor: float, rate_per_s: float) -> Need:
    return needed(factor * rate_per_s)


def asked(
    rate_per_s: float,
    *,
    was_missed: bool = False,
    has_changed: bool = False,
    is_sure: bool = False,
    need: Callable[[float], Need] = needed,
) -> Asked:
    higher = need(rate_per_s * (1 + SETTINGS.down_margin))
    return Asked(rate_per_s, need(rate_per_s), higher, was_missed, has_changed, is_sure)


class Service:
    """One that starts and ends workers as it is told, at once."""

    def __init__(self, workers: int = 1, least: int = 1, most: int = 8) -> None:
        self.scaler = ServiceScaler(SETTINGS, least, most)
        self.workers = workers
        self.now = 0.0
        self.reason = ""

    def window(self, window: Asked) -> int:
        self.now += SETTINGS.window_s
        self.workers, self.reason = self.scaler.decide(self.workers, window, self.now)
        return self.workers


def test_it_grows_at_once_and_shrinks_only_when_fewer_would_have_done_for_long() -> None:
    service = Service()
    service.now += 1000.0
    assert service.window(asked(2.0)) == 1
    service.now += SETTINGS.up_cooldown_s
    assert service.window(asked(18.0)) == 5
    counts = [service.window(asked(2.0)) for _ in range(8)]
    assert counts[:5] == [5] * 5, "what was needed a moment ago may be needed again"
    assert counts[-1] == 1


def test_the_second_step_up_waits_for_its_pause_unless_the_workload_has_jumped() -> None:
    service = Service()
    service.window(asked(2.0))
    service.now += SETTINGS.up_cooldown_s
    assert service.window(asked(6.0)) == 2
    assert service.window(asked(10.0)) == 2
    assert "after a pause of 20 s" in service.reason
    assert service.window(asked(10.0, has_changed=True)) == 3


def test_a_rate_that_wavers_about_a_border_moves_nothing_down() -> None:
    service = Service(workers=3)
    counts = {service.window(asked(8.0 + wave)) for wave in (0.3, -0.3) * 30}
    assert counts == {3}


def test_missed_objectives_add_one_and_keep_it_for_a_while() -> None:
    service = Service(workers=2)
    service.window(asked(6.0))
    service.now += SETTINGS.up_cooldown_s
    assert service.window(asked(6.0, was_missed=True)) == 3
    assert "objectives were missed" in service.reason
    assert [service.window(asked(4.0)) for _ in range(5)] == [3] * 5


def test_those_still_on_their_way_are_waited_for_before_one_more_is_asked_for() -> None:
    scaler = ServiceScaler(SETTINGS, 1, 8)
    scaler.decide(1, asked(2.0), 0.0)
    assert scaler.decide(1, asked(14.0, has_changed=True), 10.0)[0] == 4
    for window in range(2, 10):
        assert scaler.decide(2, asked(14.0, was_missed=True), 10.0 * window)[0] == 4


@settings(deadline=None)
@given(
    st.integers(0, 3),
    st.integers(0, 6),
    st.lists(st.tuples(st.floats(0.0, 100.0), st.booleans(), st.booleans(), st.integers(0, 12)), max_size=60),
)
def test_it_never_leaves_the_operators_limits_whatever_happens(
    least: int, more: int, windows: list[tuple[float, bool, bool, int]]
) -> None:
    scaler = ServiceScaler(SETTINGS, least, least + more)
    for window, (rate_per_s, was_missed, has_changed, current) in enumerate(windows):
        of_it = asked(rate_per_s, was_missed=was_missed, has_changed=has_changed, is_sure=True)
        desired, reason = scaler.decide(current, of_it, SETTINGS.window_s * window)
        assert least <= desired <= least + more
        assert reason


@settings(deadline=None)
@given(st.floats(0.5, 40.0), st.integers(0, 1 << 30), st.integers(1, 8))
def test_a_constant_load_ends_in_a_constant_count(rate_per_s: float, seed: int, workers: int) -> None:
    """With the noise of measured rates, some percent."""
    chance, service = random.Random(seed), Service(workers=workers, most=32)
    for _ in range(20):
        service.window(asked(rate_per_s * chance.uniform(0.97, 1.03), is_sure=True))
    settled = [
        service.window(asked(rate_per_s * chance.uniform(0.97, 1.03), is_sure=True)) for _ in range(200)
    ]
    assert sum(one != other for one, other in pairwise(settled)) <= 1


@settings(deadline=None)
@given(st.floats(0.1, 100.0), st.floats(0.1, 100.0), st.integers(1, 8))
def test_a_higher_rate_never_ends_with_fewer_workers(one: float, other: float, workers: int) -> None:
    ends = []
    for rate_per_s in sorted((one, other)):
        service = Service(workers=workers, most=64)
        for _ in range(30):
            service.window(asked(rate_per_s, is_sure=True))
        ends.append(service.workers)
    assert ends[0] <= ends[1]


def test_the_line_is_learned_and_names_what_equation_7_does() -> None:
    law, chance = WorkerLaw(), random.Random(1)
    assert law.workers(20.0, 3) is None
    for _ in range(400):
        rate_per_s = chance.uniform(4.0, 80.0)
        law.observe(rate_per_s, needed(rate_per_s).workers)
    for rate_per_s in (10.0, 30.0, 50.0, 70.0):
        assert law.workers(rate_per_s, 99) == pytest.approx(needed(rate_per_s).workers, abs=1)
    assert law.workers(200.0, 50) == 50, "beyond what was seen the estimate holds"
    assert law.workers(200.0, 2) == pytest.approx(20, abs=1), "but never under what was"


def test_what_kept_the_objectives_corrects_an_estimate_that_is_too_high_or_too_low() -> None:
    """The estimate is 1.5 times, or two thirds of, what is truly needed."""
    chance = random.Random(2)
    for factor in (1.5, 2 / 3):
        service = Service(most=64)
        for _ in range(3000):
            rate_per_s = chance.uniform(8.0, 80.0)
            truly = needed(rate_per_s).workers
            service.scaler.desired = service.workers = max(1, truly + chance.choice((-1, 0, 0)))
            was_missed = service.workers < truly
            service.window(
                asked(
                    rate_per_s,
                    was_missed=was_missed,
                    is_sure=True,
                    need=partial(needed_times, factor),
                )
            )
        wrong = sum(abs(needed(factor * rate).workers - needed(rate).workers) for rate in range(20, 70, 5))
        law = service.scaler.law
        left = sum(abs((law.workers(rate, 1) or 0) - needed(rate).workers) for rate in range(20, 70, 5))
        assert left < wrong / 2, factor


def test_without_anything_known_there_stay_as_many_as_there_are_within_the_limits() -> None:
    assert ServiceScaler(SETTINGS, 1, 4).keep(3, "nothing known", 0.0) == (3, "nothing known")
    assert ServiceScaler(SETTINGS, 1, 4).keep(9, "nothing known", 0.0)[0] == 4


def test_the_first_that_is_known_after_a_while_in_the_dark_is_no_reason_to_shrink_at_once() -> None:
    scaler = ServiceScaler(SETTINGS, 1, 8)
    scaler.keep(4, "nothing known", 90.0)
    assert [scaler.decide(4, asked(2.0), 100.0 + 10.0 * window)[0] for window in range(6)] == [4] * 5 + [1]


def test_instances_that_were_still_starting_when_it_began_are_not_taken_for_a_surplus() -> None:
    scaler = ServiceScaler(SETTINGS, 1, 8)
    assert scaler.decide(1, asked(2.0), 10.0)[0] == 1
    assert scaler.decide(3, asked(2.0), 20.0)[0] == 3, "two more have come up"
    assert scaler.decide(2, asked(2.0), 30.0)[0] == 3, "one is away"
    assert [scaler.decide(3, asked(2.0), 40.0 + 10.0 * window)[0] for window in range(4)][-1] == 1
    assert scaler.decide(3, asked(2.0), 80.0)[0] == 1, "who drains is no reason to stay"


def test_a_step_down_says_what_held_it_up() -> None:
    service = Service(workers=4)
    for rate_per_s in (14.0, 6.0, 2.0, 2.0, 2.0, 2.0, 2.0):
        service.window(asked(rate_per_s))
    assert service.workers == 4
    service.window(asked(2.0))
    assert service.workers == 2
    assert service.reason == "so many requests: 1 needed (estimated), 2 within 60 s"


def teach(service: Service, factor: float) -> None:
    """The line asks for so many times what is needed."""
    chance = random.Random(5)
    for _ in range(200):
        rate_per_s = chance.uniform(1.0, 12.0)
        service.scaler.law.observe(rate_per_s, needed_times(factor, rate_per_s).workers)


def test_line_and_estimate_do_not_take_turns_when_few_requests_make_the_rate_unsure() -> None:
    service = Service(workers=2)
    teach(service, 2.0)
    counts = [
        service.window(asked(6.0, is_sure=is_sure))
        for is_sure in (True, False, True, False)
        for _ in range(12)
    ]
    assert set(counts[2:]) == {3}, "the line says three, the estimate two"


def test_a_line_that_another_cause_than_the_load_has_taught_is_not_believed_for_ever() -> None:
    service = Service(workers=4)
    teach(service, 3.0)
    counts = [service.window(asked(3.0, is_sure=True)) for _ in range(300)]
    assert counts[20] == 3, "it is believed while it may be right"
    assert counts[-1] == 1
    assert service.scaler.law.workers(3.0, 1) == 1, "and learns in the end"


def test_so_is_one_that_only_holds_workers_back_from_leaving() -> None:
    """It agrees with the estimate at the rate, and asks for two at the one against which it shrinks."""
    service = Service(workers=2)
    teach(service, 1.25)
    law, higher_per_s = service.scaler.law, 3.0 * (1 + SETTINGS.down_margin)
    assert (law.workers(3.0, 1), law.workers(higher_per_s, 1)) == (1, 2)
    assert [service.window(asked(3.0, is_sure=True)) for _ in range(100)][-1] == 1


def test_a_line_that_is_right_is_doubted_ever_more_seldom() -> None:
    """The estimate is one worker, and two are needed, for a day."""
    service, missed = Service(workers=2), []
    teach(service, 2.0)
    for window in range(8640):
        was_missed = service.workers < 2
        missed += [window] * was_missed
        service.window(asked(3.0, is_sure=True, was_missed=was_missed))
    assert 0 < len(missed) < 0.002 * 8640
    calm = [later - earlier for earlier, later in pairwise(missed) if later > earlier + 1]
    assert len(calm) >= 3
    assert calm == sorted(calm)


def test_a_quiet_night_raises_no_doubt_of_what_the_day_has_taught() -> None:
    service = Service(workers=1)
    teach(service, 2.0)
    for _ in range(360):
        service.window(asked(1.0, is_sure=True))
    assert [service.window(asked(3.0, is_sure=True)) for _ in range(6)] == [2] * 6


def test_a_line_is_believed_also_where_workers_may_leave_at_once() -> None:
    hasty = msgspec.structs.replace(SETTINGS, down_after_s=0.0)
    service = Service(workers=2)
    service.scaler = ServiceScaler(hasty, 1, 8)
    teach(service, 2.0)
    missed = 0
    for _ in range(500):
        was_missed = service.workers < 2
        missed += was_missed
        service.window(asked(3.0, is_sure=True, was_missed=was_missed))
    assert missed < 20
