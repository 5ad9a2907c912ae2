"""Output lengths from history: unbiased, by the prompt's length; and what is left of who outlives them."""

import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.lengths import LengthDistribution, capped, certain
from scheduler.policy.length_history import LengthHistory

lengths = st.lists(st.integers(1, 4000), min_size=1, max_size=60)


@given(lengths)
def test_the_mean_is_that_of_what_was_seen(seen: list[int]) -> None:
    """Of one class of prompts, and so few requests that none is forgotten to speak of."""
    history = LengthHistory()
    for tokens in seen:
        history.add(100, tokens)
    prediction = history.predict(100)
    assert prediction.mean == pytest.approx(fmean(seen), rel=0.05)
    assert sum(probability for _, probability in prediction.points) == pytest.approx(1.0)
    assert [*prediction.points] == sorted(prediction.points)


def test_prompts_of_other_lengths_are_told_apart_once_there_are_enough_of_them() -> None:
    chance = random.Random(2)
    history = LengthHistory()
    for _ in range(400):
        history.add(20, chance.randint(300, 500))
        history.add(1500, chance.randint(10, 30))
    assert history.predict(25).mean == pytest.approx(400, rel=0.05)
    assert history.predict(1600).mean == pytest.approx(20, rel=0.1)
    assert history.predict(200).mean == pytest.approx(210, rel=0.1)
    # Nobody has asked so: like everybody.


def test_what_is_usual_now_outweighs_what_was() -> None:
    history = LengthHistory()
    for tokens in (50, 400):
        for _ in range(3000):
            history.add(64, tokens)
    assert history.predict(64).mean == pytest.approx(400, rel=0.1)


def test_who_was_cut_short_counts_as_those_that_got_further() -> None:
    """Else a few clients that ask for little make everybody's answers seem short."""
    history = LengthHistory()
    for _ in range(20):
        history.add(64, 40)
        history.add(64, 300)
    for _ in range(20):
        history.add(64, 2, is_cut=True)
        history.add(64, 100, is_cut=True)
    points = dict(history.predict(64).points)
    assert [*points] == [pytest.approx(40), pytest.approx(300)]
    # Those cut at 2 were as likely to be either; those cut at 100 would have been long.
    assert points[max(points)] == pytest.approx(0.5 + 0.5 * 20 / 80 + 0.06, abs=0.06)


def test_a_cut_with_none_further_is_all_that_is_known() -> None:
    history = LengthHistory()
    history.add(64, 128, is_cut=True)
    assert history.predict(64) == certain(128)


def test_before_anything_has_ended_something_is_said() -> None:
    assert LengthHistory(certain(64)).predict(10) == certain(64)


def test_a_request_that_outlives_its_prediction_is_predicted_by_those_that_did() -> None:
    """Aladdin, 4.3."""
    prediction = LengthDistribution(((10.0, 0.5), (100.0, 0.3), (400.0, 0.2)))
    assert prediction.mean == pytest.approx(115)
    assert prediction.beyond(50).mean == pytest.approx((100 * 0.3 + 400 * 0.2) / 0.5)
    assert prediction.beyond(400).mean == 401
    assert prediction.quantile(0.5) == 10
    assert prediction.quantile(0.51) == 100
    assert not prediction.is_heavy
    assert prediction.probability_over(100) == pytest.approx(0.2)


def test_nobody_draws_more_than_was_asked_for() -> None:
    prediction = LengthDistribution(((10.0, 0.5), (100.0, 0.3), (400.0, 0.2)))
    assert capped(prediction, 64).points == ((10.0, 0.5), (64.0, 0.5))
    assert capped(prediction, 1000).points[-1] == (400.0, 0.2)
