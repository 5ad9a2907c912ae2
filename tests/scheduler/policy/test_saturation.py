"""From how many tokens on a chunk keeps the device busy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policy.saturation import SATURATED, saturation_length


def test_where_the_rate_stops_growing_is_the_saturation_length() -> None:
    """A device that needs 10 ms whatever it does, and then 1 ms for every 10 tokens beyond 100."""
    seconds = {tokens: 0.01 + max(0, tokens - 100) * 1e-4 for tokens in (10, 50, 100, 200, 400, 800)}
    assert saturation_length(seconds) == 100


def test_without_a_measurement_there_is_none() -> None:
    with pytest.raises(ValueError, match="no chunk"):
        saturation_length({})


@given(st.dictionaries(st.integers(1, 4096), st.floats(1e-4, 10), min_size=1))
def test_it_is_the_shortest_that_comes_near_the_best(seconds: dict[int, float]) -> None:
    found = saturation_length(seconds)
    best = max(tokens / taken for tokens, taken in seconds.items())
    assert found / seconds[found] >= SATURATED * best
    assert all(tokens / taken < SATURATED * best for tokens, taken in seconds.items() if tokens < found)
