"""Every script of deploy/scale against a mesh of this machine: real processes, without a model."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from common.config import Config, InstanceConfig, MeshConfig, PredictorConfig
from common.scaling import ScaledRole
from services.launcher import local
from services.launcher.launch_plan import SCALED_ROLES, LaunchPlan

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "deploy" / "scale"
COMMAND = (sys.executable, "-m", "tests.common.small_service")
CONFIG = Config(
    mesh=MeshConfig(drain_timeout_s=5.0, lease_s=1.0, heartbeat_s=0.2),
    instance=InstanceConfig(attention_partition="requests"),
    predictor=PredictorConfig(kind="history"),
)
PLAN = LaunchPlan(port=0, decode=2, attention=1, command=COMMAND)
WAIT_S = 120.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The state directory of a mesh with every role."""
    directory = tmp_path_factory.mktemp("scripts") / "mesh"
    local.up_detached(directory, PLAN, CONFIG)
    yield directory
    local.down(directory)


@pytest.fixture
def lamella(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts find this checkout's own command, installed or not."""
    program = tmp_path / "lamella"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m services.cli "$@"\n')
    program.chmod(0o700)
    monkeypatch.setenv("LAMELLA", str(program))


def run(script: str, *arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """From a directory that is not the checkout's."""
    return subprocess.run(
        [SCRIPTS / f"{script}.sh", *arguments],
        cwd=directory.parent,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def names(directory: Path, role: ScaledRole) -> list[str]:
    """Of the processes that are ready."""
    processes = local.status(directory).processes
    return [each.id for each in processes if each.role == role and each.url is not None]


def test_there_is_a_script_for_every_role() -> None:
    scripts = {path.stem for path in SCRIPTS.glob("*.sh")}
    assert scripts == {*SCALED_ROLES, "scale"}
    project = msgspec.toml.decode((ROOT / "pyproject.toml").read_bytes())
    assert "scale/*.sh" in project["tool"]["setuptools"]["package-data"]["deploy"]


@pytest.mark.usefixtures("lamella")
@pytest.mark.parametrize("role", SCALED_ROLES)
def test_a_script_takes_a_count_or_a_change_and_returns_when_it_is_so(
    running: Path, role: ScaledRole
) -> None:
    before = names(running, role)
    grown = run(role, "2", "--state-dir", "mesh", directory=running)
    assert grown.returncode == 0, grown.stderr
    ready = names(running, role)
    assert len(ready) == 2
    added = ", ".join(name for name in ready if name not in before)
    said = f"{role}: {len(before)} → 2 ({added} ready)" if added else f"{role}: 2, as before"
    assert grown.stdout.strip() == said

    shrunk = run(role, "-1", "--target", "local", "--state-dir", "mesh", directory=running)
    assert shrunk.stdout.strip() == f"{role}: 2 → 1 ({ready[1]} drained)", shrunk.stderr
    assert names(running, role) == ready[:1]


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("decode", ("--help",), "usage: decode.sh N|+N|-N"),
        ("decode", ("2", "-h"), "usage: decode.sh N|+N|-N"),
        ("scale", ("--help",), "usage: scale.sh ROLE N|+N|-N"),
    ],
)
def test_a_script_that_is_asked_for_help_says_how_it_is_used(
    script: str, arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = run(script, *arguments, directory=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith(said)


@pytest.mark.usefixtures("lamella")
def test_a_script_that_fails_says_why(running: Path, tmp_path: Path) -> None:
    for arguments, status, said in (
        ((), 2, "usage: decode.sh N|+N|-N"),
        (("two", "--state-dir", "mesh"), 1, "must be ROLE=N, =+N or =-N"),
        (("-9", "--state-dir", "mesh"), 1, "must be 0..64 instances"),
        (("+1", "--target", "local", "--state-dir", str(tmp_path / "none")), 1, "no mesh runs in"),
    ):
        done = run("decode", *arguments, directory=running)
        assert done.returncode == status
        assert said in done.stderr
