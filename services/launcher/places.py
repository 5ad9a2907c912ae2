"""Where a mesh is to be reached and where it finds its servers, looked at before anything starts."""

from common.config import Config
from common.config_file import check_url
from common.config_rules import NATS_SCHEMES, REDIS_SCHEMES
from common.errors import ConfigError
from common.listening import Place, bind
from services.launcher.launch_plan import LaunchPlan

PLACE = Place("service.host", "--port")


def check_places(plan: LaunchPlan, config: Config) -> None:
    """Raises ConfigError for a port that is taken, an address of another machine, URLs that are none."""
    _check_port(config.service.host, plan.port)
    if plan.nats_url is not None:
        check_url("--nats", plan.nats_url, NATS_SCHEMES)
    if plan.redis_url is not None:
        check_url("--redis", plan.redis_url, REDIS_SCHEMES)


def _check_port(host: str, port: int) -> None:
    """Whoever tries lamella often has another program there."""
    try:
        bind(host, port, PLACE).close()
    except ConfigError as exc:
        if exc.key != PLACE.port:
            raise
        rule = f"{exc.rule}: name another, or 0 for any that is free"
        raise ConfigError(exc.key, exc.value, rule) from exc
