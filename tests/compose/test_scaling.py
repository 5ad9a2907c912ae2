"""Scripts, `lamella drain` and `autoscale` against the real stack; before the tests that end it."""

import sys
from pathlib import Path

import pytest

from common.scaling import ScaledRole
from services.launcher.launch_plan import SCALED_ROLES
from tests.compose.questions import wait_said
from tests.compose.stack import COMMAND_TIMEOUT_S, Stack

pytestmark = pytest.mark.timeout(2400)

LAMELLA = (sys.executable, "-m", "services.cli")
WISH = Path(__file__).with_name("wish.py").read_text()
VARIABLES = {
    "gateway": "LAMELLA_PUBLISH=127.0.0.1:18000-18003 LAMELLA_PUBLISH_PRIVATE=127.0.0.1:18010-18013",
    "predictor": "LAMELLA_PREDICTOR=history",
}
"""What a second gateway's ports and a predictor at all have to be told."""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts find this checkout's own command, installed or not."""
    lamella = tmp_path / "lamella"
    lamella.write_text(f'#!/bin/sh\nexec {sys.executable} -m services.cli "$@"\n')
    lamella.chmod(0o755)
    monkeypatch.setenv("LAMELLA", str(lamella))


def scale(stack: Stack, role: str, count: str) -> str:
    script = f"{VARIABLES.get(role, '')} deploy/scale/{role}.sh {count} --target compose"
    return stack.run("sh", "-c", script).strip()


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("role", [each for each in SCALED_ROLES if each != "decode"])
def test_a_script_changes_its_service_and_nothing_else(stack: Stack, role: ScaledRole) -> None:
    before = stack.containers(role)
    for count, expected in (("+1", len(before) + 1), (str(len(before)), len(before))):
        scale(stack, role, count)
        assert len(stack.containers(role)) == expected
    assert stack.containers(role) == before, "who stays was not started anew"


@pytest.mark.usefixtures("scripts")
def test_a_container_that_is_drained_by_its_service_s_name_does_not_come_back(stack: Stack) -> None:
    assert scale(stack, "decode", "+1") == "decode: 1 → 2 (lamella-test-decode-2 ready)"
    first, second = stack.containers("decode")
    name = f"decode-{second[:12]}"
    assert stack.run(*LAMELLA, "drain", name, "--target", "compose").strip() == f"{name} has drained"
    assert stack.containers("decode") == [first]


def test_an_autoscaler_takes_up_wishes_and_says_what_it_did(stack: Stack) -> None:
    """By a relay in the scheduler's container: neither the command line nor the test has a way to NATS."""
    with stack.begin(*LAMELLA, "autoscale", "--target", "compose") as autoscaler:
        try:
            wait_said(autoscaler, "following: ")
            (gateway,) = stack.containers("gateway")
            for count, said in (
                (2, "prefill: 1 → 2 (lamella-test-prefill-2 ready)"),
                (1, "prefill: 2 → 1 ("),
            ):
                stack.run("docker", "exec", gateway, "python", "-c", WISH, "prefill", str(count))
                wait_said(autoscaler, said)
                assert len(stack.containers("prefill")) == count
            # Ctrl-C is ignored where a shell started the tests in the background.
            autoscaler.terminate()
            assert autoscaler.wait(COMMAND_TIMEOUT_S) == 0
        finally:
            autoscaler.kill()
