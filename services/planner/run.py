"""Has a plan searched: prepares it, drives the search, and keeps what was simulated."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

import msgspec

from services.commands.options import messages
from services.planner.checkpoint import Checkpoint
from services.planner.driver import drive, simulating
from services.planner.planning import Plan, plan
from services.planner.preparing import PlanRequest, Prepared, bounds_of, prepare
from services.planner.probes import Search, Tell
from services.planner.progress import Watch
from services.planner.run_length import bursts_of, caveat_of, check_length
from services.planner.searches import SearchName, SearchReport, search_of

Found = TypeVar("Found")


class Terminated(BaseException):
    """SIGTERM, as KeyboardInterrupt is SIGINT."""


@contextmanager
def raising_terminated() -> Iterator[None]:
    """Whoever is told to end ends its workers first."""

    def answer(number: int, frame: FrameType | None) -> None:
        # The first one is enough: another would come amid the end.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def make_plan(request: PlanRequest, processes: int | None = None, checkpoint: Path | None = None) -> Plan:
    """Raises ConfigError and what reading files raises; SystemExit after Ctrl-C or SIGTERM."""

    def search(prepared: Prepared, tell: Tell) -> Search[Plan]:
        check_length(prepared)
        requests, said = len(prepared.conditions.rows), (caveat_of(prepared), bursts_of(prepared))
        return plan(prepared.kinds, bounds_of(prepared), prepared.demand, requests, *said, tell)

    return _search(request, search, processes, checkpoint)


def make_search(
    name: SearchName, request: PlanRequest, processes: int | None = None, checkpoint: Path | None = None
) -> SearchReport:
    """As ``make_plan``."""

    def search(prepared: Prepared, tell: Tell) -> Search[SearchReport]:
        # What is refused is refused now, before anything is kept.
        return _with_bursts(search_of(name, prepared, tell), prepared, is_simulated=request.is_simulated)

    return _search(request, search, processes, checkpoint)


def _with_bursts(
    asked: Search[SearchReport], prepared: Prepared, *, is_simulated: bool
) -> Search[SearchReport]:
    found = yield from asked
    bursts = bursts_of(prepared) if is_simulated else None
    return found if bursts is None else msgspec.structs.replace(found, lines=(*found.lines, bursts))


def _search(
    request: PlanRequest,
    search: Callable[[Prepared, Tell], Search[Found]],
    processes: int | None,
    checkpoint: Path | None,
) -> Found:
    prepared = prepare(request)
    watch = Watch(messages)
    begun = search(prepared, watch.tell)
    cores = len(os.sched_getaffinity(0))
    workers = min(processes or cores, cores)
    where = "none is kept without --checkpoint" if checkpoint is None else f"kept in {checkpoint}"
    with Checkpoint(checkpoint) as kept:
        watch.size = _size_of(prepared, workers, len(kept.points), where)
        context = prepared.conditions.encoded()
        if processes is not None and processes > cores:
            messages.print(f"--processes {processes}: held to {cores}, one a core", highlight=False)
        try:
            with watch, raising_terminated(), simulating(prepared.conditions, workers) as simulator:
                return drive(begun, simulator, kept, context, lambda _: watch.ran())
        except KeyboardInterrupt:
            _end("interrupted", watch.runs, where, signal.SIGINT)
        except Terminated:
            _end("terminated", watch.runs, where, signal.SIGTERM)


def _size_of(prepared: Prepared, workers: int, known: int, where: str) -> str:
    requests = f"{len(prepared.conditions.rows):,} requests"
    kinds = sum(map(len, prepared.kinds))
    if not kinds:
        return f"planning: {requests}; nothing is simulated"
    known_before = f"; of earlier runs {known} are known" if known else ""
    not_asked = ""
    if prepared.ignored:
        not_asked = f"; not looked at, as --devices has no such: {', '.join(prepared.ignored)}"
    return (
        f"planning: {kinds:,} kinds of instances, {requests};"
        f" runs are simulated {workers} at once, {where}{known_before}{not_asked}"
    )


def _end(how: str, done: int, where: str, number: signal.Signals) -> NoReturn:
    """With the exit status that shells give a signal: 1 would say that no deployment was found."""
    messages.print(f"{how} after {done} runs, {where}", highlight=False, markup=False, soft_wrap=True)
    raise SystemExit(128 + number) from None
