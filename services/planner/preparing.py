"""Reads what a plan is asked for, and checks it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from common.devices import DEVICES, Catalogue, DeviceSpec
from common.errors import ConfigError
from common.latency import ServiceObjectives
from common.toml_tables import read_table
from services.analysis.model_shape import read_shape
from services.bench.arrivals import POISSON_BURSTINESS, check_burstiness
from services.bench.config import parse_objectives
from services.planner.attention_kinds import attention_kinds
from services.planner.bounds import Bound, Speed, capacity_bound
from services.planner.budget import budget_of
from services.planner.candidates import InstanceKind, Kinds, SearchSpace, devices_of, kinds_of, priced
from services.planner.demand import OBJECTIVES, Demand
from services.planner.simulating import Conditions, speed_of
from services.planner.sources import files_digest
from services.planner.workload import PlannedWorkload, rate_of, workload_of
from services.simulator.config import OWN_TABLES
from services.simulator.requested import Requested, requests_of

DEFAULT_GOAL = 0.9
NO_KINDS = Kinds((), (), ())
REFERENCE = InstanceKind(
    role="mixed", device="a100-sxm", tensor=8, chunk_tokens=2048, prefill_batching="saturation"
)
"""Splitwise's: a DGX-A100 (Table VI)."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """As the command's options have it. ``slo`` None: no objectives. ``catalogue``: in which devices are
    looked up. ``settings``: sections of a mesh's, ``[space]``, and ``[performance.DEVICE]`` of files
    ``beside``. ``has_reference``: requests are compared with REFERENCE. ``ends_early``: runs that cannot
    reach the goal are not run to their end. ``has_attention``: decode instances with attention workers are
    among the kinds. ``is_simulated``: else nothing is asked of a rate, nor of ``[space]``."""

    model: str
    requested: Requested
    slo: str | None
    devices: str
    catalogue: Catalogue = field(default_factory=lambda: DEVICES)
    prices: Mapping[str, Any] = field(default_factory=dict)
    objective: str = "cost"
    rate_per_s: float | None = None
    max_devices: int | None = None
    max_usd_h: float | None = None
    max_power_w: float | None = None
    goal: float = DEFAULT_GOAL
    settings: Mapping[str, Any] = field(default_factory=dict)
    beside: Path = Path()
    seed: int = 0
    burstiness: float = POISSON_BURSTINESS
    has_reference: bool = False
    ends_early: bool = True
    has_attention: bool = False
    is_simulated: bool = True


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that was read and checked. ``ignored``: what it says and nobody asks for."""

    demand: Demand
    conditions: Conditions
    workload: PlannedWorkload
    kinds: Kinds
    devices: tuple[DeviceSpec, ...]
    node_devices: int
    ignored: tuple[str, ...] = ()


def prepare(request: PlanRequest) -> Prepared:
    """Raises ConfigError, ModelError, TraceError."""
    shape = read_shape(request.model, "--model")
    catalogue = priced(request.catalogue, request.prices, "--prices")
    devices = devices_of(request.devices, catalogue)
    check_burstiness(request.burstiness, "poisson")
    objectives = ServiceObjectives() if request.slo is None else parse_objectives(request.slo)
    budget = budget_of(devices, request.max_devices, request.max_usd_h, request.max_power_w)
    if request.objective not in OBJECTIVES:
        raise ConfigError("--objective", request.objective, f"must be one of {', '.join(OBJECTIVES)}")
    rows = requests_of(request.requested, request.seed).requests
    workload = workload_of(rows)
    has_rate, has_space = request.rate_per_s is not None, "space" in request.settings
    is_rate_asked = request.is_simulated and (request.objective != "throughput" or has_rate)
    demand = Demand(
        objective=next(each for each in OBJECTIVES if each == request.objective),
        rate_per_s=rate_of(request.rate_per_s, workload) if is_rate_asked else 0.0,
        budget=budget,
        catalogue=catalogue,
        objectives=objectives,
        goal=request.goal,
    )
    space, rest = space_of(devices, request.settings)
    settings, performance = performance_of(rest, request.beside, catalogue)
    conditions = Conditions(
        shape=shape,
        rows=rows,
        objectives=objectives,
        settings=settings,
        performance=performance,
        performance_digest=digest_of(performance),
        seed=request.seed,
        burstiness=request.burstiness,
        goal=request.goal if request.ends_early else None,
        reference=REFERENCE if request.has_reference else None,
        catalogue=request.catalogue,
    )
    asked = {each.name for each in devices}
    used = asked | ({REFERENCE.device} if request.has_reference else set())
    unasked = tuple(f"--prices {name}" for name in request.prices if name not in asked)
    if not request.is_simulated:
        given = {
            "--rate": has_rate,
            "--burstiness": request.burstiness != POISSON_BURSTINESS,
            "[space]": has_space,
            "[performance]": bool(performance),
        }
        ignored = tuple(name for name, is_given in given.items() if is_given) + unasked
        return Prepared(demand, conditions, workload, NO_KINDS, devices, space.node_devices, ignored)
    ignored = tuple(f"[performance.{device}]" for device in performance if device not in used) + unasked
    kinds = kinds_of(space, shape, conditions.element_bytes, budget)
    if request.has_attention:
        apart = attention_kinds(space, shape, workload, conditions.element_bytes, demand)
        kinds = kinds._replace(attention=apart)
    return Prepared(demand, conditions, workload, kinds, devices, space.node_devices, ignored)


