"""Everything that can go wrong, as one tree.

::

    LamellaError
    ├── RequestError                fails one request; travels between services as an ErrorReply
    │   ├── InvalidRequest          a field breaks a rule (names the field)
    │   │   └── ContextLengthExceeded
    │   ├── ModelNotFound
    │   ├── Overloaded              a queue bound or the memory bound is met (says when to come back)
    │   ├── NoInstanceReady         no instance of a role is ready (says when to come back)
    │   ├── DeadlineExceeded
    │   ├── RequestCancelled
    │   ├── InstanceLost            the instance that held the sequence is gone
    │   │   └── KVLost              or the attention worker that held its KV
    │   ├── HandoverFailed          KV did not reach the decode instance
    │   │   └── KVLinkBroken        as what was sent did not get there, though both ends answer
    │   ├── UnknownRequest          a message names a request that this service does not hold
    │   ├── LeaderSuperseded        a command of a scheduler that does not lead any more
    │   └── InternalError           a defect; the text stays in the log
    └── ServiceError                fails a process, or a wire of it
        ├── ConfigError             a setting breaks a rule (names the key)
        ├── ModelError              the model directory cannot be served
        ├── EngineError             the model's thread died
        ├── AttentionLost           an attention worker does not answer
        ├── BusError                NATS: BusUnavailable, BusTimeout, NoResponder, MessageTooLarge
        ├── StoreError              Redis: StoreUnavailable
        ├── TransferError           the transfer engine
        └── LauncherError           a local process or an embedded server did not start or stop

An error of one module alone stays with it, below the branch that fits: HTTP's own refusals in
``gateway.errors``, ``MemberSuperseded`` in ``common.store``, the transfer engine's in
``common.transfer.interface``, attention's in ``common.model.exchange`` and ``decode.binding``, the command
line's in ``services``.

Each wire translates its library's errors once, ``from exc``. The gateway maps the tree to HTTP once
(``gateway/errors.py``).
"""

from typing import Any, ClassVar, Self


class LamellaError(Exception):
    """Root of the tree. What comes from another process says and holds the same, whatever its class asks
    for."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self)._told_again, self.args, self.__dict__

    @classmethod
    def _told_again(cls, *args: object) -> Self:
        return cls.__new__(cls, *args)


class RequestError(LamellaError):
    """Fails one request and nothing else."""

    code: ClassVar[str] = "request_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestError):
    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class ModelNotFound(RequestError):
    code = "model_not_found"


class Overloaded(RequestError):
    code = "overloaded"


class NoInstanceReady(RequestError):
    code = "no_instance_ready"


class DeadlineExceeded(RequestError):
    code = "deadline_exceeded"


class RequestCancelled(RequestError):
    code = "cancelled"


class InstanceLost(RequestError):
    code = "instance_lost"


class KVLost(InstanceLost):
    code = "kv_lost"


class HandoverFailed(RequestError):
    code = "handover_failed"


class KVLinkBroken(HandoverFailed):
    code = "kv_link_broken"


class UnknownRequest(RequestError):
    code = "unknown_request"


class LeaderSuperseded(RequestError):
    code = "leader_superseded"


class InternalError(RequestError):
    code = "internal_error"


REQUEST_ERRORS: dict[str, type[RequestError]] = {
    error.code: error
    for error in (
        RequestError,
        InvalidRequest,
        ContextLengthExceeded,
        ModelNotFound,
        Overloaded,
        NoInstanceReady,
        DeadlineExceeded,
        RequestCancelled,
        InstanceLost,
        KVLost,
        HandoverFailed,
        KVLinkBroken,
        UnknownRequest,
        LeaderSuperseded,
        InternalError,
    )
}
"""From the wire's code to the class that is raised on the other side."""


class ServiceError(LamellaError):
    """Fails a process, or one of its wires."""


LACKS = ("is needed", "must be given", "must be named", "must be set")
"""Rules that say by themselves that nothing was given."""


class ConfigError(ServiceError):
    """A setting breaks a rule. ``key`` is the dotted path, ``value`` what was given."""

    def __init__(self, key: str, value: object, rule: str) -> None:
        says_so = value is None and rule.startswith(LACKS)
        super().__init__(f"{key} {rule}" if says_so else f"{key} {_as_set(value)}: {rule}")
        self.key = key
        self.value = value
        self.rule = rule


def _as_set(value: object) -> str:
    return "is not set" if value is None else f"= {_as_written(value)}"


def _as_written(value: object) -> str:
    """In a settings file."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_as_written, value))}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


class ModelError(ServiceError):
    """A model directory that cannot be served."""


class EngineError(ServiceError):
    """The thread that runs the model died."""


class AttentionLost(ServiceError):
    """An attention worker does not answer: the KV it held is lost to its decode instance."""


class BusError(ServiceError):
    """The control plane's bus."""


class BusUnavailable(BusError):
    """Not connected."""


class BusTimeout(BusError):
    """No reply within the named time."""


class NoResponder(BusError):
    """Nobody serves that subject: the fastest sign that a service is gone."""


class MessageTooLarge(BusError):
    """The encoded message is over the bus's payload limit."""


class StoreError(ServiceError):
    """The cluster state's store."""


class StoreUnavailable(StoreError):
    """The store did not answer within its retries."""


class TransferError(ServiceError):
    """The transfer engine; its own tree is in ``common.transfer.interface``."""


class LauncherError(ServiceError):
    """A local process or an embedded server did not start or stop."""


def reason_of(exc: Exception) -> str:
    """What it says; without the number and the path where it is the operating system's: whoever tells of it
    names the file."""
    return (exc.strerror if isinstance(exc, OSError) else None) or str(exc)


def first_reason(group: BaseExceptionGroup) -> BaseException:
    """Of what came out of a TaskGroup, the error that says what happened, not what followed from it."""
    reasons, others = group.split(LamellaError)
    error: BaseException = reasons or others or group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
