"""The command line as a whole; each command has tests of its own."""

import subprocess
import sys

from common.release import installed_version


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "services.cli", *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_says_which_version_it_is() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"lamella {installed_version()}\n"), done.stderr


def test_without_a_command_it_says_which_there_are() -> None:
    done = run()
    assert all(word in done.stdout for word in ("large language models", "--version", "status"))
