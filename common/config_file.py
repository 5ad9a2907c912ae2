"""Settings read from one TOML file and the environment, checked, and written again.

The only place that reads settings from the environment. Order of precedence: command line (applied by the CLI
with ``msgspec.structs.replace``), environment, file, default. An unknown key or an impossible value fails at
start and names key, value and rule.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from common.config import Config
from common.config_rules import has_scheme, rules_of, scheme_rule, without_credentials
from common.errors import ConfigError
from common.secret_files import with_secrets

ENVIRONMENT: dict[str, tuple[str, str]] = {
    "NATS_URL": ("mesh", "nats_url"),
    "REDIS_URL": ("mesh", "redis_url"),
    "LAMELLA_NAMESPACE": ("mesh", "namespace"),
    "LAMELLA_SERVICE_ID": ("service", "service_id"),
    "LAMELLA_HOST": ("service", "host"),
    "LAMELLA_PORT": ("service", "port"),
    "LAMELLA_ADVERTISE_HOST": ("service", "advertise_host"),
    "LAMELLA_VLLM_METRICS": ("service", "vllm_metrics"),
    "LAMELLA_PRIVATE_HOST": ("gateway", "private_host"),
    "LAMELLA_PRIVATE_PORT": ("gateway", "private_port"),
    "LAMELLA_ADMIN_KEY_FILE": ("gateway", "admin_key_file"),
    "LAMELLA_API_KEYS_FILE": ("gateway", "api_keys_file"),
    "LAMELLA_MODEL": ("model", "directory"),
    "LAMELLA_CACHE": ("model", "cache_directory"),
    "LAMELLA_DTYPE": ("model", "dtype"),
    "LAMELLA_DEVICE": ("model", "device"),
    "LAMELLA_THREADS": ("model", "threads"),
    "LAMELLA_PREDICTOR": ("predictor", "kind"),
    "LAMELLA_ROLE": ("instance", "role"),
    "LAMELLA_ATTENTION_WORKERS": ("instance", "attention_workers"),
    "LAMELLA_ATTENTION_DEVICE": ("attention", "device"),
    "LAMELLA_TRANSFER_HOST": ("transfer", "host"),
    "OTEL_EXPORTER_OTLP_ENDPOINT": ("telemetry", "otlp_endpoint"),
}
"""Every variable that is read, and the key it sets; ``common.secret_files`` reads some from files."""
UNKNOWN_KEY = "is not a known key"
STEP = re.compile(r"[^].`[]+")
"""Of a place that msgspec names, as ``instance.replica_devices[1]``."""
_WRONG_TYPE = re.compile(r"Expected `([^`]*)`, got `[^`]*`")
_TYPES = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "array": "a list",
    "object": "a table",
}
"""By msgspec's names for them."""
OTEL = "OTEL_"
"""Variables of OpenTelemetry, by whose rules an empty one is as one that is not set."""


def load_config(path: Path | None, environment: Mapping[str, str] | None = None) -> Config:
    """Reads, overlays the environment, checks. Raises ConfigError naming key, value and rule."""
    config = _convert(_read_tree(path, environment), is_text=True)
    check_config(config)
    return config


class NamedServers(NamedTuple):
    """None: nobody says which, so that a mesh on one machine brings its own."""

    nats_url: str | None
    redis_url: str | None


def load_named_servers(path: Path | None, environment: Mapping[str, str] | None = None) -> NamedServers:
    """Those that file or environment name, also where they are the default. Raises as ``load_config``."""
    named = _read_tree(path, environment).get("mesh", {})
    mesh = load_config(path, environment).mesh
    return NamedServers(
        mesh.nats_url if "nats_url" in named else None, mesh.redis_url if "redis_url" in named else None
    )


def _read_tree(path: Path | None, environment: Mapping[str, str] | None) -> dict[str, Any]:
    """What is set, by section and key. Raises ConfigError for a file that is not one of settings."""
    environment = with_secrets(os.environ if environment is None else environment)
    tree: dict[str, Any] = {}
    if path is not None:
        tree = read_toml("--config", path)
    _convert(tree, is_text=False)
    for variable, (section, key) in ENVIRONMENT.items():
        if variable in environment and (environment[variable] or not variable.startswith(OTEL)):
            tree.setdefault(section, {})[key] = environment[variable]
    return tree


def read_toml(option: str, path: Path) -> dict[str, Any]:
    """``option``: that named the file. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(option, str(path), f"cannot be read ({exc.strerror})") from exc
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(option, str(path), f"is not TOML: {exc}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(option, str(path), "is not TOML: it is not UTF-8 text") from exc


@contextmanager
def told_of(path: Path) -> Iterator[None]:
    """Where one of several files may be meant: a ConfigError of what one says names the file, too."""
    try:
        yield
    except ConfigError as exc:
        raise ConfigError(f"{path}: {exc.key}", exc.value, exc.rule) from exc


def config_from_tree(tree: Mapping[str, Any]) -> Config:
    """Builds and checks a Config from nested tables. Raises ConfigError."""
    config = _convert(tree, is_text=False)
    check_config(config)
    return config


def _convert(tree: Mapping[str, Any], *, is_text: bool) -> Config:
    """``is_text``: numbers may be texts, as the environment's are. TOML has types, where 1 is not true."""
    try:
        return msgspec.convert(tree, Config, strict=not is_text, dec_hook=_decode_path)
    except msgspec.ValidationError as exc:
        raise _conversion_error(tree, str(exc)) from exc


