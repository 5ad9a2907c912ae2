"""What `lamella scale` and `lamella drain` say, wherever the mesh runs."""

from pathlib import Path

import pytest

from common.errors import LauncherError
from services.commands.scale import drain, scale
from tests.services.connectors.programs import pretend_docker, pretend_kubectl

FORCE = r"no instance would be left that does prefill: .*; --force ends the last$"


def test_the_option_that_ends_the_last_is_named_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_docker(tmp_path, monkeypatch)
    with pytest.raises(LauncherError, match=FORCE):
        scale(["prefill=0"], target="compose")
    with pytest.raises(LauncherError, match=FORCE):
        drain("lamella-prefill-1", target="compose")


def test_what_runs_at_a_target_is_shown_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though no mesh runs on this machine."""
    pretend_docker(tmp_path, monkeypatch)
    scale(show=True, target="compose", state_dir=tmp_path / "none")
    compose = capsys.readouterr()
    assert compose.out.splitlines() == ["gateway: 1", "prefill: 1", "decode: 2"]
    assert "lamella autoscale --dry-run" in compose.err
    scale(show=True, state_dir=tmp_path / "none")
    assert capsys.readouterr().out == compose.out

    cluster = tmp_path / "cluster"
    cluster.mkdir()
    pretend_kubectl(cluster, monkeypatch)
    scale(show=True, target="kubernetes", state_dir=tmp_path / "none")
    assert capsys.readouterr().out.splitlines() == [
        "gateway: 1",
        "scheduler: 1, 0 of them ready",
        "prefill: 1",
        "decode: 2",
    ]
