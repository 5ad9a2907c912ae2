"""Reads what a plan is asked for, checks it, and has it searched."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from common.errors import ConfigError, ServiceError
from services.analysis.model_shape import read_shape
from services.bench.config import parse_objectives
from services.bench.traces import read_trace
from services.commands.options import messages
from services.planner.bounds import Bound, capacity_bound
from services.planner.candidates import InstanceKind, Kinds, SearchSpace, devices_of, kinds_of, prices_of
from services.planner.checkpoint import Checkpoint
from services.planner.demand import OBJECTIVES, Demand
from services.planner.driver import drive, simulating
from services.planner.planning import Plan, plan
from services.planner.simulating import Conditions, speed_of
from services.planner.workload import PlannedWorkload, rate_of, workload_of


class Interrupted(ServiceError):
    """Ctrl-C. What was simulated is kept where a checkpoint was named."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """As the command's options have it. ``settings``: sections of a mesh's, ``[space]``, and
    ``[performance.DEVICE]`` of files ``beside``."""

    model: str
    trace: Path
    slo: str
    devices: str
    prices: Mapping[str, Any] = field(default_factory=dict)
    objective: str = "cost"
    rate_per_s: float | None = None
    max_devices: int | None = None
    goal: float = 0.9
    settings: Mapping[str, Any] = field(default_factory=dict)
    beside: Path = Path()
    requests: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that was read and checked."""

    demand: Demand
    conditions: Conditions
    workload: PlannedWorkload
    kinds: Kinds


def prepare(request: PlanRequest) -> Prepared:
    """Raises ConfigError, ModelError, TraceError."""
    shape, devices = read_shape(request.model), devices_of(request.devices)
    objectives = parse_objectives(request.slo)
    if request.objective not in OBJECTIVES:
        raise ConfigError("--objective", request.objective, f"must be one of {', '.join(OBJECTIVES)}")
    rows = read_trace(request.trace, request.requests).requests
    workload = workload_of(rows)
    rate = request.rate_per_s if request.objective == "throughput" else rate_of(request.rate_per_s, workload)
    demand = Demand(
        objective=next(each for each in OBJECTIVES if each == request.objective),
        rate_per_s=rate or 0.0,
        max_devices=request.max_devices,
        prices=prices_of(request.prices, "--prices"),
        objectives=objectives,
        goal=request.goal,
    )
    space, rest = space_of(devices, request.settings)
    settings, performance = performance_of(rest, request.beside)
    conditions = Conditions(
        shape=shape,
        rows=rows,
        objectives=objectives,
        settings=settings,
        performance=performance,
        seed=request.seed,
    )
    kinds = kinds_of(space, shape, conditions.element_bytes, request.max_devices)
    return Prepared(demand, conditions, workload, kinds)


def space_of(devices: tuple[str, ...], settings: Mapping[str, Any]) -> tuple[SearchSpace, dict[str, Any]]:
    """With what ``[space]`` says, and the other tables. Raises ConfigError."""
    rest = {key: value for key, value in settings.items() if key != "space"}
    table = settings.get("space", {})
    try:
        space = msgspec.convert({**table, "devices": devices}, SearchSpace)
    except (msgspec.ValidationError, TypeError) as exc:
        raise ConfigError("space", table, str(exc)) from exc
    for key in ("tensors", "batches", "policies", "chunks"):
        values = getattr(space, key)
        numbers = values if key in ("tensors", "batches") else [number for _, number in values]
        if not values or min(numbers) < 1:
            raise ConfigError(f"space.{key}", table.get(key), "must name at least one, of 1 or more")
    return space, rest


def performance_of(
    settings: Mapping[str, Any], beside: Path
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Sections, and sources by device with their files' places in full. Raises ConfigError."""
    rest = {key: value for key, value in settings.items() if key != "performance"}
    for key in ("cluster", "pool"):
        if key in rest:
            raise ConfigError(f"--config {key}", rest[key], "is what a plan is to find")
    tables = settings.get("performance", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError("performance", tables, "must be tables [performance.DEVICE]")
    devices_of(",".join(tables)) if tables else ()
    placed = {
        device: {key: _placed(key, value, beside) for key, value in table.items()}
        for device, table in tables.items()
    }
    return rest, placed


FILE_KEYS = ("mlp", "attention", "all_reduce", "send_recv", "path", "directory")
"""Of performance sources."""


def _placed(key: str, value: Any, beside: Path) -> Any:
    if key in FILE_KEYS and isinstance(value, str):
        return str((beside / Path(value).expanduser()).absolute())
    return value


def bounds_of(prepared: Prepared) -> dict[InstanceKind, Bound]:
    conditions, demand = prepared.conditions, prepared.demand
    speeds = {}
    found = {}
    for kind in (each for role in prepared.kinds for each in role):
        hardware = kind.device, kind.tensor
        if hardware not in speeds:
            speeds[hardware] = speed_of(kind, conditions)
        found[kind] = capacity_bound(
            kind, speeds[hardware], prepared.workload, demand.objectives, demand.goal
        )
    return found


def make_plan(request: PlanRequest, processes: int | None = None, checkpoint: Path | None = None) -> Plan:
    """Raises ConfigError and what reading files raises; Interrupted."""
    prepared = prepare(request)
    bounds = bounds_of(prepared)
    search = plan(prepared.kinds, bounds, prepared.demand, len(prepared.conditions.rows))
    context = prepared.conditions.digest_of()
    with Checkpoint(checkpoint) as kept, messages.status("planning") as status:
        known, done = len(kept.points), 0

        def tell(_: object) -> None:
            nonlocal done
            done += 1
            status.update(f"planning: {done} runs simulated, {known} known before")

        try:
            with simulating(prepared.conditions, processes or len(os.sched_getaffinity(0))) as simulate:
                return drive(search, simulate, kept, context, tell)
        except KeyboardInterrupt:
            where = (
                "no --checkpoint was named: it begins anew" if checkpoint is None else f"kept in {checkpoint}"
            )
            raise Interrupted(f"interrupted after {done} runs, {where}") from None
