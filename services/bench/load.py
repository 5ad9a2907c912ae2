"""Offering load: when requests are sent, and what is kept of them.

Open loop: a request is sent when it is due, whatever became of those before it; a client that falls behind
says so (``Outcome.sent_s - due_s``) instead of quietly offering less. Closed loop: so many users, each
sending its next request when the one before ends.

Cancelling an offer cuts its requests off; each is still recorded, as cut.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from services.bench.client import Attempt, BenchRequest, Client, Outcome

FAILURE_PAUSE_S = 0.25
"""A closed loop's user waits so long after a failure that names no time, lest it hammer a dead server."""
LONGEST_RETRY_AFTER_S = 10.0
MADE_AHEAD = 64
"""Requests of an open loop that are made and not due yet: a burst's worth, and a bound on their memory."""
MAKING_S = 0.005
"""None is made when the next is due so soon: more than making the longest prompt takes."""


@dataclass(slots=True)
class LoadRecord:
    """What one load has done so far; the progress display reads it while the run goes on."""

    outcomes: list[Outcome] = field(default_factory=list)
    in_flight: int = 0
    failed: int = 0

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if outcome.failure is not None:
            self.failed += 1


@dataclass(frozen=True, slots=True)
class Offering:
    """Through which client a load is offered, and where it is recorded."""

    client: Client
    record: LoadRecord
    checks_tokens: bool


async def attempt_request(
    offering: Offering,
    request: BenchRequest,
    due_s: float,
    on_first_token: Callable[[], None] | None = None,
) -> Outcome:
    """Send one request and record its outcome, also where it is cut off by cancellation."""
    record = offering.record
    attempt = Attempt(request, due_s, offering.checks_tokens, on_first_token)
    record.in_flight += 1
    try:
        await offering.client.send(attempt)
    finally:
        record.in_flight -= 1
        record.add(attempt.outcome())
    return record.outcomes[-1]


async def offer_open_loop(
    offering: Offering, requests: Iterable[BenchRequest], arrivals_s: Iterator[float], most_in_flight: int
) -> None:
    """Send each request at its arrival (seconds from now), then wait for all of them to end.

    An arrival beyond ``most_in_flight`` is recorded as failed (``client_limit``): not sent, and not lost from
    the count either. Requests are made ahead, while nothing is due: traces come in bursts of equal times, and
    making a long prompt takes a millisecond.
    """
    pairs = zip(requests, arrivals_s, strict=False)
    ready = deque(islice(pairs, MADE_AHEAD))
    start_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        while ready:
            request, arrival_s = ready.popleft()
            due_s = start_s + arrival_s
            # Late or not, one turn of the loop goes to the streams between two arrivals.
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            if offering.record.in_flight >= most_in_flight:
                refused = Attempt(request, due_s, offering.checks_tokens)
                refused.fail("client_limit", f"{most_in_flight} requests were in flight (--max-in-flight)")
                offering.record.add(refused.outcome())
            else:
                group.create_task(attempt_request(offering, request, due_s))
            await _make_ahead(ready, pairs, start_s)


async def _make_ahead(
    ready: deque[tuple[BenchRequest, float]], pairs: Iterator[tuple[BenchRequest, float]], start_s: float
) -> None:
    """Fill ``ready`` while its first request is not due yet, letting the streams in between."""
    while len(ready) < MADE_AHEAD:
        if ready and start_s + ready[0][1] - time.monotonic() < MAKING_S:
            return
        made = next(pairs, None)
        if made is None:
            return
        ready.append(made)
        await asyncio.sleep(0)


async def offer_closed_loop(
    offering: Offering,
    requests: Iterator[BenchRequest],
    concurrency: int,
    duration_s: float | None = None,
    on_streaming: Callable[[], None] | None = None,
) -> None:
    """Let ``concurrency`` users work through ``requests``; after ``duration_s`` none sends a further one.

    ``on_streaming`` is called once, when every user has its first token or, failing that, its first failure.
    """
    end_s = float("inf") if duration_s is None else time.monotonic() + duration_s
    not_streaming = set(range(concurrency))

    def note_streaming(user: int) -> None:
        if user in not_streaming:
            not_streaming.discard(user)
            if not not_streaming and on_streaming is not None:
                on_streaming()

    async def use(user: int) -> None:
        for request in requests:
            if time.monotonic() >= end_s:
                break
            outcome = await attempt_request(offering, request, time.monotonic(), lambda: note_streaming(user))
            note_streaming(user)
            if outcome.failure is not None:
                asked_s = outcome.failure.retry_after_s
                pause_s = FAILURE_PAUSE_S if asked_s is None else min(asked_s, LONGEST_RETRY_AFTER_S)
                await asyncio.sleep(pause_s)
        note_streaming(user)

    async with asyncio.TaskGroup() as group:
        for user in range(concurrency):
            group.create_task(use(user))


async def cut_when(stop: asyncio.Event, offer: "asyncio.Task[None]") -> None:
    """Wait for an offer to end by itself; cut it off when ``stop`` is set, or when this wait is cancelled."""
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({offer, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not offer.done():
            await cut(offer)
    if not offer.cancelled():
        offer.result()


async def cut(offer: "asyncio.Task[None]") -> None:
    """Cancel an offer and wait until its requests are recorded."""
    offer.cancel()
    with suppress(asyncio.CancelledError):
        await offer
