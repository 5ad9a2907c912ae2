"""When a stream that broke goes on, how soon, and whether a request waits that could not begin: what live
and simulated gateways do alike."""

from common.errors import NoInstanceReady, Overloaded, RequestCancelled, RequestError

CONTINUE_DEADLINE_S = 30.0
"""How long a broken sequence waits for an instance that can take it over."""
CONTINUE_BACKOFF_S = 0.2
"""Before it asks again, where nobody could take it over; twice as long each time that who took it had no room
after all: what the scheduler knows is a moment old."""
PROGRESS_TOKENS = 16
"""An attempt that brought as many got on."""
MOVED_WITHIN_S = 10.0
"""Longer than it takes from the choice of a sequence's new home until the gateway hears of it."""
FOR_LATER = (Overloaded, NoInstanceReady, RequestCancelled)
"""Refusals after which a stream that broke is placed anew as soon as it can be."""
NO_ROOM = (Overloaded.code, NoInstanceReady.code)
WAITS_S = (0.2, 0.3, 0.45, 0.7, 1.0)
"""Of a request that has not begun, one after another and the last again and again: many may wait, and each
asks with its whole prompt."""


def wait_s(refusal: RequestError, asked: int, waited_s: float, most_s: float) -> float | None:
    """Of a request that has not begun, for which nobody was there when it was ``asked`` for so many times
    before: until it asks again; None: it is refused. Whoever came since may be full already."""
    is_to_wait = isinstance(refusal, NoInstanceReady) or (asked > 0 and isinstance(refusal, Overloaded))
    if not is_to_wait or waited_s >= most_s:
        return None
    return min(WAITS_S[min(asked, len(WAITS_S) - 1)], most_s - waited_s)


def continuations_after(continuations: int, attempt_tokens: int) -> int:
    """In a row, with this one. An attempt that got on well before it broke is no sign that the next will
    not."""
    return 1 if attempt_tokens >= PROGRESS_TOKENS else continuations + 1


def backoff_s(error_code: str, continuations: int) -> float:
    """Until the next attempt of one that failed with that error, after so many in a row."""
    return CONTINUE_BACKOFF_S * 2**continuations if error_code in NO_ROOM else 0.0


def broken_text(continuations: int, cause: str) -> str:
    """What a client is told whose stream broke once more than it may; ``cause``: the last time's."""
    return f"the sequence broke {continuations + 1} times: {cause}"


def chosen_since_s(asked_s: float, now: float) -> float:
    """Of the new home of an attempt that was asked for at ``asked_s``, heard of ``now``: it was chosen later
    than that. An instance that was said to be gone before then had come back when it was chosen."""
    return max(asked_s, now - MOVED_WITHIN_S)
