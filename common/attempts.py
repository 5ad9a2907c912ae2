"""Which attempts at a request come too late for a room: those that have ended, and those overtaken."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from common.ids import RequestId
from common.messages import GenerationRequest

REMEMBERED = 4096
"""Requests. The word of an end overtakes a task by moments, not by thousands of requests."""


class KnownSequence(Protocol):
    """As a room keeps it."""

    @property
    def request(self) -> GenerationRequest: ...

    @property
    def is_cancelled(self) -> bool: ...


@dataclass(slots=True)
class EndedAttempts:
    """By request, the highest attempt that is known to have ended."""

    _highest: OrderedDict[RequestId, int] = field(default_factory=OrderedDict)

    def note(self, request_id: RequestId, attempt: int) -> None:
        """It has ended, with all before it."""
        self._highest[request_id] = max(attempt, self._highest.pop(request_id, -1))
        while len(self._highest) > REMEMBERED:
            self._highest.popitem(last=False)

    def includes(self, request_id: RequestId, attempt: int) -> bool:
        return self._highest.get(request_id, -1) >= attempt

    def is_superseded(self, request: GenerationRequest, known: Iterable[KnownSequence]) -> bool:
        """Whether this attempt has ended, or a higher one of the same request is here already. ``known``: all
        of that request, maybe of others."""
        request_id, attempt = request.request_id, request.attempt
        if self._highest.get(request_id, -1) >= attempt:
            return True
        for each in known:
            other = each.request
            is_overtaken = other.attempt > attempt or (each.is_cancelled and other.attempt == attempt)
            if is_overtaken and other.request_id == request_id:
                return True
        return False
