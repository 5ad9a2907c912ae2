"""When a stream that broke goes on, and how soon."""

import pytest

from common.errors import (
    InstanceLost,
    InvalidRequest,
    NoInstanceReady,
    Overloaded,
    RequestCancelled,
    RequestError,
)
from gateway.continuing import (
    CONTINUE_BACKOFF_S,
    MOVED_WITHIN_S,
    PROGRESS_TOKENS,
    backoff_s,
    chosen_since_s,
    continuations_after,
    wait_s,
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
    ("refusal", "asked", "waited_s", "pause_s"),
    [
        (NoInstanceReady("nobody"), 0, 0.0, 0.2),
        (NoInstanceReady("nobody"), 1, 0.2, 0.3),
        (NoInstanceReady("nobody"), 10_000, 8.0, 1.0),
        # The last time when it has waited for so long.
        (NoInstanceReady("nobody"), 30, 9.5, 0.5),
        (NoInstanceReady("nobody"), 30, 10.0, None),
        (Overloaded("full"), 0, 0.0, None),
        (Overloaded("full"), 1, 1.0, 0.3),
        (Overloaded("full"), 1, 11.0, None),
        (RequestCancelled("its client left"), 1, 1.0, None),
        (InvalidRequest("never"), 1, 1.0, None),
    ],
)
def test_what_has_not_begun_waits_for_somebody_to_be_there_and_then_for_room(
    refusal: RequestError, asked: int, waited_s: float, pause_s: float | None
) -> None:
    assert wait_s(refusal, asked, waited_s, most_s=10.0) == (
        None if pause_s is None else pytest.approx(pause_s)
    )


def test_whoever_is_to_wait_for_nobody_is_refused_at_once() -> None:
    assert wait_s(NoInstanceReady("nobody"), 0, 0.0, most_s=0.0) is None
