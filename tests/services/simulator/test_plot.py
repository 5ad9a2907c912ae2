"""Simulated runs as a picture."""

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.latency import ServiceObjectives
from services.simulator.output_files import check_plot
from services.simulator.plot import waiting_over_time, write_plot
from services.simulator.request_files import request_table
from tests.services.simulator.meshes import mesh, pool, run


def test_who_waits_is_counted_from_arrival_to_first_token_or_refusal() -> None:
    """Two come at once, of one chunk each; the third one fits nowhere."""
    simulated = mesh(pool("mixed", kv_tokens=160), instance={"chunk_tokens": 64})
    cluster = run(simulated, (1.0, 64, 1), (1.0, 64, 1), (2.0, 800, 10))
    times_s, waiting = waiting_over_time(cluster.records)
    first_s = sorted(cluster.records.first_token_s[:2])
    assert list(times_s[:4]) == [1.0, 1.0, *first_s]
    assert list(waiting) == [1, 2, 1, 0, 1, 0]


def test_every_run_has_its_curves(tmp_path: Path) -> None:
    clusters = {
        name: run(mesh(pool("prefill"), pool("decode", count)), (0.0, 300, 20), (0.1, 90, 7))
        for name, count in (("one decode room", 1), ("two decode rooms", 2))
    }
    path = tmp_path / "runs.svg"
    tables = {name: request_table(name, cluster) for name, cluster in clusters.items()}
    records = {name: cluster.records for name, cluster in clusters.items()}
    write_plot(path, tables, records, ServiceObjectives(ttft_s=0.03, tpot_s=0.1))
    drawn = path.read_text()
    for text in ("TTFT", "TPOT", "Requests without a first token", "SLO 30 ms", *clusters):
        assert f"<!-- {text}" in drawn


def test_a_picture_that_cannot_be_drawn_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must end in"):
        check_plot(tmp_path / "runs.xlsx")
    with pytest.raises(ConfigError, match="cannot be written"):
        check_plot(tmp_path / "nowhere" / "runs.png")
