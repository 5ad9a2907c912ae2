"""CI runs the tests of the composed mesh where it can, and says where it does not.

Programs of a few lines stand for `docker` and `make`: what is asked is which of them are called.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("bash", "dirname", "env", "sed", "sh", "timeout")
BASE = re.search(r"^ARG BASE=(.*)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
SKIPPED = "ci: THE COMPOSE TESTS ARE SKIPPED: "


def run_compose_stage(directory: Path, *failing: str, has_docker: bool = True, **variables: str) -> str:
    """What it says. ``failing``: how calls of docker begin that fail. Calls are in ``directory/calls``."""
    programs = directory / "bin"
    programs.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None, name
        (programs / name).symlink_to(found)
    refusal = 'case "$*" in "{0}"*) echo first; echo "{0}: no" >&2; exit 1;; esac\n'
    fails = "".join(refusal.format(each) for each in failing)
    calls = directory / "calls"
    calls.touch()
    for name in ("docker", "make") if has_docker else ("make",):
        program = programs / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {calls}\n{fails if name == "docker" else ""}')
        program.chmod(0o700)
    others = {name: value for name, value in os.environ.items() if not name.startswith("LAMELLA_COMPOSE")}
    done = subprocess.run(
        [ROOT / ".ci" / "compose"],
        env={**others, **variables, "PATH": str(programs)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "")
    return done.stderr


def calls_in(directory: Path) -> list[str]:
    return (directory / "calls").read_text().splitlines()


def test_the_stage_comes_before_the_tests_whose_closing_lines_are_the_last_words() -> None:
    stages = (ROOT / ".ci" / "run").read_text().splitlines()[-4:]
    assert stages == ["make setup", "make lint", ".ci/compose", "make test"]


@pytest.mark.parametrize("missing", [(), ("image inspect",)])
def test_where_an_engine_and_the_base_image_are_the_composed_mesh_is_tested(
    tmp_path: Path, missing: tuple[str, ...]
) -> None:
    assert run_compose_stage(tmp_path, *missing) == ""
    assert BASE is not None
    pulled = [f"docker pull {BASE[1]}"] if missing else []
    asked = ["docker info", "docker compose version", f"docker image inspect {BASE[1]}", *pulled]
    assert calls_in(tmp_path) == [*asked, "make test-compose"]


def test_an_engine_elsewhere_is_its_wrapper_s_affair(tmp_path: Path) -> None:
    assert run_compose_stage(tmp_path, has_docker=False, LAMELLA_COMPOSE_WRAPPER="lab.sh") == ""
    assert calls_in(tmp_path) == ["make test-compose"]


@pytest.mark.parametrize(
    ("failing", "reason"),
    [
        (("info",), "no container engine answers: info: no"),
        (("compose",), "docker has no compose: compose: no"),
        (("image inspect", "pull"), "is not here and cannot be pulled: pull: no"),
    ],
)
def test_what_is_missing_is_said_where_it_is_skipped(
    tmp_path: Path, failing: tuple[str, ...], reason: str
) -> None:
    said = run_compose_stage(tmp_path, *failing)
    assert said.startswith(SKIPPED)
    assert said.rstrip().endswith(reason)
    assert "make test-compose" not in calls_in(tmp_path)


def test_where_there_is_no_docker_that_is_said(tmp_path: Path) -> None:
    assert "no container engine answers" in run_compose_stage(tmp_path, has_docker=False)
    assert calls_in(tmp_path) == []
