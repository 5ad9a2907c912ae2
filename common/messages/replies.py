"""What answers a call instead of its own reply: an error, or that it was taken over."""

import msgspec

from common.errors import REQUEST_ERRORS, InternalError, RequestError


class ErrorReply(msgspec.Struct, frozen=True, tag="error"):
    """A RequestError on the wire; ``code`` is the class's own."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


def error_reply(error: RequestError) -> ErrorReply:
    """The error as it travels; ``REQUEST_ERRORS[code]`` turns it back."""
    return ErrorReply(error.code, error.message, error.param, error.retry_after_s)


def as_request_error(reply: ErrorReply) -> RequestError:
    """The error as it is raised on the other side; an unknown code becomes InternalError."""
    kind = REQUEST_ERRORS.get(reply.code, InternalError)
    return kind(reply.message, param=reply.param, retry_after_s=reply.retry_after_s)


class Acknowledged(msgspec.Struct, frozen=True, tag="ack"):
    """Taken over: the receiver now owns what the message carried."""
