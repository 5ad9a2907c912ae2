"""The device of a pool: looked up once, by its name in the catalogue."""

from common.devices import Catalogue, DeviceSpec
from common.errors import ConfigError


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
