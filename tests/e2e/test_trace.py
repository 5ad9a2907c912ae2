"""`lamella trace` on running meshes: who did what when, of which request, and nothing after the end."""

import asyncio
import os
import signal
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import orjson
import pytest

from common.errors import InvalidRequest, Overloaded
from common.tracing import StartTrace, TraceStarted
from tests.e2e.meshes import LAMELLA, Mesh, environment, running_mesh

Events = list[dict[str, Any]]

LAYERS = 4
"""Of the tiny model."""
OUTPUT_TOKENS = 24
EMULATED = """
[mesh]
call_timeout_s = 5.0
lease_s = 60.0
[instance]
engine = "emulated"
block_size = 16
[emulation]
decode_base_s = 0.005
[scheduler]
max_requests_per_decode = 3
"""
MOST_OPEN = 3


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with running_mesh(tmp_path_factory.mktemp("trace") / "mesh", config=EMULATED) as mesh:
        yield mesh


async def stream(mesh: Mesh) -> None:
    async with mesh.client() as client:
        chunks = await client.completions.create(
            model="default",
            prompt="What is a lamella? " * 8,
            max_tokens=OUTPUT_TOKENS,
            stream=True,
            timeout=60,
            extra_body={"ignore_eos": True},
        )
        async for _ in chunks:
            pass


async def trace_under_load(mesh: Mesh, output: Path, *options: str) -> str:
    """Two streams at a time from before the beginning until after the end; what the command said."""
    tracing = asyncio.create_task(asyncio.to_thread(mesh.lamella, "trace", "--output", str(output), *options))
    while not tracing.done():
        await asyncio.gather(stream(mesh), stream(mesh))
    return tracing.result()


def read(output: Path) -> tuple[Events, dict[str, Any]]:
    content = orjson.loads(output.read_bytes())
    return content["traceEvents"], content["otherData"]


def rows(events: Events) -> dict[int, str]:
    return {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}


def slices_of(events: Events, service: str) -> Events:
    pids = [pid for pid, name in rows(events).items() if name == service]
    return [each for each in events if each["ph"] == "X" and each["pid"] in pids]


def assert_nests(slices: Events) -> None:
    """On every track, in whole ns, as µs are no exact numbers."""
    tracks: dict[tuple[int, int], Events] = defaultdict(list)
    for each in slices:
        tracks[each["pid"], each["tid"]].append(each)
    for track in tracks.values():
        ends_ns: list[int] = []
        for each in sorted(track, key=lambda each: (each["ts"], -each["dur"])):
            begin_ns, end_ns = round(each["ts"] * 1000), round((each["ts"] + each["dur"]) * 1000)
            while ends_ns and ends_ns[-1] <= begin_ns:
                ends_ns.pop()
            assert not ends_ns or end_ns <= ends_ns[-1], each
            ends_ns.append(end_ns)


def whole_requests(events: Events) -> set[str]:
    """Received and finished within the trace."""
    marks = [(each["id"], each["name"]) for each in events if each["ph"] == "n"]
    finished = {request for request, name in marks if name == "finished"}
    return {request for request, name in marks if name == "received" and request in finished}


def walks(events: Events) -> dict[str, list[str]]:
    """By request, the services its arrow visits, in time's order."""
    names = rows(events)
    found: dict[str, list[str]] = defaultdict(list)
    for each in sorted((each for each in events if each["ph"] in "stf"), key=lambda each: each["ts"]):
        if each["name"] == "request":
            found[each["args"]["request"]].append(names[each["pid"]])
    return found


def test_a_traced_mesh_shows_every_service_and_every_request(mesh: Mesh, tmp_path: Path) -> None:
    output = tmp_path / "trace.json"
    said = asyncio.run(trace_under_load(mesh, output, "--duration-s", "2"))
    events, about = read(output)
    services = ["gateway-0", "scheduler-0", "prefill-0", "decode-0"]
    assert list(rows(events).values()) == services
    assert about["silent"] == {}
    for service in services:
        assert service in said
        slices = slices_of(events, service)
        assert slices, f"{service} did nothing"
        assert_nests(slices)
    requests = whole_requests(events)
    assert requests
    for request in requests:
        walk = walks(events)[request]
        assert list(dict.fromkeys(walk)) == services, "in the order of a request's walk"
        assert walk[0] == walk[-1] == "gateway-0"
    kv = [each for each in events if each.get("name") == "KV"]
    assert requests <= {each["args"]["request"] for each in kv}
    moved = [each["args"] for each in slices_of(events, "prefill-0") if each["name"] == "transfer KV"]
    assert all(each["bytes"] > 0 and each["peer"] == "decode-0" for each in moved)
    counters = {each["name"] for each in events if each["ph"] == "C"}
    assert {"queues", "decoding", "KV blocks", "open requests"} <= counters
    timed = [each for each in events if each["ph"] != "M"]
    latest_us = max(each["ts"] + each.get("dur", 0.0) for each in timed)
    assert 0 <= min(each["ts"] for each in timed) <= latest_us <= about["duration_s"] * 1e6 + 0.001


