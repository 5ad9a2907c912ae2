"""What `docker compose exec` and `kubectl exec` are for: a command of the mesh's own, run where that is."""

import os
import sys


def run_inside(command: list[str], settings: str) -> None:
    """Becomes it, with the settings of the test's mesh (RELAY_SETTINGS) instead of those that it names. Where
    there are none, no container runs."""
    own_settings = os.environ.get("RELAY_SETTINGS")
    if own_settings is None:
        sys.exit("no container of the service is running")
    assert command[0] == "lamella"
    assert command[-2:] == ["--config", settings]
    program = [sys.executable, "-m", "services.cli", *command[1:-1], own_settings]
    os.execv(program[0], program)
