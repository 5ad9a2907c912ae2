"""The one map from errors to HTTP, and OpenAI's error object."""

import math

import orjson

from common.errors import (
    BusError,
    ContextLengthExceeded,
    DeadlineExceeded,
    HandoverFailed,
    InstanceLost,
    InvalidRequest,
    ModelNotFound,
    NoInstanceReady,
    Overloaded,
    RequestError,
    StoreError,
)

UNKNOWN_RETRY_S = 1.0
"""Of a 503 that names no time: somebody else will have taken over by then."""


class Unauthorized(InvalidRequest):
    """No key was sent, or a wrong one."""


class Forbidden(InvalidRequest):
    """No key would help."""


class Refused(InvalidRequest):
    """As things are it cannot be done, or would do harm."""


STATUS: list[tuple[type[RequestError], int, str, str | None]] = [
    (Unauthorized, 401, "invalid_request_error", "invalid_api_key"),
    (Forbidden, 403, "invalid_request_error", "forbidden"),
    (Refused, 409, "invalid_request_error", "refused"),
    (ContextLengthExceeded, 400, "invalid_request_error", "context_length_exceeded"),
    (InvalidRequest, 400, "invalid_request_error", None),
    (ModelNotFound, 404, "invalid_request_error", "model_not_found"),
    (DeadlineExceeded, 408, "timeout", "deadline_exceeded"),
    (Overloaded, 503, "server_error", "overloaded"),
    (NoInstanceReady, 503, "server_error", "no_instance_ready"),
    (InstanceLost, 503, "server_error", "instance_lost"),
    (HandoverFailed, 503, "server_error", "handover_failed"),
]
"""Status, type and code of each error; the first that fits. Anything else is a 500 that says nothing."""


class RouteNotFound(InvalidRequest):
    """Nothing is served at that path."""


class MethodNotAllowed(InvalidRequest):
    """The path is right, the method is not. ``allowed`` are the methods that are."""

    def __init__(self, message: str, allowed: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allowed = allowed


class PayloadTooLarge(InvalidRequest):
    """The body is over the limit."""


class UnsupportedMediaType(InvalidRequest):
    """The body says that it is something else than JSON."""


HTTP_STATUS: dict[type[RequestError], int] = {
    RouteNotFound: 404,
    MethodNotAllowed: 405,
    PayloadTooLarge: 413,
    UnsupportedMediaType: 415,
}


def status_of(error: RequestError) -> int:
    known = HTTP_STATUS.get(type(error))
    if known is not None:
        return known
    return next((status for kind, status, _, _ in STATUS if isinstance(error, kind)), 500)


def error_body(error: RequestError) -> bytes:
    """OpenAI's error object as JSON."""
    kind, code, message, param = "server_error", "internal_error", "internal error", None
    for each, _, each_kind, each_code in STATUS:
        if isinstance(error, each):
            kind, code, message, param = each_kind, each_code or "", error.message, error.param
            break
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code or None}})


def error_headers(error: RequestError) -> list[tuple[bytes, bytes]]:
    """``retry-after`` where waiting helps, ``allow`` where another method does, or that a key is missing. A
    defect would only repeat itself: clients are told not to try."""
    if isinstance(error, MethodNotAllowed):
        return [(b"allow", ", ".join(error.allowed).encode())]
    if isinstance(error, Unauthorized):
        return [(b"www-authenticate", b"Bearer")]
    if status_of(error) == 500:
        return [(b"x-should-retry", b"false")]
    wait_s = error.retry_after_s
    if wait_s is None:
        if status_of(error) != 503:
            return []
        wait_s = UNKNOWN_RETRY_S
    return [
        (b"retry-after", str(max(1, math.ceil(wait_s))).encode()),
        (b"retry-after-ms", str(round(wait_s * 1000)).encode()),
    ]


def from_bus(error: BusError) -> RequestError:
    """The control plane did not answer. What was asked may have begun; the caller has told it to end."""
    return NoInstanceReady(f"the mesh does not answer: {error}", retry_after_s=1.0)


def from_store(error: StoreError) -> RequestError:
    """Who is there cannot be told."""
    return NoInstanceReady(f"the mesh's members cannot be read: {error}", retry_after_s=1.0)
