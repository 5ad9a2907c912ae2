"""Log lines are one JSON object each, whatever the values hold."""

import json
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.logs import JsonFormatter, configure_logging


def line_of(message: str, **fields: object) -> str:
    record = logging.makeLogRecord({"name": "lamella.x", "levelname": "INFO", "msg": message, **fields})
    return JsonFormatter("gateway-0").format(record)


@given(st.text(), st.text(), st.integers())
def test_no_value_can_start_a_line_of_its_own(message: str, value: str, number: int) -> None:
    text = line_of(message, error=value, tokens=number)
    assert "\n" not in text
    assert "\r" not in text
    read = json.loads(text)
    assert read["event"] == message
    assert read["error"] == value
    assert read["tokens"] == number
    assert read["service"] == "gateway-0"


def test_an_exception_is_a_field_of_its_line() -> None:
    try:
        raise ValueError("broken\nin two")
    except ValueError:
        text = line_of("failed", exc_info=sys.exc_info())
    assert "\n" not in text
    assert "ValueError: broken\nin two" in json.loads(text)["exception"]


def test_values_of_any_type_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        configure_logging("scheduler-0")
        logging.getLogger("lamella.test").info("placed", extra={"kinds": {int}, "where": object})
        [line] = capsys.readouterr().err.splitlines()
        assert json.loads(line)["event"] == "placed"
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
