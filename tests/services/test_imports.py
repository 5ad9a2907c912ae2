"""What a process does not need it does not load: every command and every mesh waits for its imports."""

import subprocess
import sys

import pytest

WIRES = {"redis", "nats", "aiohttp", "fastapi", "torch"}


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("services.cli, services.launcher.local", WIRES),
        ("services.launcher.supervise", WIRES - {"redis"}),
        ("services.hosts.instance_host", {"torch"}),
    ],
    ids=["commands", "supervisor", "instance that emulates its engine"],
)
def test_what_a_process_does_not_need_it_does_not_load(modules: str, unwanted: set[str]) -> None:
    question = f"import sys, {modules}; print(*{unwanted} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == []
