"""The documents lead nobody astray: files, commands, options that they name exist, settings are settings."""

import re
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperGroup

from common.config_file import load_config
from services.cli import app
from tests.documents import ALL_DOCUMENTS, DOCUMENTS, LANGUAGES, ROOT, blocks_of, code_in

LAMELLA = typer.main.get_command(app)


@pytest.mark.parametrize("document", ALL_DOCUMENTS)
def test_every_link_leads_to_a_file(document: str) -> None:
    directory = (ROOT / document).parent
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / document).read_text()):
        assert target.startswith("https://") or (directory / target).exists(), target


def test_readme_leads_to_every_document() -> None:
    linked = set(re.findall(r"\((docs/[\w-]+\.md)\)", (ROOT / "README.md").read_text()))
    assert linked == set(ALL_DOCUMENTS) - {"README.md"}


@pytest.mark.parametrize("document", ALL_DOCUMENTS)
def test_every_command_and_option_exists(document: str) -> None:
    for code in code_in(document):
        for words in re.findall(r"(?:^|/)lamella ([a-z]+(?: [^|;&#]*)?)", code):
            check_command(words.split())


def check_command(words: list[str]) -> None:
    """Fails for a command that is none, or an option that it does not have."""
    command = LAMELLA
    while isinstance(command, TyperGroup) and words:
        assert words[0] in command.commands, f"lamella {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    options = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
    used = {option for word in words for option in re.findall(r"^\[?(--[a-z-]+)", word)}
    assert used <= options, f"lamella {command.name} {used - options}"


@pytest.mark.parametrize("document", ALL_DOCUMENTS)
def test_settings_are_settings(document: str, tmp_path: Path) -> None:
    for block in blocks_of(document):
        assert block.language in LANGUAGES, block.place
        if block.language == "toml":
            file = tmp_path / "settings.toml"
            file.write_text(block.text)
            load_config(file, {})


def test_every_command_runs_or_says_what_it_needs() -> None:
    """Those of the other documents are not run by tests/e2e/test_documents.py."""
    for document in set(ALL_DOCUMENTS) - set(DOCUMENTS):
        for block in blocks_of(document):
            assert block.language in ("toml", "text") or block.needs, block.place
