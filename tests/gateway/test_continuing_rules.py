"""When a stream that broke goes on, and how soon."""

import pytest

from common.errors import InstanceLost, NoInstanceReady, Overloaded
from gateway.continuing import (
    CONTINUE_BACKOFF_S,
    MOVED_WITHIN_S,
    PROGRESS_TOKENS,
    backoff_s,
    chosen_since_s,
    continuations_after,
)


@pytest.mark.parametrize(
    ("before", "tokens", "after"),
    [(0, 0, 1), (2, PROGRESS_TOKENS - 1, 3), (2, PROGRESS_TOKENS, 1), (0, PROGRESS_TOKENS, 1)],
)
def test_an_attempt_that_got_on_begins_the_count_anew(before: int, tokens: int, after: int) -> None:
    assert continuations_after(before, tokens) == after


@pytest.mark.parametrize("code", [Overloaded.code, NoInstanceReady.code])
def test_where_nobody_had_room_each_attempt_waits_twice_as_long(code: str) -> None:
    assert [backoff_s(code, number) / CONTINUE_BACKOFF_S for number in range(4)] == [1, 2, 4, 8]


def test_what_broke_otherwise_goes_on_at_once() -> None:
    assert backoff_s(InstanceLost.code, 3) == 0.0


def test_a_new_home_is_chosen_after_its_attempt_was_asked_for_and_not_long_ago() -> None:
    assert chosen_since_s(95.0, 100.0) == 95.0
    assert chosen_since_s(5.0, 100.0) == 100.0 - MOVED_WITHIN_S
