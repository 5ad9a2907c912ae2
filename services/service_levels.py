"""What a mesh's gateways keep of what they promise, asked of each over HTTP: for ``lamella status``."""

import asyncio

from rich.table import Table

from common.config import MeshConfig
from common.errors import StoreError
from common.messages import ServiceRecord
from gateway.service_levels import ServiceLevel, add_up
from services.asking import NoAnswer, ask_service
from services.members import members_of


def read_service_levels(mesh: MeshConfig) -> list[ServiceLevel]:
    """By class, over all gateways; one that does not answer is left out, all of them while the store is away:
    a mesh's status can be shown without."""
    try:
        members = asyncio.run(members_of(mesh))
    except StoreError:
        return []
    gateways = [each for each in members if isinstance(each, ServiceRecord) and each.kind == "gateway"]
    return add_up(level for each in gateways for level in levels_of(each))


def levels_of(gateway: ServiceRecord) -> list[ServiceLevel]:
    """Where the public port wants a key, by the private one, if that can be reached from here."""
    levels = _ask(f"{gateway.http_url}/service-levels")
    if not levels and gateway.private_url is not None:
        levels = _ask(f"{gateway.private_url}/service-levels")
    return levels


def _ask(url: str) -> list[ServiceLevel]:
    try:
        return ask_service(url, list[ServiceLevel])
    except NoAnswer:
        return []


def service_table(levels: list[ServiceLevel]) -> Table:
    """Attainment and goodput (``common.latency``) of the last minute, a class a row."""
    window_s = max((level.window_s for level in levels), default=0.0)
    table = Table(
        "class", "objectives", "requests", "attained", "goodput", box=None, title=f"last {window_s:.0f} s"
    )
    for level in levels:
        goals = (("TTFT", level.ttft_s), ("TPOT", level.tpot_s), ("end to end", level.end_to_end_s))
        attainment = level.attainment
        table.add_row(
            level.service_class,
            ", ".join(f"{name} {goal_s:g} s" for name, goal_s in goals if goal_s is not None),
            str(level.requests),
            "-" if attainment is None else f"{attainment:.1%}",
            f"{level.goodput_requests_per_s:.2f} requests/s, {level.goodput_tokens_per_s:.1f} tokens/s",
        )
    return table
