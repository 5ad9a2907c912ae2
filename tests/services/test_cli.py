"""The command line as a whole; each command has tests of its own."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from rich.text import Text

from common.release import installed_version
from services import cli
from services.cli import app


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "services.cli", *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_says_which_version_it_is() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"lamella {installed_version()}\n"), done.stderr


def test_without_a_command_it_says_which_there_are() -> None:
    done = run()
    assert all(word in done.stdout for word in ("large language models", "--version", "status"))


def helps(command: Any, path: str = "lamella") -> Iterator[tuple[str, str]]:
    """Every help text, by the command and the option that it is of."""
    said = {path: command.help, **{f"{path} {p.name}": getattr(p, "help", None) for p in command.params}}
    yield from ((name, text) for name, text in said.items() if text)
    for name, each in getattr(command, "commands", {}).items():
        yield from helps(each, f"{path} {name}")


def test_help_texts_have_no_brackets_that_would_be_taken_for_styles() -> None:
    texts = dict(helps(typer.main.get_command(app)))
    assert len(texts) > 100
    for name, text in texts.items():
        assert Text.from_markup(text).plain == text.replace("\\[", "["), name


@pytest.mark.parametrize(("command", "measures"), [("profile", True), ("compare", True), ("bench", False)])
def test_what_measures_passes_allocates_as_instances_do(
    monkeypatch: pytest.MonkeyPatch, command: str, measures: bool
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(cli, "begin_as_instances", lambda: begun.append("anew"))
    monkeypatch.setattr(cli, "app", lambda: begun.append(command))
    monkeypatch.setattr(sys, "argv", ["lamella", command])
    cli.main()
    assert begun == (["anew", command] if measures else [command])


@pytest.mark.parametrize("command", ["plan", "analyze"])
def test_help_shows_the_tables_that_a_file_is_to_have(command: str) -> None:
    assert "[[device]]" in run(command, "--help").stdout
