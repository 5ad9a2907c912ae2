"""``[[fault]]``: what befalls a simulated mesh's instances and attention workers, when, and for how long."""

import math
from collections.abc import Collection, Mapping

import msgspec

from common.errors import ConfigError


class FaultConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="fault"
):
    """Of one ``instance``, or of every one of a ``pool``: once, at ``at_s``, or again and again, after times
    that are drawn for each instance, exponentially with a mean of ``mean_between_s`` since the last one was
    over. ``lasts_s``: until it is over; None: for good."""

    instance: str | None = None
    pool: str | None = None
    at_s: float | None = None
    mean_between_s: float | None = None
    lasts_s: float | None = None


class Death(FaultConfig, frozen=True, kw_only=True, tag="death"):
    """It ends without a word. ``lasts_s``: until its next life is ready. Schedulers see a process's end at
    once (``scheduler.lifelines``); with ``of_host`` its host is gone, too, and its silence alone tells: after
    a lease, or of an attention worker, whoever waits for it before."""

    of_host: bool = False


class Straggler(FaultConfig, frozen=True, kw_only=True, tag="straggler"):
    """Its passes take ``times`` as long."""

    times: float


class SlowLink(FaultConfig, frozen=True, kw_only=True, tag="slow_link"):
    """KV, and what is exchanged with attention workers, crosses its links with ``share`` of their bandwidth;
    0: not at all. Messages come through."""

    share: float


class Silence(FaultConfig, frozen=True, kw_only=True, tag="silence"):
    """Its load reports stay away though it works; an attention worker answers nothing."""


AnyFault = Death | Straggler | SlowLink | Silence


def check_faults(faults: Collection[AnyFault], counts: Mapping[str, int | None]) -> None:
    """``counts``: of instances, by pool; None: there may be any number. Raises ConfigError."""
    for number, fault in enumerate(faults):
        key = f"fault.{number}"
        _check_target(key, fault, counts)
        _check_times(key, fault)
        match fault:
            case Straggler(times=times) if not 1 <= times < math.inf:
                raise ConfigError(f"{key}.times", times, "must be 1 or more")
            case SlowLink(share=share) if not 0 <= share <= 1:
                raise ConfigError(f"{key}.share", share, "must be from 0 to 1")


def _check_target(key: str, fault: AnyFault, counts: Mapping[str, int | None]) -> None:
    if fault.instance is None and fault.pool is None:
        raise ConfigError(f"{key}.instance", None, "either it or pool must be")
    if fault.instance is not None and fault.pool is not None:
        raise ConfigError(f"{key}.instance", fault.instance, "must not be set beside pool")
    if fault.pool is not None:
        if fault.pool not in counts:
            raise ConfigError(f"{key}.pool", fault.pool, f"must be one of {', '.join(sorted(counts))}")
        return
    pool, _, number = (fault.instance or "").rpartition("-")
    count = counts.get(pool)
    is_known = pool in counts and number.isdecimal() and (count is None or int(number) < count)
    if not is_known:
        rule = "must be a pool's name and the number of one of its instances, from 0 on"
        raise ConfigError(f"{key}.instance", fault.instance, rule)


def _check_times(key: str, fault: AnyFault) -> None:
    if fault.at_s is None and fault.mean_between_s is None:
        raise ConfigError(f"{key}.at_s", None, "either it or mean_between_s must be")
    if fault.at_s is not None and fault.mean_between_s is not None:
        raise ConfigError(f"{key}.at_s", fault.at_s, "must not be set beside mean_between_s")
    if fault.at_s is not None and not 0 <= fault.at_s < math.inf:
        raise ConfigError(f"{key}.at_s", fault.at_s, "must be 0 or more")
    for field in ("mean_between_s", "lasts_s"):
        value = getattr(fault, field)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{key}.{field}", value, "must be over 0")
    if fault.mean_between_s is not None and fault.lasts_s is None and not isinstance(fault, Death):
        raise ConfigError(f"{key}.lasts_s", None, "must be set with mean_between_s")