def space_of(
    devices: tuple[DeviceSpec, ...], settings: Mapping[str, Any]
) -> tuple[SearchSpace, dict[str, Any]]:
    """With what ``[space]`` says, and the other tables. Raises ConfigError."""
    rest = {key: value for key, value in settings.items() if key != "space"}
    table = settings.get("space", {})
    if not isinstance(table, Mapping):
        raise ConfigError("space", table, "must be a table")
    space: SearchSpace = read_table("space", {**table, "devices": ()}, SearchSpace)
    space = msgspec.structs.replace(space, devices=devices)
    for key in ("nodes", "node_devices"):
        if getattr(space, key) < 1:
            raise ConfigError(f"space.{key}", getattr(space, key), "must be 1 or more")
    if space.attention_ratios < 0:
        raise ConfigError("space.attention_ratios", space.attention_ratios, "must be 0 or more")
    for key in ("tensors", "pipelines", "batches", "policies", "chunks"):
        values = getattr(space, key)
        numbers = values if key in ("tensors", "pipelines", "batches") else [number for _, number in values]
        if not values or min(numbers) < 1:
            raise ConfigError(f"space.{key}", table.get(key), "must name at least one, of 1 or more")
    return space, rest


def performance_of(
    settings: Mapping[str, Any], beside: Path, catalogue: Catalogue
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Sections, and sources by device with their files' places in full. Raises ConfigError."""
    rest = {key: value for key, value in settings.items() if key != "performance"}
    for key, rule in NOT_HERE.items():
        if key in rest:
            raise ConfigError(f"--config {key}", rest[key], rule)
    tables = settings.get("performance", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError("performance", tables, "must be tables [performance.DEVICE]")
    for device, table in tables.items():
        if device not in catalogue:
            known = ", ".join(sorted(catalogue))
            raise ConfigError(f"--config performance.{device}", table, f"must be of one of {known}")
    placed = {
        device: {key: _placed(key, value, beside) for key, value in table.items()}
        for device, table in tables.items()
    }
    return rest, placed


NOT_HERE = {
    **dict.fromkeys(OWN_TABLES, "is of `lamella simulate` alone: no deployment that is planned has one"),
    "cluster": "is what a plan is to find",
    "pool": "is what a plan is to find",
    "device": "is of --device-file",
}
FILE_KEYS = ("mlp", "attention", "all_reduce", "send_recv", "path", "directory")
"""Of performance sources."""


def _placed(key: str, value: Any, beside: Path) -> Any:
    if key in FILE_KEYS and isinstance(value, str):
        return str((beside / Path(value).expanduser()).absolute())
    return value


def digest_of(performance: Mapping[str, Mapping[str, Any]]) -> str:
    """Of what all files hold that sources name: one may be measured anew under its old name. Raises
    ConfigError."""
    named = [value for table in performance.values() for key, value in table.items() if key in FILE_KEYS]
    try:
        return files_digest(Path(each) for each in named if isinstance(each, str))
    except OSError as exc:
        raise ConfigError("performance", str(exc.filename), f"cannot be read ({exc.strerror})") from exc


def speeds_of(prepared: Prepared, kinds: Sequence[InstanceKind]) -> dict[InstanceKind, Speed]:
    """A device's files are read once for each number of them."""
    by_hardware: dict[str, Speed] = {}
    for kind in kinds:
        if kind.hardware not in by_hardware:
            by_hardware[kind.hardware] = speed_of(kind, prepared.conditions)
    return {kind: by_hardware[kind.hardware] for kind in kinds}


def bounds_of(prepared: Prepared, *, has_objectives: bool = True) -> dict[InstanceKind, Bound]:
    """Of all kinds; without objectives of what they could compute at all."""
    demand, kinds = prepared.demand, [kind for role in prepared.kinds for kind in role]
    objectives = demand.objectives if has_objectives else ServiceObjectives()
    return {
        kind: capacity_bound(kind, speed, prepared.workload, objectives, demand.goal)
        for kind, speed in speeds_of(prepared, kinds).items()
    }
