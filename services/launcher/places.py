"""Where a mesh is to be reached and where it finds its servers, looked at before anything starts."""

import socket
import time
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

from common.config import Config
from common.config_file import check_url
from common.config_rules import NATS_SCHEMES, REDIS_SCHEMES
from common.errors import ConfigError, reason_of
from common.listening import Place, bind
from services.launcher.launch_plan import LaunchPlan

PLACE = Place("service.host", "--port")
DEFAULT_PORTS = {"nats": 4222, "tls": 4222, "redis": 6379, "rediss": 6379}
WAIT_S = 5.0
LOOK_AGAIN_S = 0.25


def check_places(plan: LaunchPlan, config: Config) -> None:
    """Raises ConfigError for a port that is taken, an address of another machine, URLs that are none."""
    check_urls(plan)
    _check_port(config.service.host, plan.port)


def check_urls(plan: LaunchPlan) -> None:
    """Raises ConfigError for those of no such server."""
    for option, url, schemes in _given(plan):
        check_url(option, url, schemes)


def check_listening(plan: LaunchPlan) -> None:
    """That servers which were given are there, or come soon: what asks for them later waits longer, when a
    model has been made ready. Raises ConfigError, and as ``check_urls``."""
    check_urls(plan)
    for option, url, _ in _given(plan):
        _wait_for(option, url)


def _given(plan: LaunchPlan) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    if plan.nats_url is not None:
        yield "--nats", plan.nats_url, NATS_SCHEMES
    if plan.redis_url is not None:
        yield "--redis", plan.redis_url, REDIS_SCHEMES


def _check_port(host: str, port: int) -> None:
    """Whoever tries lamella often has another program there."""
    try:
        bind(host, port, PLACE).close()
    except ConfigError as exc:
        if exc.key != PLACE.port:
            raise
        rule = f"{exc.rule}: name another, or 0 for any that is free"
        raise ConfigError(exc.key, exc.value, rule) from exc


def _wait_for(option: str, url: str) -> None:
    """Says of the URL only where that leads: it may hold a password."""
    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORTS.get(parts.scheme)
        if parts.scheme != "unix" and "@" in f"{parts.path}{parts.query}{parts.fragment}":
            raise ValueError("what is before it is taken for a host")
    except ValueError as exc:
        rule = "is no URL: what is special in a password has to be percent-encoded"
        raise ConfigError(option, f"{url.partition('://')[0]}://...", rule) from exc
    is_file = parts.scheme == "unix"
    host = parts.hostname or "localhost"
    place = parts.path if is_file else f"{host}:{port}"
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            if is_file:
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.connect(unquote(parts.path))
            else:
                socket.create_connection((host, port), max(WAIT_S, LOOK_AGAIN_S)).close()
            return
        except (OSError, UnicodeError) as exc:
            if time.monotonic() > deadline_s:
                name = option.removeprefix("--")
                rule = (
                    f"must be where a server listens, whether {option}, {name.upper()}_URL or [mesh]"
                    f" {name}_url says so: {reason_of(exc)}"
                )
                raise ConfigError(option, f"{parts.scheme}://{place}", rule) from exc
        time.sleep(LOOK_AGAIN_S)
