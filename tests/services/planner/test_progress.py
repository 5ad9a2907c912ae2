"""What a plan says of itself while it searches."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from services.planner.candidates import PoolPlan
from services.planner.planning import plan
from services.planner.probes import Probe, Search, Tally, ask, together
from services.planner.progress import EVERY_S, Watch
from tests.services.planner.command_line import CONFIG, ROWS, run
from tests.services.planner.test_planning import REQUESTS, random_world
from tests.services.planner.worlds import bounds_in, demand_of, kind_of, kinds_in, search_world


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(("objective", "most"), [("cost", None), ("cost", 1), ("throughput", 16)])
def test_a_plan_tells_of_every_part_until_it_is_over(objective: str, most: int | None) -> None:
    told: list[tuple[str, int, int]] = []
    world = random_world(0)
    demand = demand_of("throughput" if objective == "throughput" else "cost", rate=9.0, most=most)

    def tell(what: str, done: int, total: int) -> None:
        told.append((what, done, total))

    found, _ = search_world(plan(kinds_in(world), bounds_in(world), demand, REQUESTS, tell=tell), world)
    parts = list(dict.fromkeys(what for what, _, _ in told))
    assert parts[0] == "kinds of instances looked at"
    assert len(parts) >= 2
    for part in parts:
        counts = [(done, total) for what, done, total in told if what == part]
        assert counts[0][0] == 0
        assert counts == sorted(counts)
        assert counts[-1][0] == counts[-1][1]
    assert (parts[0], found.kinds, found.kinds) in told


def test_searches_together_count_those_that_ended_unasked_too() -> None:
    def search(runs: int) -> Search[int]:
        for number in range(runs):
            yield from ask(
                Probe(pools=(PoolPlan(kind=kind_of("mixed"), count=1),), rate_per_s=1.0 + number, requests=9)
            )
        return runs

    told: list[tuple[int, int]] = []
    over = Tally(lambda _, done, total: told.append((done, total)), "searches", 3)
    found, _ = search_world(together([search(0), search(3), search(1)], over), {kind_of("mixed"): 9.0})
    assert found == [0, 3, 1]
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_without_a_terminal_the_size_is_said_first_and_a_line_now_and_then() -> None:
    file, clock = io.StringIO(), Clock()
    watch = Watch(Console(file=file, width=40), clock)
    watch.size = "planning: so many kinds of instances, to be [searched]"
    with watch:
        assert file.getvalue() == f"{watch.size}\n"
        watch.tell("pairs measured", 0, 400)
        for number in range(1, 12):
            clock.now_s += EVERY_S / 8
            watch.ran()
            watch.tell("pairs measured", number // 2, 400)
    assert file.getvalue().splitlines() == [
        "planning: so many kinds of instances, to be [searched]",
        "planning: 8 runs, 3 of 400 pairs measured",
    ]
    assert watch.runs == 11


def test_in_a_terminal_there_is_a_bar_that_leaves_nothing_behind() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120, _environ={"TERM": "xterm"})
    watch = Watch(console, Clock())
    watch.size = "planning: 9 kinds"
    with watch:
        watch.tell("kinds looked at", 0, 9)
        watch.ran()
        watch.tell("kinds looked at", 4, 9)
        watch.tell("deployments simulated whole", 1, 3)
        watch._bar.refresh()
        drawn = file.getvalue()
    assert "planning: 1 run, deployments simulated whole" in drawn
    assert "1/3" in drawn
    assert "planning: 9 kinds\n" in drawn
    # The last line that was drawn is cleared.
    assert file.getvalue().endswith("\x1b[2K")


def test_the_command_says_how_much_there_is_to_search(tmp_path: Path) -> None:
    trace, base, kept = tmp_path / "trace.csv", tmp_path / "base.toml", tmp_path / "points.jsonl"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n" + "300,12\n" * ROWS)
    base.write_text(CONFIG)
    options = ("--config", str(base), "--devices", "a100", "--rate", "4")
    first = run(trace, *options)
    assert "planning: 10 kinds of instances, 120 requests; runs are simulated 1 at once" in first.stderr
    assert "none is kept without --checkpoint" in first.stderr
    run(trace, *options, "--checkpoint", str(kept))
    again = run(trace, *options, "--checkpoint", str(kept))
    known = len(kept.read_text().splitlines())
    assert f"kept in {kept}; of earlier runs {known} are known" in again.stderr
    assert first.stdout == again.stdout


def test_runs_before_anything_is_counted_are_told_alone() -> None:
    file, clock = io.StringIO(), Clock()
    watch = Watch(Console(file=file), clock)
    watch.size = "planning: 9 kinds"
    with watch:
        watch.ran()
        clock.now_s += EVERY_S
        watch.ran()
    assert file.getvalue().splitlines() == ["planning: 9 kinds", "planning: 2 runs"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--search", "vidur", "--objective", "power"), "--objective"),
        (("--search", "aladdin", "--slo", "ttft=1"), "aladdin needs tpot"),
    ],
)
def test_a_plan_that_is_refused_leaves_no_checkpoint(
    tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    trace, kept = tmp_path / "trace.csv", tmp_path / "new" / "points.jsonl"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n" + "300,12\n" * ROWS)
    result = run(trace, *options, "--devices", "a100", "--rate", "4", "--checkpoint", str(kept))
    assert said in str(result.exception)
    if "--objective" in options:
        assert not kept.parent.exists()


def test_aladdin_s_search_says_its_size_before_anything_else(tmp_path: Path) -> None:
    trace, base = tmp_path / "trace.csv", tmp_path / "base.toml"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n" + "300,12\n" * ROWS)
    base.write_text(CONFIG)
    options = ("--config", str(base), "--devices", "a100", "--rate", "4", "--search", "aladdin")
    said = run(trace, *options).stderr.splitlines()
    assert len(said) == 1
    assert "kinds of instances, 120 requests" in said[0]
