"""What `lamella explain` says a decision was about."""

import pytest

from common.ids import RequestId
from scheduler.decision_log import Decision
from services.explaining.command import title_of


@pytest.mark.parametrize(
    ("drawn", "said"),
    [(0, "attempt 0: 30 prompt tokens, 80"), (12, "attempt 1: 30 prompt tokens and 12 drawn")],
)
def test_what_a_stream_had_drawn_before_it_broke_is_no_prompt(drawn: int, said: str) -> None:
    attempt = 1 if drawn else 0
    decision = Decision(RequestId("cmpl-1"), attempt, 0.0, 30 + drawn, 80.0, drawn_tokens=drawn)
    assert said in title_of(decision)
    assert title_of(decision).endswith("80 predicted to be drawn, not over yet; class default")
