"""What `lamella explain` says a decision was about."""

import msgspec
import pytest

from common.ids import InstanceId, RequestId
from scheduler.decision_log import Choice, Decision, Former
from services.explaining.command import before_of, headline_of, title_of, wait_of


@pytest.mark.parametrize(
    ("drawn", "said"),
    [(0, "attempt 0: 30 prompt tokens, 80"), (12, "attempt 1: 30 prompt tokens and 12 drawn")],
)
def test_what_a_stream_had_drawn_before_it_broke_is_no_prompt(drawn: int, said: str) -> None:
    attempt = 1 if drawn else 0
    decision = Decision(RequestId("cmpl-1"), attempt, 0.0, 30 + drawn, 80.0, drawn_tokens=drawn)
    assert said in title_of(decision)
    assert title_of(decision).endswith("80 predicted to be drawn, not over yet; class default")


def test_of_a_stream_that_went_on_elsewhere_it_says_where_it_was_and_whose_times_these_are() -> None:
    p0, d0, d1 = (InstanceId(each) for each in ("p0", "d0", "d1"))
    choices = (Choice("prefill", "shortest_queue", (), p0), Choice("decode", "least_loaded", (), d1))
    decision = Decision(
        RequestId("cmpl-1"), 1, 0.0, 42, 80.0, choices, drawn_tokens=12, ttft_s=0.5, tpot_s=0.02
    )
    moved = Decision(RequestId("cmpl-1"), 0, 0.0, 42, 80.0, choices, tpot_s=0.02, former=(Former(0, p0, d0),))
    first = Decision(RequestId("cmpl-1"), 0, 0.0, 42, 80.0, choices, ttft_s=0.5)
    assert before_of(moved) == "before: p0 and d0 (of the same attempt)"
    asked = msgspec.structs.replace(moved, former=(Former(0, None, d1),))
    assert before_of(asked) == "before: d1 (asked whether its KV was kept, of the same attempt)"
    mixed = (Former(0, p0, None), Former(1, p0, p0))
    twice = Decision(RequestId("cmpl-1"), 2, 0.0, 42, 80.0, choices, former=mixed)
    assert before_of(twice) == "before: p0 (attempt 0), then p0 (attempt 1)"
    assert headline_of(decision, choices[0]).endswith("TTFT of the whole request measured 500.0 ms")
    assert headline_of(moved, choices[1]).endswith("TPOT of the whole request measured 20.0 ms")
    assert headline_of(first, choices[0]).endswith(", TTFT measured 500.0 ms")


def test_one_that_was_to_move_and_stays_is_not_refused() -> None:
    d0 = InstanceId("d0")
    stays = (Choice("decode", "least_loaded", (), d0), Choice("decode", "least_loaded", (), None, "full"))
    assert "not over yet" in title_of(Decision(RequestId("cmpl-1"), 0, 0.0, 42, 80.0, stays))
    nobody = (Choice("prefill", "shortest_queue", (), d0), Choice("decode", "least_loaded", (), None, "full"))
    assert ", refused;" in title_of(Decision(RequestId("cmpl-1"), 0, 0.0, 42, 80.0, nobody))


def test_how_long_a_request_waited_is_told() -> None:
    p0, d0 = InstanceId("p0"), InstanceId("d0")
    placed = (Choice("prefill", "shortest_queue", (), p0), Choice("decode", "least_loaded", (), d0))
    refused = (Choice("prefill", "shortest_queue", (), None, "no prefill instance is ready"),)
    decision = Decision(RequestId("cmpl-1"), 3, 0.0, 42, 80.0, placed, waited_s=2.345)
    assert wait_of(decision) == "waited 2.3 s until it was placed"
    in_vain = msgspec.structs.replace(decision, choices=refused, waited_s=10.0)
    assert wait_of(in_vain) == "waited 10.0 s until it was refused"
