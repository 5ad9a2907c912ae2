"""Tables of a TOML file as values of ours: what breaks a rule is named by its key, and shown by itself."""

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from common.config_file import STEP, UNKNOWN_KEY, type_rule
from common.errors import ConfigError

_OF_A_VALUE, _OF_A_KEY = " - at `$", " - at `key` in `$"


def read_table(key: str, table: object, kind: Any, decode: Callable[[type, Any], Any] | None = None) -> Any:
    """As ``kind``, a Struct, a union of them, or a list or tuple of such. ``decode``: msgspec's hook. Raises
    ConfigError, whose key begins with ``key``; it is empty for a whole file."""
    try:
        return msgspec.convert(table, kind, dec_hook=decode)
    except msgspec.ValidationError as exc:
        raise _as_config_error(key, table, kind, str(exc)) from exc


def check_keys(key: str, table: object, kind: type) -> None:
    """Of a dataclass, to which msgspec says nothing of keys that it does not know. Raises ConfigError."""
    assert dataclasses.is_dataclass(kind), "Structs forbid unknown fields"
    fields = [each.name for each in dataclasses.fields(kind)]
    for name, value in table.items() if isinstance(table, Mapping) else ():
        if name not in fields:
            raise ConfigError(f"{key}.{name}", value, UNKNOWN_KEY + _meant(name, fields))


def _meant(name: str, fields: Sequence[str]) -> str:
    if name in fields:
        return " of this kind of table"
    near = difflib.get_close_matches(name, fields, n=1)
    return f": did you mean {near[0]}?" if near else ""


def _as_config_error(key: str, table: object, kind: Any, text: str) -> ConfigError:
    """msgspec says ``Expected `int`, got `str` - at `$[1].count` ``, and of a key ``Invalid enum value 'a' -
    at `key` in `$.counts` ``."""
    rule, _, location = text.replace(_OF_A_KEY, _OF_A_VALUE).partition(_OF_A_VALUE)
    steps = STEP.findall(location)
    if _OF_A_KEY in text:
        choices = _words_of(get_args(_hint_at(steps, kind))[0])
        steps.append(rule.split("'")[1])
        rule = f"is no key: must be one of {', '.join(choices)}"
    elif rule.startswith("Object contains unknown field"):
        fields = [each for one in _structs_at(steps, kind) for each in one.__struct_fields__]
        steps.append(rule.split("`")[1])
        rule = UNKNOWN_KEY + _meant(steps[-1], fields)
    elif rule.startswith("Object missing required field"):
        step = rule.split("`")[1]
        others = _missing_beside(step, _at(table, steps), kind)
        choices = _choices(step, _structs_at(steps, kind))
        steps.append(step)
        rule = f"must be given, one of {', '.join(choices)}" if choices else "must be given"
        rule += f" (and {', '.join(others)})" if others else ""
    elif location.endswith("[...]`"):
        steps.append(_broken_of(_at(table, steps), _hint_at(steps, kind)))
    elif steps and (choices := _choices(steps[-1], _structs_at(steps[:-1], kind))):
        rule = f"must be one of {', '.join(choices)}"
    elif rule.startswith("Invalid enum value"):
        rule = f"must be one of {', '.join(_words_within(_hint_at(_field_of(steps), kind)))}"
    return ConfigError(".".join([*filter(None, [key]), *steps]), _at(table, steps), type_rule(rule))


def _at(table: object, steps: Sequence[str]) -> Any:
    value: Any = table
    for step in steps:
        value = _within(value, step)
    return value


def _missing_beside(field: str, table: object, kind: Any) -> list[str]:
    """What else the table lacks of what must be given, where one class alone has such a field: which one a
    table of several is to be is not known."""
    owners = [needed for each in dict.fromkeys(_classes_of(kind)) if field in (needed := _required_of(each))]
    if len(owners) != 1 or not isinstance(table, Mapping):
        return []
    return [each for each in owners[0] if each != field and each not in table]


def _within(value: Any, step: str) -> Any:
    """A list's by its number."""
    if isinstance(value, Sequence) and not isinstance(value, str) and step.isdecimal():
        return value[int(step)]
    return value.get(step) if isinstance(value, Mapping) else None


def _structs_of(kind: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for each in get_args(kind):
        yield from _structs_of(each)


def _structs_at(steps: Sequence[str], kind: Any) -> list[type[msgspec.Struct]]:
    """Of which the table there may be one."""
    found = list(_structs_of(kind))
    for step in steps:
        if not step.isdecimal():
            hints = [get_type_hints(each)[step] for each in found if step in each.__struct_fields__]
            found = [each for hint in hints for each in _structs_of(hint)]
    return found


def _hint_at(steps: Sequence[str], kind: Any) -> Any:
    """Of the last step's field; None where there is none."""
    owners = [each for each in _structs_at(steps[:-1], kind) if steps[-1] in each.__struct_fields__]
    return get_type_hints(owners[0])[steps[-1]] if owners else None


def _broken_of(table: Any, hint: Any) -> str:
    """The name that msgspec leaves out where a table holds values by names: the first that it refuses."""
    _, kind = get_args(hint)
    for name, value in table.items():
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            return str(name)
    raise AssertionError("every value is as it should be")


def _words_of(hint: Any) -> list[str]:
    """Of a Literal, or of those that a union has among others."""
    literals = [each for each in (hint, *_parts_of(hint)) if get_origin(each) is Literal]
    return [str(word) for literal in literals for word in get_args(literal)]


def _words_within(hint: Any) -> list[str]:
    """Of all Literals of which it consists: a list's items, or a pair's."""
    if get_origin(hint) is Literal:
        return _words_of(hint)
    return list(dict.fromkeys(word for each in get_args(hint) for word in _words_within(each)))


def _field_of(steps: Sequence[str]) -> Sequence[str]:
    """Without the places in it."""
    while steps[-1].isdecimal():
        steps = steps[:-1]
    return steps


def _parts_of(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else ()


def _classes_of(kind: Any) -> Iterator[type]:
    """Structs and dataclasses, with those of which these consist."""
    if isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)):
        yield kind
        for hint in get_type_hints(kind).values():
            yield from _classes_of(hint)
    for each in get_args(kind):
        yield from _classes_of(each)


def _required_of(kind: type) -> list[str]:
    if issubclass(kind, msgspec.Struct):
        return [each.name for each in msgspec.structs.fields(kind) if each.required]
    assert dataclasses.is_dataclass(kind), "it is a Struct or a dataclass"
    needed = dataclasses.MISSING
    return [
        each.name
        for each in dataclasses.fields(kind)
        if each.default is needed and each.default_factory is needed
    ]


def _choices(field: str, structs: Sequence[type[msgspec.Struct]]) -> list[str]:
    """What it may be, where that is one of a few words: a table's kind, too."""
    found: list[str] = []
    for each in structs:
        if each.__struct_config__.tag_field == field:
            found.append(str(each.__struct_config__.tag))
        elif field in each.__struct_fields__:
            found += _words_of(get_type_hints(each)[field])
    return list(dict.fromkeys(found))