async def ends_of(mesh: Mesh, output: Path) -> set[str]:
    """Of requests that are too many for the mesh, that their clients leave, and others: their last marks."""
    tracing = asyncio.create_task(
        asyncio.to_thread(mesh.lamella, "trace", "--output", str(output), "--duration-s", "4")
    )
    async with mesh.client() as client:
        while not tracing.done():
            many = (stream(mesh) for _ in range(2 * MOST_OPEN))
            await asyncio.gather(*many, return_exceptions=True)
            # who ended just now is in decode's report for a moment more, and a place may not be free
            chunks = await client.with_options(max_retries=10).completions.create(
                model="default", prompt="Who is there?", max_tokens=1000, stream=True
            )
            await anext(aiter(chunks))
            await chunks.close()
    await tracing
    marks: dict[str, list[str]] = defaultdict(list)
    events, _ = read(output)
    for each in sorted((each for each in events if each["ph"] == "n"), key=lambda each: each["ts"]):
        marks[each["id"]].append(each["name"])
    return {names[-1] for names in marks.values() if names[0] == "received"}


def test_how_each_request_ended_is_on_its_row(mesh: Mesh, tmp_path: Path) -> None:
    ends = asyncio.run(ends_of(mesh, tmp_path / "trace.json"))
    assert {"finished", "refused", "left"} <= ends


def test_nothing_of_before_is_in_a_trace(mesh: Mesh, tmp_path: Path) -> None:
    asyncio.run(stream(mesh))
    output = tmp_path / "trace.json"
    mesh.lamella("trace", "--duration-s", "0.3", "--output", str(output))
    events, _ = read(output)
    assert [each for each in events if each["ph"] in "Xbnestf"] == []


def test_a_service_that_does_not_answer_is_named_and_the_others_are_shown(mesh: Mesh, tmp_path: Path) -> None:
    output = tmp_path / "trace.json"
    pid = mesh.pid_of("decode")
    os.kill(pid, signal.SIGSTOP)
    try:
        mesh.lamella("trace", "--duration-s", "0.3", "--output", str(output))
    finally:
        os.kill(pid, signal.SIGCONT)
    events, about = read(output)
    assert list(rows(events).values()) == ["gateway-0", "scheduler-0", "prefill-0"]
    assert list(about["silent"]) == ["decode-0"]


def test_a_killed_command_leaves_nothing_on(mesh: Mesh, tmp_path: Path) -> None:
    options = ("--state-dir", str(mesh.state_dir), "--output", str(tmp_path / "trace.json"))
    with subprocess.Popen(
        [*LAMELLA, "trace", "--duration-s", "2", *options], env=environment(), stderr=subprocess.DEVNULL
    ) as killed:
        asyncio.run(wait_recording(mesh, True))
        killed.kill()
    asyncio.run(wait_recording(mesh, False))
    mesh.lamella("trace", "--duration-s", "0.1", "--output", str(tmp_path / "trace.json"))


async def wait_recording(mesh: Mesh, is_wanted: bool) -> None:
    """Until decode records, or does so no more: then it refuses an impossible duration for another reason."""
    impossible, calls = StartTrace("probe", -1.0), mesh.subjects.trace_calls("decode-0")
    async with mesh.bus() as bus, asyncio.timeout(60):
        while True:
            with pytest.raises((Overloaded, InvalidRequest)) as refusal:
                await bus.call(calls, impossible, TraceStarted, 10)
            if isinstance(refusal.value, Overloaded) == is_wanted:
                return


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--duration-s", "0"), "--duration-s = 0.0: must be above 0"),
        (("--duration-s", "601"), "at most 600"),
        (("--duration-s", "nan"), "--duration-s = nan"),
        (("--output", "/nowhere/trace.json"), "--output = '/nowhere/trace.json': cannot be written"),
        (("--output", "/"), "--output = '/': is a directory"),
        (("--svg", "/nowhere/trace.svg"), "--svg = '/nowhere/trace.svg': cannot be written"),
        (("--nats", "nats://127.0.0.1:1"), "is needed beside --nats"),
        (("--redis", "redis://127.0.0.1:1/0"), "is needed beside --redis"),
    ],
)
def test_bad_input_is_told_before_anything_is_recorded(
    mesh: Mesh, options: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [*LAMELLA, "trace", "--state-dir", str(mesh.state_dir), *options],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 1
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_every_layers_exchange_lies_within_its_decode_step(tiny_model: Path, tmp_path: Path) -> None:
    arguments = ("--attention", "1", "--model", str(tiny_model), "--dtype", "fp32")
    output, picture = tmp_path / "trace.json", tmp_path / "trace.svg"
    with running_mesh(tmp_path / "mesh", *arguments) as mesh:
        asyncio.run(trace_under_load(mesh, output, "--duration-s", "2", "--svg", str(picture)))
    events, _ = read(output)
    worker = slices_of(events, "attention-0")
    decode = slices_of(events, "decode-0")
    for slices in (worker, decode):
        assert_nests(slices)
    for slices, step_name, names in (
        (decode, "decode step", ("send Q", "send KV", "wait for output", "take output")),
        (worker, "attention step", ("send output",)),
    ):
        steps = sorted((each["ts"], each["ts"] + each["dur"]) for each in slices if each["name"] == step_name)
        assert steps
        for name in names:
            found = [each for each in slices if each["name"] == name]
            for begin, end in steps:
                inside = [each for each in found if begin <= each["ts"] and each["ts"] + each["dur"] <= end]
                assert [each["args"]["layer"] for each in inside] == list(range(LAYERS)), name
    texts = [each.text for each in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert {"decode-0", "attention-0", "gateway-0"} <= set(texts)
