"""What of a query for decisions is meant, and what is refused."""

from urllib.parse import parse_qsl

import pytest

from common.decision_query import DecisionQuery, as_query, read_query
from common.errors import InvalidRequest

ID = "must match [a-z0-9-]{1,64}"
WHOLE = "must be a whole number, 1..1000"


def test_a_query_says_how_many_of_which_class_and_instance() -> None:
    assert read_query({}) == DecisionQuery(20, None, None)
    asked = read_query({"newest": "1000", "class": "batch", "instance": "decode-0"})
    assert asked == DecisionQuery(1000, "batch", "decode-0")


@pytest.mark.parametrize(
    "asked", [DecisionQuery(), DecisionQuery(7, "batch"), DecisionQuery(7, None, "decode-0")]
)
def test_what_is_asked_of_others_is_read_as_it_was_meant(asked: DecisionQuery) -> None:
    assert read_query(dict(parse_qsl(as_query(asked)))) == asked


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        *(("newest", each, WHOLE) for each in ("-1", "0", "1001", "some", "", "1.5", "+5", "5 ", "\u0665")),
        ("newest", "9" * 5000, WHOLE),
        ("class", "", ID),
        ("instance", "decode 0", ID),
        ("newst", "5", "is not a known key, of newest, class, instance"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_key_value_and_rule(key: str, value: str, rule: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_query({key: value})
    assert refused.value.message == f"{key} = {value[:80]!r}: {rule}"
    assert refused.value.param == key
