"""``[host]`` of a simulated mesh: the one machine that all of it runs on (``services.simulator.host``)."""

import msgspec

from common.errors import ConfigError


class HostConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[host]``: one machine of ``cores`` runs everything. Seconds of a core that are taken beside passes:
    by each pass ``pass_s``, by each token drawn ``token_s``, by each token of a prompt ``prompt_token_s``,
    and ``prompt_s`` by each prompt, half of it as it comes to who computes it, and half as it comes to who
    decodes it, as often as it does: not where one token is all. ``idle_cores``: what is taken all the time.
    While more is wanted than there is, a layer whose attention a worker computes takes what its slice and
    attention take one after the other at what one thread gets of a core, and ``turns_share`` of that longer,
    and so it does for ``turns_hold_s`` after that: who waits for attention still sleeps.
    While another instance computes, a pass takes ``beside_share`` of its time longer, and
    ``beside_s_per_rate`` for each pass a second that it would compute alone."""

    cores: int
    idle_cores: float = 0.0
    pass_s: float = 0.0
    token_s: float = 0.0
    prompt_s: float = 0.0
    prompt_token_s: float = 0.0
    turns_share: float = 0.0
    turns_hold_s: float = 0.0
    beside_s_per_rate: float = 0.0
    beside_share: float = 0.0


def check_host(host: HostConfig) -> None:
    """Raises ConfigError."""
    if host.cores < 1:
        raise ConfigError("host.cores", host.cores, "must be at least 1")
    for key, value in msgspec.structs.asdict(host).items():
        if not 0 <= value < float("inf"):
            raise ConfigError(f"host.{key}", value, "must be 0 or more")
    if host.idle_cores >= host.cores:
        raise ConfigError("host.idle_cores", host.idle_cores, f"must be under host.cores = {host.cores}")