def to_toml(config: Config) -> str:
    """The configuration as TOML that ``load_config`` reads back to an equal value."""
    lines: list[str] = []
    for section in config.__struct_fields__:
        values = getattr(config, section)
        lines.append(f"[{section}]")
        if not isinstance(values, dict):
            lines += [*_keys_of(values), ""]
            continue
        for name, each in values.items():
            lines += [f"[{section}.{name}]", *_keys_of(each), ""]
    return "\n".join(lines)


def _keys_of(table: msgspec.Struct) -> Iterator[str]:
    for key in table.__struct_fields__:
        value = getattr(table, key)
        if value is None:
            continue
        yield f"{key} = {toml_value(str(value) if isinstance(value, Path) else value)}"


def toml_value(value: Any) -> str:
    """Of a key, no table."""
    # JSON's text is TOML's, but for one character that TOML wants escaped.
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")


def check_config(config: Config) -> None:
    """Rules that a type cannot say (``common.config_rules``). Raises ConfigError for the first broken one."""
    for rule in rules_of(config):
        if not rule.is_met:
            raise ConfigError(rule.key, rule.value, rule.text + rule.given)


def check_url(key: str, url: str, schemes: tuple[str, ...]) -> None:
    """Raises ConfigError for an address that no server of that kind can have."""
    if not has_scheme(url, schemes):
        raise ConfigError(key, without_credentials(url), scheme_rule(schemes))


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str) and value:
        return Path(value)
    raise TypeError("must be the text of a path")


def choices_of(key: str) -> tuple[str, ...]:
    """What a setting of few words may be; empty for one that may be more."""
    section, _, field = key.partition(".")
    kind = get_type_hints(get_type_hints(Config)[section])[field]
    literals = [each for each in (kind, *get_args(kind)) if get_origin(each) is Literal]
    return tuple(each for literal in literals for each in get_args(literal))


def _conversion_error(tree: Mapping[str, Any], text: str) -> ConfigError:
    """msgspec says ``Expected `int`, got `str` - at `$.instance.block_size` ``: find key and value in it."""
    rule, _, location = text.partition(" - at `$")
    key = location.rstrip("`").lstrip(".")
    if rule.startswith("Object contains unknown field"):
        field = rule.split("`")[1]
        key = f"{key}.{field}" if key else field
        rule = UNKNOWN_KEY
    if rule.startswith("Invalid enum value"):
        rule = f"must be one of {', '.join(map(repr, choices_of(key)))}"
    rule = type_rule(rule)
    if "[...]" in key:
        table = key.partition("[")[0]
        key = key.replace("[...]", f".{_broken_entry(tree, table)}")
    if rule == UNKNOWN_KEY:
        rule += _suggestion(key)
    return ConfigError(key or "(file)", _value_at(tree, STEP.findall(key)), rule)


def _value_at(value: Any, steps: Sequence[str]) -> Any:
    """None where nothing is. A key may have dots in it, which part it into several steps."""
    if not steps:
        return value
    if isinstance(value, Mapping):
        for count in range(1, len(steps) + 1):
            name = ".".join(steps[:count])
            if name in value:
                return _value_at(value[name], steps[count:])
    elif isinstance(value, list) and steps[0].isdecimal() and int(steps[0]) < len(value):
        return _value_at(value[int(steps[0])], steps[1:])
    return None


def type_rule(rule: str) -> str:
    """What msgspec says of a value's type, in the words of TOML; of anything else as it is."""
    found = _WRONG_TYPE.fullmatch(rule)
    kinds = [] if found is None else [each for each in found[1].split(" | ") if each != "null"]
    if "float" in kinds:
        kinds = [each for each in kinds if each != "int"]
    if not kinds or not _TYPES.keys() >= set(kinds):
        return rule
    return f"must be {' or '.join(_TYPES[each] for each in kinds)}"


def _suggestion(key: str) -> str:
    """Which key of the same table was perhaps meant."""
    *tables, name = key.split(".")
    kind: Any = Config
    for table in tables:
        # Where a table holds others by names, these are of its values' kind.
        kind = get_args(kind)[1] if get_origin(kind) is dict else get_type_hints(kind)[table]
    near = difflib.get_close_matches(name, kind.__struct_fields__, n=1)
    return f": did you mean {near[0]}?" if near else ""


def _broken_entry(tree: Mapping[str, Any], table: str) -> str:
    """The name that msgspec leaves out where a table holds others by names: the first that it refuses."""
    for name, entry in tree[table].items():
        try:
            msgspec.convert({table: {name: entry}}, Config, dec_hook=_decode_path)
        except msgspec.ValidationError:
            return str(name)
    raise AssertionError(f"every entry of {table} is as it should be")
