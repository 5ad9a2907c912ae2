"""When a stream that broke goes on, and how soon."""

import pytest

from common.errors import InstanceLost, InvalidRequest, NoInstanceReady, Overloaded, RequestError
from gateway.continuing import (
    CONTINUE_BACKOFF_S,
    MOVED_WITHIN_S,
    PROGRESS_TOKENS,
    backoff_s,
    chosen_since_s,
    continuations_after,
    may_wait,
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


@pytest.mark.parametrize(
    ("refusal", "has_waited", "waited_s", "waits"),
    [
        (NoInstanceReady("nobody"), False, 0.0, True),
        (NoInstanceReady("nobody"), True, 9.9, True),
        (NoInstanceReady("nobody"), True, 10.0, False),
        (Overloaded("full"), False, 0.0, False),
        (Overloaded("full"), True, 1.0, True),
        (Overloaded("full"), True, 11.0, False),
        (InvalidRequest("never"), True, 1.0, False),
    ],
)
def test_what_has_not_begun_waits_for_somebody_to_be_there_and_then_for_room(
    refusal: RequestError, has_waited: bool, waited_s: float, waits: bool
) -> None:
    assert may_wait(refusal, has_waited=has_waited, waited_s=waited_s, most_s=10.0) is waits


def test_whoever_is_to_wait_for_nobody_is_refused_at_once() -> None:
    assert not may_wait(NoInstanceReady("nobody"), has_waited=False, waited_s=0.0, most_s=0.0)
