"""What an instance learns of its own steps, on steps of known laws."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.laws import chunk_features, largest_context, pairs_of, prompt_s, step_features
from common.performance import FittedTime
from scheduler.policy.fitting import WARM_SAMPLES, LinearFit


def steps(chance: random.Random, count: int) -> list[tuple[int, int]]:
    """Batches and their context, as they come and go."""
    batch, context, found = 1, 200, []
    for _ in range(count):
        if chance.random() < 0.1:
            batch = chance.randint(1, 64)
            context = batch * chance.randint(50, 2000)
        context += batch
        found.append((batch, context))
    return found


def law(coefficients: tuple[float, float, float], batch: int, context: int) -> float:
    return sum(map(float.__mul__, coefficients, step_features(batch, context)))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30), st.floats(1e-4, 1e-2), st.floats(1e-5, 1e-2), st.floats(1e-3, 5e-2))
# Once warm, this one predicts a step to take less than no time.
@example(0, 1e-4, 1e-5, 0.0078125)
def test_a_law_is_learned_through_noise_within_the_papers_error(
    seed: int, per_token: float, per_sequence: float, base: float
) -> None:
    """Aladdin's eq. 3 is within 5 %: here of batches that were not seen, by steps with 5 % of noise."""
    chance = random.Random(seed)
    truth = (per_token, per_sequence, base)
    fit = LinearFit(3)
    for batch, context in steps(chance, 600):
        fit.observe(step_features(batch, context), law(truth, batch, context) * chance.uniform(0.95, 1.05))
    assert fit.fitted is not None
    for batch, context in ((4, 4000), (16, 16_000), (48, 40_000)):
        expected = law(truth, batch, context)
        assert fit.fitted.seconds(step_features(batch, context)) == pytest.approx(expected, rel=0.05)
    assert fit.fitted.relative_error < 0.06


def test_nothing_is_said_before_there_is_something_to_say_it_by() -> None:
    fit = LinearFit(3)
    for index in range(WARM_SAMPLES):
        assert fit.fitted is None
        fit.observe(step_features(1 + index % 4, 100 * index), 0.01)
    assert fit.fitted is not None


def test_steps_that_are_all_alike_are_known_exactly_and_stay_so() -> None:
    fit = LinearFit(3)
    for _ in range(20_000):
        fit.observe(step_features(1, 500), 0.022)
    assert fit.fitted is not None
    assert fit.fitted.seconds(step_features(1, 500)) == pytest.approx(0.022, rel=1e-3)
    assert all(abs(each) < 1 for each in fit.coefficients)
    for batch, context in steps(random.Random(1), 300):
        fit.observe(step_features(batch, context), law((2e-3, 1e-3, 0.02), batch, context))
    assert fit.fitted.seconds(step_features(16, 9000)) == pytest.approx(0.054, rel=0.05)


def test_a_machine_that_becomes_slower_is_followed() -> None:
    chance = random.Random(3)
    fit = LinearFit(3)
    for factor in (1.0, 3.0):
        for batch, context in steps(chance, 1500):
            fit.observe(step_features(batch, context), factor * law((2e-3, 1e-3, 0.02), batch, context))
    assert fit.fitted is not None
    assert fit.fitted.seconds(step_features(8, 8000)) == pytest.approx(3 * 0.044, rel=0.1)


def test_a_step_that_was_held_up_teaches_little() -> None:
    chance = random.Random(5)
    fit = LinearFit(3)
    for index, (batch, context) in enumerate(steps(chance, 800)):
        held_up_s = 5.0 if index % 50 == 49 else 0.0
        fit.observe(step_features(batch, context), law((2e-3, 1e-3, 0.02), batch, context) + held_up_s)
    assert fit.fitted is not None
    assert fit.fitted.seconds(step_features(8, 8000)) == pytest.approx(0.044, rel=0.25)


@pytest.mark.parametrize(("features", "seconds"), [((1.0,), 0.1), ((1.0, 2.0, 3.0), -1.0)])
def test_what_is_no_step_is_refused(features: tuple[float, ...], seconds: float) -> None:
    with pytest.raises(ValueError, match="needs 3 features"):
        LinearFit(3).observe(features, seconds)


def test_a_prompts_time_is_that_of_its_chunks() -> None:
    fitted = FittedTime((0.9, 0.05, 0.002), 0.0, 100)
    chunks = ((0, 512), (512, 512), (1024, 76))
    expected = sum(
        fitted.seconds(chunk_features(tokens, pairs_of(start, tokens))) for start, tokens in chunks
    )
    assert prompt_s(fitted, 1100, 512) == pytest.approx(expected)
    rest = sum(
        fitted.seconds(chunk_features(tokens, pairs_of(start, tokens))) for start, tokens in chunks[1:]
    )
    assert prompt_s(fitted, 1100, 512, computed_tokens=512) == pytest.approx(rest)


def test_the_largest_context_takes_just_the_time_that_is_allowed() -> None:
    """Aladdin's eq. 4 is eq. 3 solved for the context."""
    fitted = FittedTime((2e-3, 1e-3, 0.02), 0.0, 100)
    context = largest_context(fitted, 16, 0.1)
    assert fitted.seconds((context / 1e3, 16.0, 1.0)) == pytest.approx(0.1)
    assert largest_context(fitted, 100, 0.1) == 0.0
    assert largest_context(FittedTime((0.0, 1e-3, 0.02), 0.0, 100), 16, 0.1) == float("inf")
