"""Log lines are one JSON object each, whatever the values hold."""

import json
import logging
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.logs import JsonFormatter, TerminalFormatter, configure_logging, configure_terminal_logging


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


@pytest.fixture
def logging_as_it_was() -> Iterator[None]:
    root, informative = logging.getLogger(), logging.getLogger("lamella.told")
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    informative.setLevel(logging.NOTSET)


@pytest.mark.usefixtures("logging_as_it_was")
def test_values_of_any_type_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("scheduler-0")
    logging.getLogger("lamella.test").info("placed", extra={"kinds": {int}, "where": object})
    [line] = capsys.readouterr().err.splitlines()
    assert json.loads(line)["event"] == "placed"


@pytest.mark.usefixtures("logging_as_it_was")
def test_a_terminal_is_told_who_died_and_what_would_be_scaled(capsys: pytest.CaptureFixture[str]) -> None:
    configure_terminal_logging(informative="lamella.told")
    logging.getLogger("lamella.test").warning("process_died", extra={"id": "decode-0", "status": -9})
    logging.getLogger("lamella.test").info("placed")
    logging.getLogger("lamella.told").info("would_scale", extra={"desired": 2})
    said = capsys.readouterr().err.splitlines()
    assert said == ['process_died: id="decode-0", status=-9', "would_scale: desired=2"]


@given(st.text())
def test_no_value_can_start_a_line_of_its_own_on_a_terminal(value: str) -> None:
    record = logging.makeLogRecord({"name": "lamella.x", "msg": "failed", "error": value})
    assert "\n" not in TerminalFormatter().format(record)
