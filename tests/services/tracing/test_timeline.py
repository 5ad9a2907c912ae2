"""From what services recorded to tracks, a Chrome file, shares of time and a picture."""

import asyncio
import time
from collections import defaultdict
from typing import Any
from xml.etree import ElementTree

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import LauncherError
from common.timeline import RECORD, Event, EventKind, Recording, ThreadRecords
from common.tracing import ClockRead, boot_id
from services.tracing.arrows import find_arrows
from services.tracing.collect import Clock, MeshTrace, ServiceTrace, Silent, measure_clock
from services.tracing.file import chrome_trace
from services.tracing.layout import Layout, Slice, lay_out
from services.tracing.picture import draw_steps
from services.tracing.staggering import staggering_lines
from services.tracing.summary import ServiceSummary, summarize

Made = tuple[str, EventKind, int, int]
"""A record: its event's name and kind, when it began and when it ended, in ns."""


def thread_of(
    made: list[Made], lost: int, requests: str
) -> tuple[ThreadRecords, list[tuple[str, EventKind]]]:
    """The thread's records as its ring has them, by their end; and its events."""
    events = list(dict.fromkeys((each[0], each[1]) for each in made))
    records = b"".join(
        RECORD.pack(begin_ns, end_ns, events.index((event, kind)), 1, 0, 0, 0, 0, 0)
        for event, kind, begin_ns, end_ns in sorted(made, key=lambda each: each[3])
    )
    return ThreadRecords("engine", lost, 0, ("", requests), records), events


def service_of(
    made: list[Made],
    service_id: str = "decode-0",
    kind: str = "decode",
    lost: int = 0,
    requests: str = "",
    offset_ns: int = 0,
) -> ServiceTrace:
    thread, events = thread_of(made, lost, requests)
    recording = Recording(
        began_ns=offset_ns,
        ended_ns=offset_ns + 1000,
        events=tuple(Event(name, event_kind, ("attempt",)) for name, event_kind in events),
        threads=(thread,),
    )
    return ServiceTrace(service_id, kind, "host", 7, Clock(offset_ns, 10), recording)


def mesh_of(*services: ServiceTrace, silent: tuple[Silent, ...] = ()) -> MeshTrace:
    return MeshTrace(0, 1000, services, silent)


def assert_nests(slices: tuple[Slice, ...]) -> None:
    enclosing: list[Slice] = []
    for each in slices:
        while enclosing and enclosing[-1].end_ns <= each.begin_ns:
            enclosing.pop()
        assert not enclosing or each.end_ns <= enclosing[-1].end_ns, (enclosing[-1], each)
        enclosing.append(each)


def chrome_events(layout: Layout) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = orjson.loads(chrome_trace(layout))["traceEvents"]
    return events


intervals = st.tuples(st.integers(0, 900), st.integers(1, 100)).map(lambda pair: (pair[0], sum(pair)))


@given(calls=st.lists(intervals, max_size=30))
def test_overlapping_calls_get_as_few_tracks_as_hold_them(calls: list[tuple[int, int]]) -> None:
    made: list[Made] = [("pull KV", "lane", begin_ns, end_ns) for begin_ns, end_ns in calls]
    (service,) = lay_out(mesh_of(service_of(made))).services
    found = [(each.begin_ns, each.end_ns) for track in service.lanes for each in track.slices]
    assert sorted(found) == sorted(calls)
    for track in service.lanes:
        ends = [each.end_ns for each in track.slices]
        assert all(first <= each.begin_ns for first, each in zip(ends, track.slices[1:], strict=False))
    most = max((sum(begin <= at < end for begin, end in calls) for at, _ in calls), default=0)
    assert len(service.lanes) == most


@given(
    steps=st.lists(intervals, max_size=6),
    waits=st.lists(intervals, max_size=6),
    cuts=st.lists(st.integers(0, 1000), max_size=12, unique=True),
)
def test_threads_nest_and_nothing_is_left_out_however_steps_take_turns(
    steps: list[tuple[int, int]], waits: list[tuple[int, int]], cuts: list[int]
) -> None:
    cuts.sort()
    made: list[Made] = [("step", "step", *each) for each in steps]
    made += [("wait", "waiting", *each) for each in waits]
    made += [("slice", "compute", begin, end) for begin, end in zip(cuts[::2], cuts[1::2], strict=False)]
    (service,) = lay_out(mesh_of(service_of(made))).services
    for track in service.tracks:
        assert_nests(track.slices)
    found = [(each.name, each.kind, each.begin_ns, each.end_ns) for t in service.tracks for each in t.slices]
    assert sorted(found) == sorted(made)
    (summary,) = summarize(lay_out(mesh_of(service_of(made))))
    assert 0 <= summary.waiting_ns <= summary.in_steps_ns
    assert 0 <= summary.compute_ns <= summary.in_steps_ns
    assert summary.python_ns >= 0


