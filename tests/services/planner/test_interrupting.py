"""Ctrl-C and SIGTERM amid a plan, and the plan after them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WAIT_S = 120.0
PROCESSES = 2
WORKERS = min(PROCESSES, len(os.sched_getaffinity(0)))
"""It is held to one a core, and with one process it simulates in this one, and has no children."""
CONFIG = """
[space]
tensors = [1, 2]
pipelines = [1]
batches = [64]
policies = [["chunked", 512]]
chunks = [["chunks", 512]]
"""


def start(folder: Path) -> "subprocess.Popen[str]":
    command = [
        *(sys.executable, "-m", "services.cli", "plan", "--model", "opt-13b", "--slo", "ttft=1,tpot=0.05"),
        *("--trace", str(folder / "trace.csv"), "--config", str(folder / "base.toml"), "--devices", "a100"),
        *("--rate", "6", "--processes", str(PROCESSES), "--checkpoint", str(folder / "points.jsonl")),
    ]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def started(folder: Path) -> "subprocess.Popen[str]":
    """Amid its runs: some points are kept."""
    rows = [f"{200 + 37 * number % 400},{8 + 11 * number % 24}" for number in range(900)]
    (folder / "trace.csv").write_text("num_prefill_tokens,num_decode_tokens\n" + "\n".join(rows) + "\n")
    (folder / "base.toml").write_text(CONFIG)
    points = folder / "points.jsonl"
    process = start(folder)
    deadline_s = time.monotonic() + WAIT_S
    while not (points.exists() and points.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return process


def children_of(process: "subprocess.Popen[str]") -> list[int]:
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(each) for each in listed]


def wait_ended(pids: list[int]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Not one that has ended and whom nobody has asked about: some containers' first process never does."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(WORKERS < 2, reason="one core: a plan has no workers that could be left")
def test_a_plan_that_is_killed_leaves_nobody_behind(tmp_path: Path) -> None:
    process = started(tmp_path)
    children = children_of(process)
    assert len(children) >= WORKERS
    process.kill()
    process.communicate(timeout=WAIT_S)
    wait_ended(children)


@pytest.mark.parametrize("is_group_told", [False, True])
def test_a_plan_that_is_terminated_ends_its_workers_and_keeps_its_points(
    tmp_path: Path, is_group_told: bool
) -> None:
    process = started(tmp_path)
    children = children_of(process)
    assert len(children) >= (WORKERS if WORKERS > 1 else 0)
    if is_group_told:
        os.killpg(process.pid, signal.SIGTERM)
    else:
        process.terminate()
    out, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "terminated" in said
    assert "kept in" in said
    for word in ("Traceback", "leaked", "resource_tracker"):
        assert word not in said + out
    wait_ended(children)
    kept = (tmp_path / "points.jsonl").read_bytes()
    assert kept.endswith(b"\n")
    assert kept.count(b"\n") >= 2


def test_what_was_interrupted_goes_on_where_it_was(tmp_path: Path) -> None:
    points = tmp_path / "points.jsonl"
    first = started(tmp_path)
    # As a terminal does: the whole group is told.
    os.killpg(first.pid, signal.SIGINT)
    _, said = first.communicate(timeout=WAIT_S)
    assert first.returncode == 128 + signal.SIGINT, said
    assert "interrupted" in said
    assert "kept in" in said
    assert "Traceback" not in said
    kept = points.read_bytes()
    assert kept.endswith(b"\n")
    second = start(tmp_path)
    out, said = second.communicate(timeout=WAIT_S)
    assert second.returncode == 0, said
    assert "disaggregation" in out
    assert points.read_bytes().startswith(kept)
    keys = [line.split(b'"')[3] for line in points.read_bytes().splitlines()]
    assert len(keys) == len(set(keys))
