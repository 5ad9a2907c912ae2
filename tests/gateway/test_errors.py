"""Every error that can reach a client has one status and one error object, and says nothing of defects."""

import json

import pytest

from common.errors import (
    REQUEST_ERRORS,
    BusTimeout,
    InternalError,
    InvalidRequest,
    NoInstanceReady,
    Overloaded,
    RequestError,
)
from gateway.errors import error_body, error_headers, from_bus, status_of

STATUS = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "model_not_found": 404,
    "deadline_exceeded": 408,
    "overloaded": 503,
    "no_instance_ready": 503,
    "instance_lost": 503,
    "kv_lost": 503,
    "handover_failed": 503,
    "kv_link_broken": 503,
}


@pytest.mark.parametrize("code", sorted(REQUEST_ERRORS))
def test_every_error_has_a_status_and_an_object(code: str) -> None:
    error = REQUEST_ERRORS[code]("what happened", param="field")
    status = status_of(error)
    assert status == STATUS.get(code, 500)
    content = json.loads(error_body(error))["error"]
    assert set(content) == {"message", "type", "param", "code"}
    assert (content["message"] == "what happened") == (status != 500)
    assert (content["type"] == "server_error") == (status >= 500)


def test_a_defect_tells_nothing_of_itself() -> None:
    body = error_body(InternalError("token 7 of user Anna", param="prompt"))
    assert b"Anna" not in body
    assert json.loads(body)["error"]["code"] == "internal_error"


def test_a_plain_invalid_request_has_no_code() -> None:
    content = json.loads(error_body(InvalidRequest("bad", param="n")))["error"]
    assert (content["code"], content["param"]) == (None, "n")


@pytest.mark.parametrize(("retry_after_s", "seconds"), [(0.2, b"1"), (1.0, b"1"), (1.2, b"2"), (30.0, b"30")])
def test_waiting_time_is_told_in_whole_seconds_rounded_up(retry_after_s: float, seconds: bytes) -> None:
    headers = dict(error_headers(Overloaded("full", retry_after_s=retry_after_s)))
    assert headers[b"retry-after"] == seconds
    assert headers[b"retry-after-ms"] == str(round(retry_after_s * 1000)).encode()


@pytest.mark.parametrize(
    ("error", "headers"),
    [(InternalError("bug"), {b"x-should-retry": b"false"}), (InvalidRequest("bad"), {})],
)
def test_nobody_is_told_to_repeat_what_would_fail_again(
    error: RequestError, headers: dict[bytes, bytes]
) -> None:
    assert dict(error_headers(error)) == headers


def test_a_silent_bus_is_a_mesh_that_is_not_ready() -> None:
    error = from_bus(BusTimeout("no reply"))
    assert isinstance(error, NoInstanceReady)
    assert error.retry_after_s is not None
