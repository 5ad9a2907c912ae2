"""`lamella settings`: every setting there is, as docs/configuration.md has it.

Made from what reads and checks them: the sections of ``common.config`` with their docstrings and defaults,
the rules of ``common.config_rules``, the variables of ``common.config_file``. So it is true of the version
that prints it, and ``make docs`` writes it down.
"""

import inspect
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from common.config import Config
from common.config_file import ENVIRONMENT, choices_of
from common.config_rules import FINITE, rules_of
from common.secret_files import SECRET_VARIABLES

WIDTH = 118
INTRODUCTION = """\
# Settings

Made by `make docs` from the code that reads them. `lamella settings` prints those of the version that is
installed.

A setting comes, the first that there is, from the command line (`lamella up --help`), the environment, the
TOML file that `--config` names, or its default. A key that is unknown, a value of another type than its
default's, or one that breaks a rule ends the start with a line that names key, value and rule. Numbers are
finite. None says that a setting is not set: in the file it is left out.

Each section is a table of the file, with what its keys mean and the modules, as `scheduler.policy.dispatch`,
that say more. Numbers in parentheses are sections of papers.
"""
UNITS = {
    "_bytes_per_s": "bytes/s",
    "_tokens_per_s": "tokens/s",
    "_s": "s",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_characters": "characters",
    "_share": "share of 1",
    "_margin": "share of 1",
    "utilisation": "share of 1",
    "block_size": "tokens",
    "context_length": "tokens",
}
"""By how a key ends, the first that fits."""
KINDS = {int: "number", float: "number", str: "text", Path: "path", bool: "true or false", tuple: "texts"}


def settings() -> None:
    """Print every setting with its default and its rules, as Markdown."""
    print(as_markdown(), end="")


def as_markdown() -> str:
    rules = _rules_by_key()
    sections = [_section(name, rules) for name in Config.__struct_fields__]
    return "\n".join((INTRODUCTION, *sections))


def _section(name: str, rules: dict[str, list[str]]) -> str:
    values = getattr(Config(), name)
    if isinstance(values, dict):
        return _named_tables(name, values, rules[name])
    rows = [_row(name, key, getattr(values, key), rules) for key in values.__struct_fields__]
    header = ("| key | default | in | rule | variable |", "| --- | --- | --- | --- | --- |")
    return "\n".join((f"## [{name}]\n", *_text_of(type(values)), *header, *rows, ""))


def _named_tables(name: str, tables: dict[str, msgspec.Struct], rules: Iterable[str]) -> str:
    """Of classes of service: what each sets, as its keys are those of ``[objectives]``."""
    lines = [f"## [{name}.NAME]\n"]
    lines += _wrapped(
        f"Tables by names of your own, with the keys and rules of `[objectives]`. Names {', '.join(rules)}."
        " A file with any replaces those that are there by default:"
    )
    for each, table in tables.items():
        fields = {key: getattr(table, key) for key in table.__struct_fields__}
        told = ", ".join(f"`{key} = {_as_toml(value)}`" for key, value in fields.items() if value is not None)
        lines.append(f"- `[{name}.{each}]`: {told}")
    return "\n".join((*lines, ""))


def _text_of(section: type) -> Iterator[str]:
    """Its docstring's paragraphs, with Markdown's marks of code instead of Python's."""
    for paragraph in inspect.cleandoc(section.__doc__ or "").split("\n\n"):
        yield from _wrapped(paragraph.replace("``", "`"))


def _wrapped(text: str) -> tuple[str, str]:
    return textwrap.fill(" ".join(text.split()), WIDTH, break_on_hyphens=False), ""


def _row(section: str, key: str, default: Any, rules: dict[str, list[str]]) -> str:
    name = f"{section}.{key}"
    words = choices_of(name)
    told = [f"one of {', '.join(f'`{_as_toml(word)}`' for word in words)}"] if words else []
    told += [rule.removeprefix("must be ") for rule in rules.get(name, ())]
    variables = ", ".join(f"`{each}`" for each in _variables_of(section, key))
    shown = "not set" if default is None else f"`{_as_toml(default)}`"
    return f"| `{key}` | {shown} | {_unit_of(section, key)} | {'; '.join(told)} | {variables} |"


def _variables_of(section: str, key: str) -> Iterator[str]:
    for variable, place in ENVIRONMENT.items():
        if place == (section, key):
            yield variable
            if variable in SECRET_VARIABLES:
                yield f"{variable}_FILE"


def _as_toml(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()


def _unit_of(section: str, key: str) -> str:
    """The unit of a number, or else its type."""
    unit = next((unit for ending, unit in UNITS.items() if key.endswith(ending)), None)
    hint = get_type_hints(get_type_hints(Config)[section])[key]
    kinds = [KINDS[each] for each in (hint, get_origin(hint), *get_args(hint)) if each in KINDS]
    return unit or (kinds[0] if kinds else "word")


def _rules_by_key() -> dict[str, list[str]]:
    """Those of classes of service, which have names of their own, under ``service_classes``."""
    found: dict[str, list[str]] = {}
    for rule in rules_of(Config()):
        is_of_class = rule.key.startswith("service_classes.")
        if rule.text == FINITE or (is_of_class and rule.key.count(".") > 1):
            continue
        texts = found.setdefault("service_classes" if is_of_class else rule.key, [])
        if rule.text not in texts:
            texts.append(rule.text)
    return found
