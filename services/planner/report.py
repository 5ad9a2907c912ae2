"""A plan for people and for programs."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.table import Table

from common.cost import SECONDS_PER_HOUR
from services.output_files import write_whole
from services.planner.candidates import PoolPlan
from services.planner.demand import price_usd_h, provisioned_w
from services.planner.finalists import Settled
from services.planner.planning import LOOKED_BEYOND, Plan, attention_verdict, verdict
from services.planner.probes import Point
from services.planner.searches import SearchReport

FORMAT_VERSION = 1
SHOWN = 20


class PlannedDeployment(msgspec.Struct, frozen=True):
    """``point``: of the whole trace at ``rate_per_s``."""

    pools: tuple[PoolPlan, ...]
    devices: int
    is_disaggregated: bool
    usd_h: float
    provisioned_w: float | None
    rate_per_s: float
    requests_per_usd: float
    attainment: float
    headroom: float | None
    is_headroom_open: bool
    limit: str
    point: Point


class PlanFile(msgspec.Struct, frozen=True):
    """What ``--json`` writes. ``fewest_over``: as ``Plan`` has it."""

    version: int
    objective: str
    rate_per_s: float
    attainment: float
    configurations: int
    kinds: int
    bounded: int
    cut: int
    measured: int
    verdict: str
    attention_verdict: str | None
    caveat: str | None
    bursts: str | None
    ranked: tuple[PlannedDeployment, ...]
    fewest_over: PlannedDeployment | None


def planned(plan: Plan, settled: Settled) -> PlannedDeployment:
    deployment = settled.deployment
    usd_h = price_usd_h(deployment, plan.demand.catalogue)
    return PlannedDeployment(
        pools=deployment.pools,
        devices=deployment.devices,
        is_disaggregated=deployment.is_disaggregated,
        usd_h=usd_h,
        provisioned_w=provisioned_w(deployment, plan.demand.catalogue),
        rate_per_s=settled.rate_per_s,
        requests_per_usd=settled.rate_per_s * SECONDS_PER_HOUR / usd_h,
        attainment=settled.point.attainment,
        headroom=settled.headroom,
        is_headroom_open=settled.is_open,
        limit=settled.limit,
        point=settled.point,
    )


def file_of(plan: Plan) -> PlanFile:
    return PlanFile(
        version=FORMAT_VERSION,
        objective=plan.demand.objective,
        rate_per_s=plan.demand.rate_per_s,
        attainment=plan.demand.goal,
        configurations=plan.configurations,
        kinds=plan.kinds,
        bounded=plan.bounded,
        cut=plan.cut,
        measured=plan.measured,
        verdict=verdict(plan),
        attention_verdict=attention_verdict(plan),
        caveat=plan.caveat,
        bursts=plan.bursts,
        ranked=tuple(planned(plan, each) for each in plan.ranked),
        fewest_over=None if plan.fewest_over is None else planned(plan, plan.fewest_over),
    )


def write_json(path: Path, found: PlanFile | SearchReport) -> None:
    """Raises ConfigError."""
    write_whole("--json", path, msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


def search_table(report: SearchReport) -> Table:
    """Of the best."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in report.columns:
        table.add_column(heading, overflow="fold")
    for row in report.rows[:SHOWN]:
        table.add_row(*row)
    return table


def plan_table(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    # The most throughput has none.
    spare = () if plan.demand.objective == "throughput" else ("headroom",)
    for heading in ("", "deployment", "GPUs", "$/h", "kW", "req/s", "req/$", "met", *spare, "limited by"):
        right = heading not in ("deployment", "limited by")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for number, settled in enumerate(plan.ranked, start=1):
        each = planned(plan, settled)
        table.add_row(
            str(number),
            "\n".join(f"{pool.count} {pool.kind.role}: {pool.kind}" for pool in each.pools),
            str(each.devices),
            f"{each.usd_h:.2f}",
            "unknown" if each.provisioned_w is None else f"{each.provisioned_w / 1e3:.1f}",
            f"{each.rate_per_s:.3g}",
            f"{each.requests_per_usd:.0f}",
            f"{100 * each.attainment:.1f} %",
            *([_headroom(each)] if spare else []),
            each.limit,
        )
    return table


def _headroom(each: PlannedDeployment) -> str:
    if each.headroom is None:
        return ""
    return f"{'over ' if each.is_headroom_open else ''}{100 * each.headroom:.0f} %"


def summary_of(plan: Plan) -> Iterator[str]:
    if plan.caveat is not None:
        # First: all that follows is of so few requests.
        yield plan.caveat
    yield verdict(plan)
    if (said := attention_verdict(plan)) is not None:
        yield said
    if plan.demand.objective != "throughput" and any(each.headroom is None for each in plan.ranked):
        also = " and the best with attention workers" if plan.has_attention else ""
        yield (
            f"headroom is measured for the first {LOOKED_BEYOND}{also} alone, as it takes some six runs over"
            " the whole trace, each; where they are equal otherwise, others rank as if they had none"
        )
    if plan.bursts is not None:
        yield plan.bursts
    whole = len(plan.ranked) + (plan.fewest_over is not None)
    yield (
        f"{plan.configurations:,} configurations of {plan.kinds} kinds of instances: {plan.bounded} left out"
        f" by their bounds, {plan.cut} by short runs, {plan.measured} measured, {whole}"
        f" deployment{'' if whole == 1 else 's'} simulated whole"
    )