def test_a_steps_time_is_computing_exchange_waiting_and_the_rest_python() -> None:
    made: list[Made] = [
        ("decode step", "step", 100, 300),
        ("slice", "compute", 110, 200),
        ("send Q", "exchange", 120, 130),
        ("wait for output", "waiting", 200, 260),
        ("slice", "compute", 40, 90),
    ]
    (summary,) = summarize(lay_out(mesh_of(service_of(made))))
    assert summary == ServiceSummary("decode-0", 1000, 250, [200], 200, 80, 10, 60)
    assert summary.python_ns == 50


def test_waiting_is_when_nothing_else_goes_on() -> None:
    """Two batches take turns: while one waits, the other's slice is computed."""
    made: list[Made] = [
        ("decode step", "step", 100, 300),
        ("decode step", "step", 150, 400),
        ("slice", "compute", 110, 150),
        ("wait for output", "waiting", 150, 250),
        ("slice", "compute", 160, 220),
        ("wait for output", "waiting", 220, 350),
    ]
    (service,) = lay_out(mesh_of(service_of(made))).services
    assert [track.name for track in service.lanes] == [
        "decode step",
        "decode step 2",
        "wait for output",
        "wait for output 2",
    ]
    (summary,) = summarize(lay_out(mesh_of(service_of(made))))
    assert (summary.in_steps_ns, summary.compute_ns, summary.waiting_ns) == (300, 100, 140)


TURNS = (
    Event("slice", "compute", ("layer", "batch")),
    Event("wait for a batch", "waiting", ()),
    Event("decode step", "step", ()),
    Event("attention step", "step", ("sequences", "tokens", "layers", "attention ns")),
)


def turns_of(service_id: str, kind: str, threads: dict[str, list[tuple[str, int, int, int]]]) -> ServiceTrace:
    """By thread: event, batch, begin and end. An attention step has one layer, and computes all the time."""
    names = [event.name for event in TURNS]
    records = tuple(
        ThreadRecords(
            thread,
            0,
            0,
            ("",),
            b"".join(
                RECORD.pack(begin_ns, end_ns, names.index(name), 0, 0, 0, batch, 1, end_ns - begin_ns)
                for name, batch, begin_ns, end_ns in made
            ),
        )
        for thread, made in threads.items()
    )
    return ServiceTrace(service_id, kind, "host", 7, Clock(0, 10), Recording(0, 1000, TURNS, records))


def three_batches() -> Layout:
    """On two replicas: a slice takes 100 ns, attention 50."""
    first = [("slice", 0, 100, 200), ("wait for a batch", 0, 200, 220), ("slice", 2, 220, 320)]
    second = [("slice", 1, 150, 250), ("slice", 0, 250, 350), ("decode step", 0, 100, 350)]
    decode = turns_of("decode-0", "decode", {"replica 0": first, "replica 1": second})
    attention = turns_of("attention-0", "attention", {"attention": [("attention step", 0, 200, 250)]})
    return lay_out(mesh_of(decode, attention))


def test_a_steps_time_counts_for_every_replica_that_computes() -> None:
    layout = three_batches()
    assert [track.name for track in layout.services[0].threads] == ["replica 0", "replica 1"]
    summary = summarize(layout)[0]
    assert (summary.in_steps_ns, summary.compute_ns, summary.waiting_ns) == (500, 400, 20)
    assert summary.python_ns == 80


def test_a_rotation_says_who_has_to_wait() -> None:
    (line,) = staggering_lines(three_batches())
    assert "decode-0: 3 batches rotating on 2 model replicas" in line
    assert "Nobody waits where a slice takes 2 times the attention" in line
    assert "replicas can be busy 100% of the time, attention 100%" in line
    assert list(staggering_lines(lay_out(mesh_of(service_of([("slice", "compute", 0, 9)]))))) == []


