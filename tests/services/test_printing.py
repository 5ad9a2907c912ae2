"""How wide commands print."""

import os
import pty
import subprocess
import sys

import pytest

from services.printing import FILE_WIDTH, output_console

SHOW = "from services.printing import output_console; print(output_console().width)"


@pytest.mark.parametrize(("columns", "width"), [(None, FILE_WIDTH), ("", FILE_WIDTH), ("100", 100)])
def test_a_file_is_wide_unless_columns_says_otherwise(
    columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert output_console().width == width


def test_a_terminal_is_as_wide_as_it_is() -> None:
    controller, terminal = pty.openpty()
    try:
        os.set_blocking(controller, False)
        subprocess.run(["stty", "cols", "123"], stdin=terminal, check=True)
        environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        command = [sys.executable, "-c", SHOW]
        subprocess.run(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, check=True)
        shown = os.read(controller, 4096)
    finally:
        os.close(controller)
        os.close(terminal)
    assert shown.split() == [b"123"]
