"""At what pace a machine was in each run, by what it took near it and in it."""

import math

import msgspec
import pytest

from services.compare.paces import LEAST_LOOKS, OF_LOOKS, with_looks
from services.compare.records import RunKey, RunRecord
from tests.services.compare.test_figures import run

BUSY = (0.1, 0.6, 1.0, 1.4, 1.8, 1.9)
"""Cores that instances keep busy, run by run."""


def looked(number: int, busy_cores: float, pace: float, looks: int = 40) -> RunRecord:
    """Looks take 5 ms and 8 % longer for each core that is busy."""
    record = msgspec.structs.replace(run("split", number, 1.0, 1.0), duration_s=10.0)
    look_s = 0.005 * math.exp(0.08 * busy_cores) * pace
    return msgspec.structs.replace(record, instances_cpu_s=10.0 * busy_cores, looks_s=(look_s,) * looks)


def test_looks_that_take_longer_as_more_cores_are_busy_say_nothing_of_the_machine() -> None:
    records = [looked(number, busy, 1.0) for number, busy in enumerate(BUSY)]
    near = {each.key: 1.0 + 0.01 * number for number, each in enumerate(records)}
    straight = [
        msgspec.structs.replace(each, looks_s=tuple(near[each.key] * look_s for look_s in each.looks_s))
        for each in records
    ]
    assert with_looks(near, straight) == pytest.approx(near)


def test_a_run_in_slow_minutes_is_slower_by_a_part_of_what_its_looks_say() -> None:
    records = [looked(number, busy, 1.06 if number == 2 else 1.0) for number, busy in enumerate(BUSY)]
    near = {each.key: 1.0 for each in records}
    paces = list(with_looks(near, records).values())
    # The line goes through all of them, so that the others are a little under it.
    assert 1 + 0.6 * OF_LOOKS * 0.06 < paces[2] < 1 + OF_LOOKS * 0.06
    assert all(0.98 < pace < 1.0 for number, pace in enumerate(paces) if number != 2)
    mean = math.prod(paces) ** (1 / len(paces))
    assert mean == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("few", ["looks", "runs"])
def test_few_looks_or_runs_say_nothing(few: str) -> None:
    looks = LEAST_LOOKS - 1 if few == "looks" else LEAST_LOOKS
    busy = BUSY if few == "looks" else BUSY[:4]
    records = [looked(number, each, 1.0 + 0.1 * (number % 2), looks) for number, each in enumerate(busy)]
    near: dict[RunKey, float] = {each.key: 1.1 for each in records}
    assert with_looks(near, records) == near


def test_a_run_of_which_nothing_was_taken_near_has_no_pace() -> None:
    records = [looked(number, busy, 1.0) for number, busy in enumerate(BUSY)]
    near = {each.key: 1.0 for each in records[1:]}
    assert with_looks(near, records).keys() == near.keys()