def test_fixed_batches_are_told_from_rotating_ones_by_their_replicas() -> None:
    """A slice takes 100 ns, attention 50: a replica waits a third of the time."""
    replicas = {"replica 0": [("slice", 0, 100, 200)], "replica 1": [("slice", 1, 150, 250)]}
    decode = turns_of("decode-0", "decode", replicas)
    attention = turns_of("attention-0", "attention", {"attention": [("attention step", 0, 200, 250)]})
    (line,) = staggering_lines(lay_out(mesh_of(decode, attention)))
    assert "decode-0: 2 batches fixed on 2 model replicas" in line
    assert "replicas can be busy 67% of the time, attention 67%" in line
    assert "Attention never waits where a slice takes 1 times the attention" in line


def test_a_picture_has_a_color_a_batch() -> None:
    svg = ElementTree.fromstring(draw_steps(three_batches(), 1))
    bars = [each for each in svg.iter() if each.tag.endswith("rect") and len(each) > 0]
    colors = {each[0].text: each.get("fill") for each in bars if (each[0].text or "").startswith("slice")}
    assert len({*colors.values()}) == 3


def test_a_step_whose_insides_may_be_lost_is_left_out() -> None:
    made: list[Made] = [
        ("slice", "compute", 120, 140),
        ("decode step", "step", 100, 150),
        ("decode step", "step", 160, 190),
    ]
    (service,) = lay_out(mesh_of(service_of(made, lost=3))).services
    assert [(each.name, each.begin_ns) for each in service.threads[0].slices] == [("decode step", 160)]
    assert service.lost == 3


def test_services_are_in_the_order_of_a_requests_walk_and_on_one_clock() -> None:
    services = [
        service_of([("work", "span", 5000 + 10, 5000 + 20)], "attention-0", "attention", offset_ns=5000),
        service_of([("work", "span", 30, 40)], "decode-1"),
        service_of([("work", "span", 30, 40)], "decode-0"),
        service_of([("work", "span", 30, 40)], "gateway-0", "gateway"),
    ]
    layout = lay_out(mesh_of(*services))
    assert [each.service.service_id for each in layout.services] == [
        "gateway-0",
        "decode-0",
        "decode-1",
        "attention-0",
    ]
    (slice_there,) = layout.services[-1].threads[0].slices
    assert (slice_there.begin_ns, slice_there.end_ns) == (10, 20)


def request_walk() -> Layout:
    """One request from gateway to decode, each service on its own row."""
    life: list[Made] = [
        ("received", "mark", 10, 10),
        ("place request", "lane", 11, 100),
        ("placed", "mark", 100, 100),
        ("first token", "mark", 90, 90),
        ("take tokens", "span", 85, 95),
        ("second token", "mark", 705, 705),
        ("take tokens", "span", 700, 710),
        ("finished", "mark", 720, 720),
        ("open requests", "counter", 10, 10),
    ]
    return lay_out(
        mesh_of(
            service_of(life, "gateway-0", "gateway", requests="r1"),
            service_of([("dispatch", "lane", 20, 95)], "scheduler-0", "scheduler", requests="r1"),
            service_of(
                [("prefill step", "step", 30, 80), ("transfer KV", "lane", 210, 290)],
                "prefill-0",
                "prefill",
                requests="r1",
            ),
            service_of([("pull KV", "lane", 200, 300), ("decode step", "step", 310, 690)], requests="r1"),
            silent=(Silent("decode-1", "decode", "no reply within 5 s"),),
        )
    )


def test_a_requests_arrow_goes_through_every_service() -> None:
    layout = request_walk()
    walk, kv = find_arrows(layout)
    names = [layout.services[stop.service].service.service_id for stop in walk.stops]
    assert walk.request == "r1"
    assert names == [
        "gateway-0",
        "scheduler-0",
        "prefill-0",
        "gateway-0",
        "prefill-0",
        "decode-0",
        "decode-0",
        "gateway-0",
    ]
    assert [(stop.time_ns, stop.service) for stop in kv.stops] == [(210, 2), (290, 3)]


def test_a_requests_life_has_its_phases() -> None:
    events = [each for each in chrome_events(request_walk()) if each["ph"] in "bne"]
    assert {each["id"] for each in events} == {"r1"}
    spans = {
        name: [each["ts"] for each in events if each["name"] == name and each["ph"] in "be"]
        for name in ("request", "placement", "prefill", "hand-over", "decode")
    }
    assert spans == {
        "request": [0.01, 0.72],
        "placement": [0.01, 0.09],
        "prefill": [0.1, 0.1],
        "hand-over": [0.09, 0.705],
        "decode": [0.705, 0.72],
    }
    assert [each["name"] for each in events if each["ph"] == "n"] == [
        "received",
        "first token",
        "placed",
        "second token",
        "finished",
    ]


