"""What changed in a simulated mesh is kept in order, told, and on its timeline; so is why requests failed."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from common.errors import HandoverFailed, InstanceLost
from common.ids import InstanceId
from gateway.continuing import broken_text
from services.simulator.history import MeshChange
from services.simulator.metrics import Metrics, measure
from services.simulator.request_files import request_table
from services.simulator.run import Load, simulate
from services.simulator.tables import (
    SHOWN_CHANGES,
    Run,
    change_table,
    comparison_table,
    comparison_tables,
    summary_of,
)
from services.simulator.timeline import SimulatedTimeline
from services.simulator.timeline_file import write_timeline
from tests.services.simulator.meshes import TOKEN_BYTES, mesh, offered, pool, run
from tests.services.simulator.test_attention import remote

STEADY = [(0.1 * number, 300, 80) for number in range(100)]


def changes_of(**sections: Any) -> list[tuple[float, str, str]]:
    pools = sections.pop("pools", (pool("prefill"), pool("decode", 2)))
    cluster = run(mesh(*pools, **sections), *STEADY)
    told = measure(cluster).changes
    assert [each.at_s for each in told] == sorted(each.at_s for each in told)
    assert all(
        each.detail == cluster.instances[InstanceId(each.instance)].role
        for each in told
        if each.kind == "return"
    )
    return [(each.at_s, each.kind, each.instance) for each in told]


def test_each_fault_is_told_when_it_comes_and_when_it_is_over() -> None:
    faults = [
        {"kind": "death", "instance": "decode-0", "at_s": 1.0, "lasts_s": 2.0},
        {"kind": "straggler", "instance": "decode-1", "at_s": 2.0, "lasts_s": 3.0, "times": 2.0},
        {"kind": "slow_link", "pool": "prefill", "at_s": 3.5, "lasts_s": 0.5, "share": 0.5},
        {"kind": "silence", "instance": "decode-0", "at_s": 6.0, "lasts_s": 0.5},
        {"kind": "death", "instance": "decode-1", "at_s": 7.0},
    ]
    assert changes_of(fault=faults) == [
        (1.0, "death", "decode-0"),
        (2.0, "straggler", "decode-1"),
        (3.0, "return", "decode-0"),
        (3.5, "slow_link", "prefill-0"),
        (4.0, "slow_link_over", "prefill-0"),
        (5.0, "straggler_over", "decode-1"),
        (6.0, "silence", "decode-0"),
        (6.5, "silence_over", "decode-0"),
        (7.0, "death", "decode-1"),
    ]


def test_faults_that_befall_nobody_are_told_of() -> None:
    """Of who has not come yet, of who has ended, and after all is over."""
    pools = (pool("prefill"), pool("decode", 2, start_s=3.0))
    steps = [{"at_s": 1.0, "pool": "decode", "count": 3}]
    faults = [
        {"kind": "death", "instance": "decode-2", "at_s": 2.0},
        {"kind": "death", "instance": "decode-0", "at_s": 5.0, "of_host": True},
        {"kind": "straggler", "instance": "decode-0", "at_s": 6.0, "times": 2.0},
        {"kind": "silence", "pool": "decode", "at_s": 1e6},
        {"kind": "death", "instance": "decode-77", "mean_between_s": 0.1},
    ]
    metrics = measure(run(mesh(*pools, scale=steps, fault=faults), *STEADY))
    assert metrics.idle_faults == (0, 2, 3, 4)
    [death] = [each for each in metrics.changes if each.kind == "death"]
    assert (death.instance, death.detail) == ("decode-0", "for good, with its host")
    [line] = [each for each in summary_of(metrics) if each.startswith("befell nobody")]
    assert line.endswith("fault.0, fault.2, fault.3, fault.4")


def test_who_is_started_is_told_of_when_ready_and_who_drains_at_the_end() -> None:
    pools = (pool("prefill"), pool("decode", start_s=3.0))
    steps = [{"at_s": 1.0, "pool": "decode", "count": 2}, {"at_s": 6.0, "pool": "decode", "count": 1}]
    *settled, (end_s, *ended) = changes_of(pools=pools, scale=steps)
    assert settled == [(1.0, "start", "decode-1"), (4.0, "ready", "decode-1"), (6.0, "leave", "decode-1")]
    assert ended == ["end", "decode-1"]
    assert 6.0 < end_s < 6.0 + 80 * 0.03, "once its sequences have ended"


def test_who_is_dismissed_while_it_starts_is_never_told_to_be_ready() -> None:
    pools = (pool("prefill"), pool("decode", start_s=3.0))
    steps = [{"at_s": 1.0, "pool": "decode", "count": 2}, {"at_s": 2.0, "pool": "decode", "count": 1}]
    assert changes_of(pools=pools, scale=steps) == [
        (1.0, "start", "decode-1"),
        (2.0, "leave", "decode-1"),
        (2.0, "end", "decode-1"),
    ]


def test_who_has_another_role_is_told_with_the_policys_reason() -> None:
    roles = {"policy": "overflow", "overflow_queue_s": 0.05, "cool_down_s": 0.2, "settle_s": 0.5}
    simulated = mesh(pool("prefill"), pool("decode", 2), roles=roles)
    cluster = run(simulated, *((0.01 * number, 900, 5) for number in range(200)))
    flipped = [each for each in measure(cluster).changes if each.kind == "role"]
    assert flipped
    assert flipped[0].instance.startswith("decode-")
    role, _, reason = flipped[0].detail.partition(": ")
    assert role in ("mixed", "prefill")
    assert reason.endswith("s of prompts waiting, roles.overflow_queue_s = 0.05")


def test_an_attention_workers_death_is_told() -> None:
    fault = {"kind": "death", "instance": "attention-0", "at_s": 2.0, "lasts_s": 1.0}
    attended = measure(simulate(remote(fault=[fault]), Load(offered(*STEADY[:20]))))
    assert [(each.at_s, each.kind, each.instance) for each in attended.changes] == [
        (2.0, "death", "attention-0"),
        (3.0, "return", "attention-0"),
    ]


def test_a_run_tells_the_first_changes_and_how_many_there_were() -> None:
    changes = tuple(MeshChange(float(number), "death", f"decode-{number}") for number in range(30))
    metrics = msgspec.structs.replace(calm(), changes=changes)
    assert len(change_table(changes).rows) == SHOWN_CHANGES
    [line] = [each for each in summary_of(metrics) if each.startswith("changes of the mesh: ")]
    shown = f"shown are {SHOWN_CHANGES}, those seldom or for good first, --json has all"
    assert line == f"changes of the mesh: death 30; {shown}"
    assert not [each for each in summary_of(calm()) if "changes of the mesh" in each]


def test_what_happened_seldom_is_shown_whatever_happened_often() -> None:
    often = [MeshChange(float(number), "silence", f"decode-{number}") for number in range(30)]
    deaths = [MeshChange(number + 0.2, "death", f"decode-{number}") for number in range(20)]
    last = MeshChange(28.5, "death", "decode-9", "for good, with its host")
    roles = [MeshChange(at_s, "role", "decode-1", "mixed: why") for at_s in (4.5, 29.5)]
    changes = sorted([*often, *roles, *deaths, last], key=lambda each: each.at_s)
    at, kinds = (list(column.cells) for column in change_table(changes).columns[:2])
    assert at == ["0.2", "1.2", "2.2", "3.2", "4.2", "4.5", "5.2", "6.2", "7.2", "8.2", "28.5", "29.5"]
    assert [kind for kind in kinds if kind == "role"] == ["role", "role"]


def test_changes_are_marks_of_those_to_whom_they_happened(tmp_path: Path) -> None:
    fault = {"kind": "death", "instance": "attention-0", "at_s": 2.0, "lasts_s": 1.0, "of_host": True}
    timeline, path = SimulatedTimeline(), tmp_path / "timeline.json"
    cluster = simulate(remote(fault=[fault]), Load(offered(*STEADY[:20])), timeline=timeline)
    write_timeline(path, cluster, timeline)
    events = json.loads(path.read_text())["traceEvents"]
    [process] = [
        each["pid"]
        for each in events
        if each["name"] == "process_name" and "attention-0" in each["args"]["name"]
    ]
    marks = [(each["name"], each["ts"], each["pid"], each["args"]) for each in events if each["ph"] == "i"]
    assert marks == [
        ("death", 2e6, process, {"detail": "with its host"}),
        ("return", 3e6, process, {}),
    ]


def test_why_requests_failed_is_told_and_in_their_rows() -> None:
    """A transfer that never ends in time is tried as often as it may be."""
    cut = {"kind": "slow_link", "instance": "decode-0", "at_s": 1.0, "share": 0.0}
    simulated = mesh(
        pool("prefill"),
        pool("decode"),
        fault=[cut],
        cluster={"link_bytes_per_s": 300 * TOKEN_BYTES / 2.0},
        transfer={"layerwise_min_tokens": 10**6, "deadline_s": 8.0},
    )
    cluster = run(simulated, (0.0, 300, 5), (0.0, 300, 1))
    metrics = measure(cluster)
    [failure] = metrics.failures
    times = simulated.settings.gateway.max_continuations
    text = broken_text(times, HandoverFailed.code)
    assert (failure.code, failure.requests, failure.message) == (InstanceLost.code, 1, text)
    assert metrics.continued_by == {HandoverFailed.code: times}
    assert metrics.continued == times
    told = summary_of(metrics)
    assert f"1 failed by {InstanceLost.code}, the first: {text}" in told
    assert f"continued elsewhere, or anew: {times} by {HandoverFailed.code}" in told
    assert request_table("mesh", cluster).columns["error"] == [InstanceLost.code, None]


def test_runs_that_do_not_fit_side_by_side_are_tables_with_the_first_in_each() -> None:
    runs = [Run(f"number-{number}", calm()) for number in range(7)]
    [whole] = comparison_tables(runs, console_of(400))
    assert [each.header for each in whole.columns[1:]] == [each.name for each in runs]
    narrow = console_of(80)
    tables = list(comparison_tables(runs, narrow))
    assert len(tables) > 1
    shown = [[str(each.header) for each in table.columns[1:]] for table in tables]
    assert {each[0] for each in shown} == {"number-0"}
    assert [name for each in shown for name in each[1:]] == [each.name for each in runs[1:]]
    for table in tables:
        narrow.print(table)
    printed = narrow.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(printed) == sum(len(table.rows) + 1 for table in tables), "no cell is folded"


def test_what_is_counted_is_compared_as_a_count() -> None:
    table = comparison_table([Run("one", calm()), Run("other", calm())])
    row = list(table.columns[0].cells).index("requests done")
    assert [list(column.cells)[row] for column in table.columns[1:]] == ["3", "3 (1.00×)"]


def console_of(width: int) -> Console:
    return Console(file=StringIO(), width=width)


def calm() -> Metrics:
    return measure(run(mesh(pool("prefill"), pool("decode")), (0.0, 100, 10), (1.0, 100, 10), (2.0, 50, 3)))
