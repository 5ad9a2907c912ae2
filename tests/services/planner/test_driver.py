"""Who drives a search: every probe is simulated once, kept, and answered to whom it belongs."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import pytest

from common.devices import A100, DEVICES
from common.errors import ConfigError
from common.latency import ServiceObjectives
from common.shapes import LLAMA3_8B
from services.bench.traces import TraceRequest
from services.planner import simulating as simulating_module
from services.planner.candidates import InstanceKind, PoolPlan
from services.planner.checkpoint import Checkpoint
from services.planner.driver import Apart, WorkerLost, drive, simulating
from services.planner.probes import Point, Probe, Search, ask, together
from services.planner.simulating import Conditions
from services.planner.sources import ROOT, SOURCES, files_digest, own_digest, sources_digest
from tests.services.planner.worlds import kind_of, point

CONDITIONS = Conditions(
    shape=LLAMA3_8B,
    rows=tuple(TraceRequest(None, 300 + 7 * number % 200, 10 + number % 20) for number in range(60)),
    objectives=ServiceObjectives(ttft_s=1.0, tpot_s=0.05),
)

OWN = replace(A100, name="mine")


def probe(rate_per_s: float) -> Probe:
    return Probe(pools=(PoolPlan(kind=kind_of("mixed"), count=1),), rate_per_s=rate_per_s, requests=60)


def counting(asked: list[float]) -> Search[list[float]]:
    """Rates with what was answered: attainments are the rates again."""
    found = []
    for rate in asked:
        answered = yield from ask(probe(rate))
        found.append(answered.attainment)
    return found


class World:
    """What was begun last is over first."""

    def __init__(self, places: int = 3) -> None:
        self.places = places
        self.simulated: list[float] = []
        self.running: list[Probe] = []
        self.most_running = 0

    def begin(self, probe: Probe) -> None:
        self.running.append(probe)
        self.most_running = max(self.most_running, len(self.running))

    def wait(self) -> tuple[Probe, Point]:
        probe = self.running.pop()
        self.simulated.append(probe.rate_per_s)
        return probe, point(probe.rate_per_s)


def test_answers_reach_whoever_asked_in_any_order() -> None:
    world = World()
    search = together([counting([1.0, 2.0, 3.0]), counting([4.0]), counting([]), counting([1.0, 5.0])])
    with Checkpoint(None) as kept:
        found = drive(search, world, kept, b"")
    assert found == [[1.0, 2.0, 3.0], [4.0], [], [1.0, 5.0]]
    assert sorted(world.simulated) == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_no_search_waits_for_another_one_s_points() -> None:
    """The one that was begun first comes last: meanwhile the other gets to its end."""
    world = World(places=2)
    with Checkpoint(None) as kept:
        found = drive(together([counting([9.0, 1.0]), counting([2.0, 3.0, 4.0])]), world, kept, b"")
    assert found == [[9.0, 1.0], [2.0, 3.0, 4.0]]
    first, second = (world.simulated.index(rate) for rate in (9.0, 1.0))
    others = [world.simulated.index(rate) for rate in (2.0, 3.0, 4.0)]
    assert max(others) < first < second or max(first, second) < min(others)
    assert world.most_running == 2


def test_a_search_among_searches_goes_on_by_itself() -> None:
    world = World(places=1)
    inner = together([counting([1.0, 2.0]), counting([3.0])])
    with Checkpoint(None) as kept:
        found = drive(together([inner, together([counting([4.0])])]), world, kept, b"")
    assert found == [[[1.0, 2.0], [3.0]], [[4.0]]]
    assert world.most_running == 1


def test_the_longest_runs_begin_first_and_each_once() -> None:
    begun: list[int] = []

    class Noting(World):
        def begin(self, probe: Probe) -> None:
            begun.append(probe.requests)
            super().begin(probe)

    def twice_the_same() -> Search[float]:
        asked = [replace_requests(number) for number in (60, 900, 300, 900)]
        points: dict[Probe, Point] = {}
        while len(points) < 3:
            points |= yield [each for each in asked if each not in points]
        return sum(each.attainment for each in points.values())

    def replace_requests(requests: int) -> Probe:
        return Probe(pools=probe(1.0).pools, rate_per_s=1.0, requests=requests)

    with Checkpoint(None) as kept:
        assert drive(twice_the_same(), Noting(places=3), kept, b"") == 3.0
    assert begun == [900, 300, 60]


def test_a_search_that_waits_for_nothing_is_refused() -> None:
    def waits_for_nothing() -> Search[None]:
        yield []

    with Checkpoint(None) as kept, pytest.raises(ValueError, match="one probe at least"):
        drive(waits_for_nothing(), World(), kept, b"")


NOWHERE = InstanceKind(role="mixed", device="nowhere", max_decode_batch=16)
THREE = InstanceKind(role="mixed", device="a100", max_decode_batch=16, tensor=3)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("kind", "error", "says"), [(NOWHERE, KeyError, "nowhere"), (THREE, ConfigError, "= 3")]
)
def test_an_error_of_a_run_in_another_process_is_the_search_s(
    processes: int, kind: InstanceKind, error: type[Exception], says: str
) -> None:
    failing = Probe(pools=(PoolPlan(kind=kind, count=1),), rate_per_s=1.0, requests=9)
    with (
        simulating(CONDITIONS, processes) as simulator,
        Checkpoint(None) as kept,
        pytest.raises(error, match=says),
    ):
        drive(ask(failing), simulator, kept, b"")


def test_what_came_beside_an_error_is_kept(tmp_path: Path) -> None:
    """The error is told when nothing else has come."""
    path = tmp_path / "points.jsonl"
    failing = Probe(pools=(PoolPlan(kind=THREE, count=1),), rate_per_s=1.0, requests=9)

    class Behind:
        """What both have come to is looked at when both are over."""

        def __init__(self, apart: Apart) -> None:
            self.apart, self.places = apart, apart.places
            self.begin = apart.begin

        def wait(self) -> tuple[Probe, Point]:
            wait(self.apart._begun)
            return self.apart.wait()

    with simulating(CONDITIONS, 2) as simulator, Checkpoint(path) as kept:
        assert isinstance(simulator, Apart)
        search = together([ask(failing), ask(probe(1.0))])
        with pytest.raises(ConfigError):
            drive(search, Behind(simulator), kept, b"")
    with Checkpoint(path) as kept:
        assert len(kept.points) == 1


def test_a_process_that_is_killed_is_told_of(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    with simulating(CONDITIONS, 2) as simulator, Checkpoint(tmp_path / "points.jsonl") as kept:
        drive(ask(probe(1.0)), simulator, kept, b"")
        [first, _] = sorted(set(multiprocessing.active_children()) - before, key=lambda each: each.pid or 0)
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        search = counting([float(rate) for rate in range(2, 50)])
        with pytest.raises(WorkerLost, match="--processes"):
            drive(search, simulator, kept, b"")
    assert set(multiprocessing.active_children()) <= before
    with Checkpoint(tmp_path / "points.jsonl") as kept:
        assert kept.points


def test_every_process_is_started_at_once() -> None:
    before = set(multiprocessing.active_children())
    with simulating(CONDITIONS, 4):
        assert len(set(multiprocessing.active_children()) - before) == 4
    assert set(multiprocessing.active_children()) <= before


def test_nothing_is_begun_where_a_process_was_lost() -> None:
    before = set(multiprocessing.active_children())
    with simulating(CONDITIONS, 2) as simulator:
        for lost in set(multiprocessing.active_children()) - before:
            lost.kill()

        def begin_until_it_is_seen() -> None:
            for rate in range(1, 100):
                simulator.begin(probe(float(rate)))
                time.sleep(0.1)

        with pytest.raises(WorkerLost, match="--processes"):
            begin_until_it_is_seen()


def test_what_was_kept_is_not_simulated_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "points.jsonl"
    for asked, context, simulated in (
        ([1.0, 2.0], b"", [1.0, 2.0]),
        ([1.0, 2.0, 3.0], b"", [3.0]),
        ([1.0], b"other", [1.0]),
    ):
        world = World()
        with Checkpoint(path) as kept:
            assert drive(counting(asked), world, kept, context) == asked
        assert world.simulated == simulated


def test_a_line_that_stops_short_is_forgotten_and_the_next_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    with Checkpoint(path) as kept:
        kept.keep("a", point(0.5))
        kept.keep("b", point(0.6))
    path.write_bytes(path.read_bytes()[:-40])
    with Checkpoint(path) as kept:
        assert list(kept.points) == ["a"]
        kept.keep("c", point(0.7))
    with Checkpoint(path) as kept:
        assert {key: each.attainment for key, each in kept.points.items()} == {"a": 0.5, "c": 0.7}


def test_a_last_line_is_forgotten_wherever_it_stops_short(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    with Checkpoint(path) as kept:
        kept.keep("a", point(0.5))
    line = path.read_bytes()
    for begun in (b"", line):
        for cut in range(1, len(line) - 1):
            path.write_bytes(begun + line.replace(b'"a"', b'"b"')[:cut])
            with Checkpoint(path) as kept:
                assert list(kept.points) == ["a"] * bool(begun)
                kept.keep("c", point(0.7))
            assert path.read_bytes().count(b"\n") == len(kept.points)
            with Checkpoint(path) as kept:
                assert "c" in kept.points
    path.write_bytes(line + b"\0" * 40)
    with Checkpoint(path) as kept:
        assert list(kept.points) == ["a"]


def test_a_line_that_stops_short_before_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    with Checkpoint(path) as kept:
        kept.keep("a", point(0.5))
    line = path.read_bytes()
    for content in (line[:40] + b"\n" + line, line[:40] + b"\n"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="no file of points: line 1"):
            Checkpoint(path)
        assert path.read_bytes() == content


@pytest.mark.parametrize(
    "content",
    [b"prices = 1\n", b"\xff\n", b'{"key":"a","point":{}}\n', b"prices = 1", b'{"prices": 1}', b"a,b\n1,2"],
)
def test_another_file_is_no_checkpoint(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="no file of points"):
        Checkpoint(path)
    assert path.read_bytes() == content


def test_a_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        Checkpoint(tmp_path)


def probes() -> Search[list[Point]]:
    kind = InstanceKind(role="mixed", device="a100", max_decode_batch=16)
    return together(
        [
            ask(Probe(pools=(PoolPlan(kind=kind, count=count),), rate_per_s=rate, requests=60))
            for count, rate in ((1, 2.0), (2, 4.0), (1, 20.0))
        ]
    )


def test_two_processes_find_what_one_does() -> None:
    found = []
    for processes in (1, 2):
        with simulating(CONDITIONS, processes) as simulate, Checkpoint(None) as kept:
            found.append(drive(probes(), simulate, kept, b""))
    assert found[0] == found[1]
    assert found[0][0].attainment == 1.0


def test_conditions_that_differ_have_keys_that_differ() -> None:
    others: Iterator[Conditions] = iter(
        (
            replace(CONDITIONS, seed=1),
            replace(CONDITIONS, goal=0.9),
            replace(CONDITIONS, settings={"instance": {"block_size": 16}}),
            replace(CONDITIONS, performance={"a100": {"kind": "roofline", "compute": 0.5}}),
            replace(CONDITIONS, performance_digest="other"),
            replace(CONDITIONS, rows=CONDITIONS.rows[:-1]),
            replace(CONDITIONS, objectives=ServiceObjectives(ttft_s=1.0)),
            replace(CONDITIONS, catalogue={**DEVICES, "mine": OWN}),
            replace(CONDITIONS, catalogue={**DEVICES, "mine": replace(OWN, memory_gb_s=1.0)}),
        )
    )
    encoded = [CONDITIONS.encoded(), *(each.encoded() for each in others)]
    assert len(set(encoded)) == len(encoded)


def test_points_of_other_code_are_not_taken_for_this_one_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def simulated_with(policy: str) -> list[float]:
        (tmp_path / "scheduler" / "policy").mkdir(parents=True, exist_ok=True)
        (tmp_path / "scheduler" / "policy" / "dispatch.py").write_text(policy)
        monkeypatch.setattr(simulating_module, "own_digest", lambda: sources_digest(tmp_path))
        world = World()
        with Checkpoint(tmp_path / "points.jsonl") as kept:
            drive(counting([1.0, 2.0]), world, kept, CONDITIONS.encoded())
        return world.simulated

    assert simulated_with("first = 1\n") == [1.0, 2.0]
    assert simulated_with("first = 1\n") == []
    assert simulated_with("first = 2\n") == [1.0, 2.0]
    assert simulated_with("first = 1\n") == []


def test_the_code_s_digest_is_of_all_that_a_run_loads() -> None:
    listed = "import services.planner.simulating, sys; print(*(m.__file__ for m in sys.modules.values()"
    script = f"{listed} if getattr(m, '__file__', None)), sep='\\n')"
    command = [sys.executable, "-c", script]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.splitlines()
    own = [Path(file).relative_to(ROOT) for file in loaded if Path(file).is_relative_to(ROOT)]
    files = [file for file in own if file.name != "__init__.py" and not file.parts[0].startswith(".")]
    assert Path("scheduler/policy/dispatch.py") in files
    assert [file for file in files if not any(file.is_relative_to(package) for package in SOURCES)] == []


def test_the_code_s_digest_is_of_every_decision_and_of_names() -> None:
    for package in SOURCES:
        assert any((ROOT / package).rglob("*.py")), package
    assert own_digest() == sources_digest(ROOT)


def test_a_file_under_another_name_is_other_code(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "a.py").write_text("x = 1\n")
    before = sources_digest(tmp_path)
    (tmp_path / "common" / "a.py").rename(tmp_path / "common" / "b.py")
    assert sources_digest(tmp_path) != before


def test_files_are_told_apart_by_what_they_hold_and_by_their_names_in_a_folder(tmp_path: Path) -> None:
    folder, file = tmp_path / "tables", tmp_path / "profile.json"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "gemm.csv").write_text("1\n")
    file.write_text("{}")
    seen = [files_digest([folder, file])]
    assert files_digest([folder, file]) == seen[0]
    (folder / "deep" / "gemm.csv").write_text("2\n")
    seen.append(files_digest([folder, file]))
    (folder / "deep" / "gemm.csv").rename(folder / "gemm.csv")
    seen.append(files_digest([folder, file]))
    file.write_text("[]")
    seen.append(files_digest([folder, file]))
    file.unlink()
    seen.append(files_digest([folder, file]))
    seen.append(files_digest([file, folder]))
    assert len(set(seen)) == len(seen)