def test_the_file_names_its_rows_and_who_is_missing() -> None:
    content = orjson.loads(chrome_trace(request_walk()))
    rows = [each["args"]["name"] for each in content["traceEvents"] if each["name"] == "process_name"]
    assert rows == ["gateway-0", "scheduler-0", "prefill-0", "decode-0"]
    assert content["otherData"]["silent"] == {"decode-1": "no reply within 5 s"}
    (counter,) = [each for each in content["traceEvents"] if each["ph"] == "C"]
    assert (counter["name"], counter["args"]) == ("open requests", {"attempt": 0})


@given(
    lanes=st.lists(st.tuples(st.sampled_from(["pull KV", "transfer KV"]), intervals), max_size=15),
    marks=st.lists(
        st.tuples(
            st.sampled_from(["received", "placed", "first token", "second token", "finished"]),
            st.integers(0, 1000),
        ),
        max_size=12,
    ),
)
def test_any_file_is_well_formed(
    lanes: list[tuple[str, tuple[int, int]]], marks: list[tuple[str, int]]
) -> None:
    made: list[Made] = [(name, "lane", *each) for name, each in lanes]
    made += [(name, "mark", at, at) for name, at in marks]
    layout = lay_out(mesh_of(service_of(made, "a", requests="r1"), service_of(made, "b", requests="r1 r2")))
    events = chrome_events(layout)
    timed = [each for each in events if each["ph"] != "M"]
    assert [each["ts"] for each in timed] == sorted(each["ts"] for each in timed)
    open_lives: dict[tuple[int, str | None], list[str]] = defaultdict(list)
    for each in timed:
        assert isinstance(each["pid"], int)
        assert isinstance(each["tid"], int)
        key = (each["pid"], each.get("id"))
        if each["ph"] == "b":
            open_lives[key].append(each["name"])
        elif each["ph"] == "e":
            open_lives[key].remove(each["name"])
    assert not any(open_lives.values())
    slices = [each for each in timed if each["ph"] == "X"]
    arrows: dict[int, list[str]] = defaultdict(list)
    for each in timed:
        if each["ph"] in "stf":
            arrows[each["id"]].append(each["ph"])
            assert any(
                (at["pid"], at["tid"]) == (each["pid"], each["tid"])
                and at["ts"] <= each["ts"] <= at["ts"] + at["dur"]
                for at in slices
            )
    for phases in arrows.values():
        assert phases == ["s", *["t"] * (len(phases) - 2), "f"]


def test_a_picture_shows_the_wanted_steps() -> None:
    made: list[Made] = [("decode step", "step", 100 * at, 100 * at + 80) for at in range(5)]
    made += [("slice", "compute", 100 * at + 5, 100 * at + 60) for at in range(5)]
    layout = lay_out(mesh_of(service_of(made, "decode<0>")))
    picture = ElementTree.fromstring(draw_steps(layout, 3))
    namespace = "{http://www.w3.org/2000/svg}"
    texts = [each.text for each in picture.iter(f"{namespace}text")]
    assert texts.count("decode step") == 3
    assert texts.count("slice") == 3
    assert "decode<0>" in texts
    with pytest.raises(LauncherError, match="5 decode steps"):
        draw_steps(layout, 6)
    with pytest.raises(LauncherError, match="no decode step was recorded"):
        draw_steps(lay_out(mesh_of(service_of([("slice", "compute", 5, 60)]))), 3)


@pytest.mark.parametrize(("ahead_ns", "is_same_kernel"), [(0, True), (10**12, False), (-(10**12), True)])
def test_a_clock_s_offset_is_measured_within_its_round_trip(ahead_ns: int, is_same_kernel: bool) -> None:
    async def read() -> ClockRead:
        await asyncio.sleep(0)
        return ClockRead(time.monotonic_ns() + ahead_ns, boot_id() if is_same_kernel else "another")

    clock = asyncio.run(measure_clock(read))
    assert abs(clock.offset_ns - ahead_ns) <= clock.round_trip_ns
    if ahead_ns == 0:
        assert clock.offset_ns == 0
