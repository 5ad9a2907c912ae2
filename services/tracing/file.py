"""A laid-out trace as Chrome's JSON, which ui.perfetto.dev and chrome://tracing open.

A process row is a service. On it: its threads and lanes (``X``), its counters (``C``), at the gateway each
request's life (``b``, ``n``, ``e``), and arrows that follow a request and its KV from service to service
(``s``, ``t``, ``f``). Times are µs since the trace began.
"""

from collections.abc import Iterator
from typing import Any

import orjson

from common.timeline import name_of
from common.timeline_events import ENDS, FIRST_TOKEN, PLACED, RECEIVED, SECOND_TOKEN
from services.tracing.arrows import find_arrows
from services.tracing.layout import Layout, ServiceLayout, Slice

ChromeEvent = dict[str, Any]

PHASES = (
    (name_of(RECEIVED), "placement"),
    (name_of(PLACED), "prefill"),
    (name_of(FIRST_TOKEN), "hand-over"),
    (name_of(SECOND_TOKEN), "decode"),
)
"""What begins in a request's life with each of its marks."""


def chrome_trace(layout: Layout) -> bytes:
    """The file's content: what names the rows first, then everything by time."""
    events: list[ChromeEvent] = []
    for process, service in enumerate(layout.services, 1):
        events.extend(_slices(process, service))
        events.extend(_lives(process, service, layout.duration_ns))
        events.extend(_counters(process, service))
    events.extend(_arrows(layout))
    events.sort(key=lambda event: event["ts"])
    names = [name for process, service in enumerate(layout.services, 1) for name in _names(process, service)]
    content = {"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": _about(layout)}
    return orjson.dumps(content)


def _about(layout: Layout) -> dict[str, Any]:
    return {
        "duration_s": layout.duration_ns / 1e9,
        "services": {
            each.service.service_id: {
                "kind": each.service.kind,
                "host": each.service.host,
                "pid": each.service.pid,
                "clock_offset_ns": each.service.clock.offset_ns,
                "clock_error_ns": each.service.clock.round_trip_ns // 2,
                "records_lost": each.lost,
                "texts_lost": each.texts_lost,
            }
            for each in layout.services
        },
        "silent": {each.service_id: each.reason for each in layout.silent},
    }


def _us(time_ns: int) -> float:
    return time_ns / 1000


def _names(process: int, service: ServiceLayout) -> Iterator[ChromeEvent]:
    def row(name: str, track: int, args: dict[str, object]) -> ChromeEvent:
        return {"ph": "M", "name": name, "pid": process, "tid": track, "args": args}

    traced = service.service
    yield row("process_name", 0, {"name": traced.service_id})
    yield row("process_labels", 0, {"labels": f"{traced.kind}, {traced.host} pid {traced.pid}"})
    yield row("process_sort_index", 0, {"sort_index": process})
    for index, track in enumerate(service.tracks, 1):
        yield row("thread_name", index, {"name": track.name})
        yield row("thread_sort_index", index, {"sort_index": index})


def _slices(process: int, service: ServiceLayout) -> Iterator[ChromeEvent]:
    for index, track in enumerate(service.tracks, 1):
        for each in track.slices:
            args: dict[str, object] = dict(each.values)
            if each.requests:
                args["requests"] = " ".join(each.requests)
            if each.peer:
                args["peer"] = each.peer
            yield {
                "ph": "X",
                "name": each.name,
                "cat": each.kind,
                "pid": process,
                "tid": index,
                "ts": _us(each.begin_ns),
                "dur": _us(each.duration_ns),
                "args": args,
            }


def _counters(process: int, service: ServiceLayout) -> Iterator[ChromeEvent]:
    for each in service.counters:
        ts = _us(each.begin_ns)
        yield {"ph": "C", "name": each.name, "pid": process, "tid": 0, "ts": ts, "args": each.values}


def _lives(process: int, service: ServiceLayout, duration_ns: int) -> Iterator[ChromeEvent]:
    """Each request's life with its phases; one that has not finished goes on to the trace's end. A mark
    without a request is the service's own."""
    marks: dict[str, list[Slice]] = {}
    for mark in service.marks:
        if not mark.requests:
            place = {"s": "p", "pid": process, "tid": 0}
            args: dict[str, object] = dict(mark.values)
            if mark.peer:
                args["detail"] = mark.peer
            yield {"ph": "i", "name": mark.name, "ts": _us(mark.begin_ns), "args": args, **place}
        for request in mark.requests:
            marks.setdefault(request, []).append(mark)
    for request, own in marks.items():
        common = {"cat": "request", "id": request, "pid": process, "tid": 0}
        for phase, name, time_ns, values in _life(own, duration_ns):
            yield {"ph": phase, "name": name, "ts": _us(time_ns), "args": values, **common}


def _life(marks: list[Slice], duration_ns: int) -> Iterator[tuple[str, str, int, dict[str, int]]]:
    """One request's events: type, name, time and values."""
    first = {mark.name: mark.begin_ns for mark in reversed(marks)}
    end_ns = min((first[name] for name in map(name_of, ENDS) if name in first), default=duration_ns)
    yield "b", "request", marks[0].begin_ns, {}
    # The answer to a submission may come after the first token, even after the end.
    begins = [(min(first[mark], end_ns), phase) for mark, phase in PHASES if mark in first]
    for index, (begin_ns, phase) in enumerate(begins):
        next_ns = min([end_ns, *(other_ns for other_ns, _ in begins[index + 1 :])])
        yield "b", phase, begin_ns, {}
        yield "e", phase, max(begin_ns, next_ns), {}
    for mark in marks:
        yield "n", mark.name, min(mark.begin_ns, end_ns), mark.values
    yield "e", "request", end_ns, {}


def _arrows(layout: Layout) -> Iterator[ChromeEvent]:
    for number, arrow in enumerate(find_arrows(layout), 1):
        for index, stop in enumerate(arrow.stops):
            is_last = index == len(arrow.stops) - 1
            phase = "s" if index == 0 else "f" if is_last else "t"
            yield {
                "ph": phase,
                "name": arrow.name,
                "cat": "arrow",
                "id": number,
                "pid": stop.service + 1,
                "tid": stop.track + 1,
                "ts": _us(stop.time_ns),
                "args": {"request": arrow.request},
                **({"bp": "e"} if is_last else {}),
            }
