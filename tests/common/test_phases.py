"""Which phases a mesh lacks, and that its user is told."""

import pytest

from common.messages import Phase, Role
from common.phases import lost_phases, missing_phases
from services.commands.mesh import warn_missing
from services.launcher.control import InstanceStatus, MeshStatus


@pytest.mark.parametrize(
    ("roles", "missing"),
    [
        ([], ["prefill", "decode"]),
        (["prefill", "prefill"], ["decode"]),
        (["decode"], ["prefill"]),
        (["mixed"], []),
        (["prefill", "decode"], []),
    ],
)
def test_a_phase_is_missing_where_no_instance_does_it(roles: list[Role], missing: list[Phase]) -> None:
    assert missing_phases(roles) == missing


def test_what_was_missing_before_is_not_lost() -> None:
    assert lost_phases(["prefill"], ["prefill"]) == []
    assert lost_phases(["prefill"], []) == ["prefill"]
    assert lost_phases(["mixed"], ["decode"]) == ["prefill"]


def test_who_looks_at_a_mesh_that_serves_nothing_is_told_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`lamella up --prefill 0` said that it was ready, and every request was answered with 503."""
    instances = [InstanceStatus("decode-0", "decode", "ready")]
    warn_missing(MeshStatus("ready", "http://127.0.0.1:1", instances, []))
    said = capsys.readouterr().err
    assert "no instance does prefill: requests wait, and get a 503, until one does" in said
    assert "`lamella scale prefill=1`" in said
    warn_missing(MeshStatus("ready", None, [*instances, InstanceStatus("mixed-0", "mixed", "ready")], []))
    assert capsys.readouterr().err == ""


def test_who_looks_at_a_mesh_whose_only_instance_hangs_is_told_which(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A decode instance that was stopped left a status of "ready" and nothing else."""
    instances = [
        InstanceStatus("decode-0", "decode", "unregistered"),
        InstanceStatus("prefill-0", "prefill", "ready"),
    ]
    warn_missing(MeshStatus("ready", "http://127.0.0.1:1", instances, []))
    said = capsys.readouterr().err
    assert said.startswith("no instance that does decode is ready: decode-0 is unregistered; ")
    assert "prefill" not in said
    warn_missing(MeshStatus("starting", None, instances, []))
    assert not capsys.readouterr().err
