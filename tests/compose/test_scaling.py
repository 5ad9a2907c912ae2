"""Scripts and `lamella scale` against the real stack; before the tests that end it."""

import sys
from pathlib import Path

import pytest

from tests.compose.conftest import Stack

pytestmark = pytest.mark.timeout(2400)


def scale(stack: Stack, *arguments: str) -> str:
    return stack.run(sys.executable, "-m", "services.cli", "scale", *arguments, "--target", "compose").strip()


def test_a_second_decode_container_comes_and_goes(stack: Stack) -> None:
    [first] = stack.containers("decode")
    assert scale(stack, "decode=+1") == "decode: 1 → 2 (lamella-test-decode-2 ready)"
    assert len(stack.containers("decode")) == 2
    assert scale(stack, "decode=1") == "decode: 2 → 1 (lamella-test-decode-2 drained)"
    assert stack.containers("decode") == [first], "who stays was not started anew"


@pytest.mark.parametrize("role", ["scheduler", "prefill", "mixed"])
def test_a_script_finds_its_service(stack: Stack, role: str, tmp_path: Path) -> None:
    lamella = tmp_path / "lamella"
    lamella.write_text(f'#!/bin/sh\nexec {sys.executable} -m services.cli "$@"\n')
    lamella.chmod(0o755)
    before = len(stack.containers(role))
    script = f"LAMELLA={lamella} deploy/scale/{role}.sh"
    for count, expected in (("+1", before + 1), (str(before), before)):
        stack.run("sh", "-c", f"{script} {count} --target compose")
        assert len(stack.containers(role)) == expected
