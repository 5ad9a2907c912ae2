"""Devices of pools: the catalogue's, and those that ``[[device]]`` tables add to it.

A table has the figures of a ``DeviceSpec``, or it names what `lamella profile` wrote, of whose model the
device then has the rates. Names are looked up once, where a file or an option is read.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from common.config_file import load_config, read_toml
from common.devices import DEVICES, Catalogue, DeviceSpec
from common.errors import ConfigError
from common.profile import machine_name, profile_path
from common.shapes import SHAPES, ModelShape
from common.toml_tables import read_table
from services.simulator.performance.profiled import machine_device, read_machine_profile

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""It names tables and is a label in Kubernetes."""
FIELDS = tuple(each.name for each in dataclasses.fields(DeviceSpec))
GIVEN = "given by the user"
THIS_MACHINE = "this-machine"


class ProfiledDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``profile``: a file, or THIS_MACHINE for that of the model that the environment's settings name, the
    default one without. ``model``: which was profiled, a shape's name or a directory. ``memory_gb`` None:
    this machine's. Links are those of its own memory, unless they are given."""

    name: str
    profile: str
    price_usd_h: float
    model: str | None = None
    memory_gb: float | None = None
    power_w: float | None = None
    interchip_gb_s: float | None = None
    network_gbps: float | None = None


def device_of(key: str, name: str | None, catalogue: Catalogue) -> DeviceSpec | None:
    """None where nobody says which. Raises ConfigError for one that is not known."""
    if name is not None and name not in catalogue:
        raise ConfigError(f"{key}.device", name, f"must be one of {', '.join(sorted(catalogue))}")
    return None if name is None else catalogue[name]


def needed_device(key: str, device: DeviceSpec | None) -> DeviceSpec:
    """Where its memory has to say how much KV there is. Raises ConfigError."""
    if device is None:
        raise ConfigError(f"{key}.device", None, "must be set where kv_tokens is not")
    return device


def read_device_file(path: Path | None) -> Catalogue:
    """``--device-file``, which has ``[[device]]`` tables alone; without one the catalogue. Raises as
    ``read_devices``."""
    if path is None:
        return DEVICES
    tree = read_toml("--device-file", path)
    if list(tree) != ["device"]:
        raise ConfigError("--device-file", str(path), "must have [[device]] tables, and nothing else")
    return read_devices(tree["device"], path.parent)


def read_devices(tables: Any, beside: Path) -> Catalogue:
    """The catalogue with those of ``[[device]]`` tables, whose files are ``beside`` that folder. Raises
    ConfigError naming key, value and rule, and what reading a profile raises."""
    found = dict(DEVICES)
    if not isinstance(tables, list) or not all(isinstance(each, Mapping) for each in tables):
        raise ConfigError("device", tables, "must be [[device]] tables")
    for number, table in enumerate(tables):
        name = table.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            rule = "must be up to 63 small letters, digits and -, with a letter or digit at both ends"
            raise ConfigError(f"device.{number}.name", name, rule)
        if name in found:
            whose = "in the catalogue" if name in DEVICES else "another [[device]]'s"
            raise ConfigError(f"device.{number}.name", name, f"is {whose} already: give it another one")
        key = f"device.{name}"
        found[name] = _profiled(key, table, beside) if "profile" in table else _given(key, table)
    return found


def device_table(device: DeviceSpec) -> dict[str, Any]:
    """From which ``read_devices`` makes the same device."""
    return {key: value for key, value in dataclasses.asdict(device).items() if value is not None}


def _given(key: str, table: Mapping[str, Any]) -> DeviceSpec:
    for field, value in table.items():
        if field not in FIELDS:
            rule = f"is not a known key: must be one of {', '.join(FIELDS)}; or give a profile"
            raise ConfigError(f"{key}.{field}", value, rule)
    whole: dict[str, Any] = {"power_w": None, **table}
    if "figures_source" not in table:
        raise ConfigError(f"{key}.figures_source", None, "must be given: where the figures are from")
    for field in ("price_source", "network_source"):
        whole.setdefault(field, table["figures_source"])
    device: DeviceSpec = read_table(key, whole, DeviceSpec)
    _check_figures(key, device)
    return device


def _profiled(key: str, table: Mapping[str, Any], beside: Path) -> DeviceSpec:
    given: ProfiledDevice = read_table(key, table, ProfiledDevice)
    if given.profile == THIS_MACHINE:
        path, shape = _of_this_machine(key, given.model)
        profile = read_machine_profile(path)
    else:
        profile = read_machine_profile(beside / Path(given.profile).expanduser())
        shape = _shape_of(key, given.model, profile.model, beside)
    memory_gb = given.memory_gb
    if memory_gb is None:
        if profile.machine != machine_name():
            rule = f"must be given: what was profiled, {profile.machine}, is not this machine's processor"
            raise ConfigError(f"{key}.memory_gb", None, rule)
        memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    try:
        device = machine_device(
            profile, shape, name=given.name, memory_gb=memory_gb, price_usd_h=given.price_usd_h
        )
    except ConfigError as exc:
        raise ConfigError(f"{key}.{exc.key}", exc.value, exc.rule) from exc
    device = dataclasses.replace(
        device,
        power_w=given.power_w,
        interchip_gb_s=device.interchip_gb_s if given.interchip_gb_s is None else given.interchip_gb_s,
        network_gbps=device.network_gbps if given.network_gbps is None else given.network_gbps,
        network_source=device.network_source if given.network_gbps is None else GIVEN,
    )
    _check_figures(key, device)
    return device


def _of_this_machine(key: str, model: str | None) -> tuple[Path, ModelShape]:
    """As its instances find theirs (``services.hosts.model_engine``)."""
    if model is not None:
        rule = f"is of a profile's file: with profile = '{THIS_MACHINE}' the environment's settings name it"
        raise ConfigError(f"{key}.model", model, rule)
    from common.model.device import accelerator_name
    from common.model.precision import precision_of
    from services.analysis.model_shape import read_shape
    from services.model_directory import model_directory

    settings = load_config(None).model
    directory = model_directory(settings)
    accelerator = accelerator_name(settings.device)
    path = profile_path(settings, directory, precision_of(settings).compute, accelerator)
    if not path.exists():
        rule = f"{directory.name} was not profiled on this machine: `lamella profile` does"
        raise ConfigError(f"{key}.profile", THIS_MACHINE, rule)
    return path, read_shape(str(directory))


def _shape_of(key: str, model: str | None, profiled: str, beside: Path) -> ModelShape:
    """``profiled``: the profile's own name of it."""
    # Not for every run of a plan: it hangs on all code that is loaded (``services.planner.sources``).
    from services.analysis.model_shape import read_shape

    name = profiled.lower() if model is None else model
    if name in SHAPES:
        return SHAPES[name]
    try:
        return read_shape(str(beside / Path(name).expanduser()))
    except ConfigError as exc:
        rule = f"must say what was profiled, {profiled}: a directory, or one of {', '.join(sorted(SHAPES))}"
        raise ConfigError(f"{key}.model", model, rule) from exc


def _check_figures(key: str, device: DeviceSpec) -> None:
    """Raises ConfigError."""
    for field, value in device_table(device).items():
        if isinstance(value, float) and not 0 < value < float("inf"):
            raise ConfigError(f"{key}.{field}", value, "must be over 0")
