"""Ctrl-C amid a plan, and the plan after it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

WAIT_S = 120.0
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
        *("--rate", "6", "--processes", "2", "--checkpoint", str(folder / "points.jsonl")),
    ]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_what_was_interrupted_goes_on_where_it_was(tmp_path: Path) -> None:
    rows = [f"{200 + 37 * number % 400},{8 + 11 * number % 24}" for number in range(900)]
    (tmp_path / "trace.csv").write_text("num_prefill_tokens,num_decode_tokens\n" + "\n".join(rows) + "\n")
    (tmp_path / "base.toml").write_text(CONFIG)
    points = tmp_path / "points.jsonl"
    first = start(tmp_path)
    deadline_s = time.monotonic() + WAIT_S
    while not (points.exists() and points.read_bytes().count(b"\n") >= 2):
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    # As a terminal does: the whole group is told.
    os.killpg(first.pid, signal.SIGINT)
    _, said = first.communicate(timeout=WAIT_S)
    assert first.returncode == 1, said
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
