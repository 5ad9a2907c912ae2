"""The page of settings says what is so."""

import re
import tomllib
from pathlib import Path

import pytest

from common.config import Config
from common.config_file import ENVIRONMENT, config_from_tree
from common.config_rules import FINITE, rules_of
from services.commands.settings import as_markdown

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"
SECTION = re.compile(r"^## \[(\w+)\]$")
ROW = re.compile(r"^\| `(?P<key>\w+)` \| `?(?P<default>.*?)`? \| (?P<unit>[^|]+) \| (?P<rule>[^|]*) \| ")
SECTIONS = [name for name in Config.__struct_fields__ if name != "service_classes"]


def rows_of(page: str) -> dict[str, re.Match[str]]:
    """By section and key."""
    found, section = {}, ""
    for line in page.splitlines():
        if title := SECTION.match(line):
            section = title[1]
        elif row := ROW.match(line):
            found[f"{section}.{row['key']}"] = row
    return found


def test_the_page_is_what_the_code_says_now() -> None:
    assert PAGE.read_text() == as_markdown(), "`make docs` writes it anew"


def test_its_defaults_are_a_file_that_changes_nothing() -> None:
    lines: dict[str, list[str]] = {name: [f"[{name}]"] for name in SECTIONS}
    for name, row in rows_of(as_markdown()).items():
        if row["default"] != "not set":
            lines[name.partition(".")[0]].append(f"{row['key']} = {row['default']}")
    tree = tomllib.loads("\n".join(line for section in lines.values() for line in section))
    assert sum(map(len, tree.values())) > 100
    assert config_from_tree(tree) == Config()


def test_it_has_every_key_rule_and_variable() -> None:
    rows = rows_of(as_markdown())
    keys = {f"{name}.{key}" for name in SECTIONS for key in getattr(Config(), name).__struct_fields__}
    assert rows.keys() == keys
    for rule in rules_of(Config()):
        if rule.text != FINITE and not rule.key.startswith("service_classes"):
            assert rule.text.removeprefix("must be ") in rows[rule.key]["rule"]
    for variable, (section, key) in ENVIRONMENT.items():
        assert f"`{variable}`" in rows[f"{section}.{key}"].string


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_says_what_each_of_its_keys_means(name: str) -> None:
    section = type(getattr(Config(), name))
    unexplained = [key for key in section.__struct_fields__ if f"``{key}``" not in (section.__doc__ or "")]
    assert unexplained == []
