"""What everyone did in a simulated mesh, as a file for the viewer of live ones."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from services.simulator.cluster import Cluster
from services.simulator.config import Simulated
from services.simulator.run import Load, simulate
from services.simulator.timeline import SimulatedTimeline
from services.simulator.timeline_file import write_timeline
from tests.services.simulator.meshes import TOKEN_BYTES, mesh, offered, pool

REQUESTS = ((0.0, 300, 40), (0.1, 150, 20), (0.9, 70, 1), (5.0, 10, 2))


class Traced:
    """A run and its file."""

    def __init__(self, simulated: Simulated, path: Path) -> None:
        timeline = SimulatedTimeline()
        self.cluster: Cluster = simulate(simulated, Load(offered(*REQUESTS)), timeline=timeline)
        write_timeline(path, self.cluster, timeline)
        self.events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
        names = [each for each in self.events if each["name"] == "process_name"]
        self.services = {each["args"]["name"]: each["pid"] for each in names}

    def slices(self, service: str, *names: str) -> list[dict[str, Any]]:
        process = self.services[service]
        return [
            each
            for each in self.events
            if each["ph"] == "X" and each["pid"] == process and each["name"] in names
        ]

    def seconds(self, service: str, *names: str) -> float:
        return math.fsum(each["dur"] for each in self.slices(service, *names)) / 1e6


@pytest.fixture
def disaggregated(tmp_path: Path) -> Traced:
    given = {"instance": {"chunk_tokens": 128}, "cluster": {"link_bytes_per_s": 1e6}}
    return Traced(mesh(pool("prefill"), pool("decode"), **given), tmp_path / "timeline.json")


def test_every_busy_second_is_on_the_timeline(disaggregated: Traced) -> None:
    prefill, decode = (disaggregated.cluster.instances[each] for each in disaggregated.cluster.instances)
    assert disaggregated.seconds("prefill-0", "prefill step") == pytest.approx(prefill.engine.busy.prefill_s)
    assert disaggregated.seconds("decode-0", "decode steps") == pytest.approx(decode.engine.busy.decode_s)
    chunks = disaggregated.slices("prefill-0", "prefill step")
    assert sum(each["args"]["tokens"] for each in chunks) == 300 + 150 + 70 + 10
    runs = disaggregated.slices("decode-0", "decode steps")
    assert sum(each["args"]["steps"] for each in runs) == decode.decode.drawing.steps
    assert len(runs) < decode.decode.drawing.steps


def test_transfers_are_on_both_sides_and_arrows_lead_to_them(disaggregated: Traced) -> None:
    """What is handed over: all but the third request, of one token."""
    sent = disaggregated.slices("prefill-0", "transfer KV")
    assert sum(each["args"]["bytes"] for each in sent) == (300 + 150 + 10) * TOKEN_BYTES
    assert {each["args"]["last layer"] for each in sent} == {3}
    assert {each["args"]["requests"] for each in sent} == {"r0", "r1", "r3"}
    pulled = disaggregated.slices("decode-0", "pull KV")
    assert {each["args"]["requests"] for each in pulled} == {"r0", "r1", "r3"}
    arrows = [each for each in disaggregated.events if each["name"] == "KV" and each["ph"] == "s"]
    assert {each["args"]["request"] for each in arrows} == {"r0", "r1", "r3"}


def test_each_request_lives_from_its_arrival_to_its_end(disaggregated: Traced) -> None:
    records = disaggregated.cluster.records
    for number in range(len(REQUESTS)):
        own = [each for each in disaggregated.events if each.get("id") == f"r{number}"]
        life = [each["ts"] / 1e6 for each in own if each["name"] == "request"]
        assert life == pytest.approx([records.arrival_s[number], records.end_s[number]])
        first = next(each["ts"] / 1e6 for each in own if each["name"] == "first token")
        assert first == pytest.approx(records.first_token_s[number])
        placed = next(each["ts"] / 1e6 for each in own if each["name"] == "placed")
        assert records.arrival_s[number] <= placed <= first


def test_a_mixed_instance_s_passes_are_chunks_steps_and_both(tmp_path: Path) -> None:
    traced = Traced(mesh(pool("mixed"), instance={"chunk_tokens": 64}), tmp_path / "timeline.json")
    busy = traced.cluster.instances[next(iter(traced.cluster.instances))].engine.busy
    assert busy.both_s > 0
    assert traced.seconds("mixed-0", "mixed step") == pytest.approx(busy.both_s)
    assert traced.seconds("mixed-0", "prefill step") == pytest.approx(busy.prefill_s)
    assert traced.seconds("mixed-0", "decode steps") == pytest.approx(busy.decode_s)


def test_to_be_watched_changes_nothing(disaggregated: Traced) -> None:
    unwatched = simulate(disaggregated.cluster.simulated, Load(offered(*REQUESTS)))
    assert unwatched.records.digest() == disaggregated.cluster.records.digest()


def test_a_request_ends_as_it_did(tmp_path: Path) -> None:
    """What nobody can hold is refused; of an instance that never comes back, what it had is lost for good."""
    fault = {"kind": "death", "instance": "decode-0", "at_s": 0.5}
    timeline, path = SimulatedTimeline(), tmp_path / "timeline.json"
    simulated = mesh(pool("prefill"), pool("decode", kv_tokens=1024), fault=[fault])
    requests = ((0.0, 20, 2), (0.1, 2000, 2), (0.2, 20, 500))
    write_timeline(path, simulate(simulated, Load(offered(*requests)), timeline=timeline), timeline)
    marks: dict[str, list[str]] = {}
    for each in json.loads(path.read_text())["traceEvents"]:
        if each["ph"] == "n":
            marks.setdefault(each["id"], []).append(each["name"])
    assert {request: names[-1] for request, names in marks.items()} == {
        "r0": "finished",
        "r1": "refused",
        "r2": "failed",
    }
