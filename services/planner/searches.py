"""The papers' searches as ``lamella plan --search`` runs them: each with what it needs, and a table of what
it found."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import msgspec

from common.cost import kv_token_bytes
from common.devices import Catalogue
from common.errors import ConfigError
from common.latency import ServiceObjectives
from services.planner.attention_ratio import choose_ratio
from services.planner.bounds import capacity_bound
from services.planner.candidates import Deployment, InstanceKind, PoolPlan
from services.planner.demand import first_allowed, none_allowed, price_usd_h, provisioned_w
from services.planner.distserve_search import place_with_high_affinity, place_with_low_affinity
from services.planner.goodput import FINE, find_capacity, served_by
from services.planner.preparing import Prepared, bounds_of, speeds_of
from services.planner.probes import Search, Tally, Tell, together, untold
from services.planner.provisioning import (
    Provisioned,
    cheapest,
    designs_of,
    fewest_by_bounds,
    most_throughput,
)
from services.planner.run_length import check_length
from services.planner.samples import Sample
from services.planner.vidur_search import VidurPoint, search_capacities, within
from services.planner.worker_configuration import (
    MOST_WORKERS,
    ComputeLaw,
    best_workers,
    compute_law,
    worker_law,
)

SearchName = Literal["distserve-high", "distserve-low", "vidur", "splitwise", "aladdin", "lamina"]
SEARCHES: tuple[SearchName, ...] = get_args(SearchName)
FOR_A_RATE: tuple[SearchName, ...] = ("distserve-high", "distserve-low", "vidur", "aladdin")
WHOLE_AT_A_RATE: tuple[SearchName, ...] = ("splitwise", "aladdin")
"""Simulate the whole trace at the rate asked for, and ask whether work piles up."""
SOUGHT: Mapping[SearchName, str] = {
    "distserve-high": "goodput per GPU",
    "distserve-low": "goodput per GPU",
    "vidur": "requests per dollar",
    "aladdin": "tokens per GPU",
    "lamina": "tokens per dollar",
}
"""By those that have an objective of their own."""
NO_ATTAINMENT: Mapping[SearchName, str] = {
    "vidur": "percentiles of its own are to keep --slo: TTFT's, TPOT's and whole requests' 90th, gaps' 99th",
    "splitwise": "Table VI's percentiles are to be kept: the 50th, the 90th and the 99th",
    "lamina": "by the cost model alone all requests are alike",
}
"""Why no share of requests is looked at."""
LENGTH = 4.0
"""Of samples: these searches have one round."""
MOST_RATIO_DEVICES = 16
LAW_SHARES = (0.25, 0.5, 1.0)
NEARLY_NOTHING = 1e-9
"""Of the rate, at which workers are counted for Aladdin's line."""


class SearchReport(msgspec.Struct, frozen=True):
    """``rows``: best first. ``chosen``: what files are made for, where the search says how many of what."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[str, ...]
    chosen: tuple[PoolPlan, ...] = ()
    vidur: tuple[VidurPoint, ...] = ()


def search_of(name: SearchName, prepared: Prepared, tell: Tell = untold) -> Search[SearchReport]:
    """Raises ConfigError for an objective that it has not, and for a trace that is too short for its rate."""
    if name in FOR_A_RATE and prepared.demand.objective == "throughput":
        rule = f"{name} says how many instances a rate takes: splitwise's search is of the most throughput"
        raise ConfigError("--objective", "throughput", rule)
    if name in SOUGHT and prepared.demand.objective == "power":
        rule = f"{name} looks for the most {SOUGHT[name]}: splitwise's search is of the least power"
        raise ConfigError("--objective", "power", rule)
    if name in WHOLE_AT_A_RATE:
        check_length(prepared)
    return _SEARCHES[name](prepared, tell)


def _sample(prepared: Prepared) -> Sample:
    return Sample(len(prepared.conditions.rows), LENGTH)


def _distserve_high(prepared: Prepared, tell: Tell) -> Search[SearchReport]:
    kinds, demand = prepared.kinds, prepared.demand
    found = yield from place_with_high_affinity(
        kinds.prefill,
        kinds.decode,
        bounds_of(prepared),
        served_by(demand.goal),
        _sample(prepared),
        demand.rate_per_s,
        tell,
    )
    columns = ("phase", "instance", "goodput, req/s", "per GPU", "instances")
    if found is None:
        return SearchReport(
            "distserve-high", columns, (), ("no kind keeps the objectives of one of the phases",)
        )
    rows = tuple(
        (
            each.kind.role,
            str(each.kind),
            _number(each.goodput_per_s),
            _number(each.per_device),
            str(each.count),
        )
        for each in found.tried
    )
    # In whole instances the best of a GPU may take more of them than another.
    least = found.least(lambda each: demand.budget.share(each.parts))
    named = first_allowed(demand, (found.deployment, least))
    if named is None:
        return SearchReport("distserve-high", columns, rows, (none_allowed(demand, (least,)),))
    line = _best("distserve-high", f"{named}, {named.devices} GPUs")
    return SearchReport("distserve-high", columns, rows, (line,), named.pools)


def _distserve_low(prepared: Prepared, tell: Tell) -> Search[SearchReport]:
    kinds, demand = prepared.kinds, prepared.demand
    found = yield from place_with_low_affinity(
        kinds.prefill,
        kinds.decode,
        bounds_of(prepared),
        served_by(demand.goal),
        _sample(prepared),
        demand.rate_per_s,
        demand.catalogue,
        prepared.node_devices,
        tell,
    )
    rows = tuple(
        (str(each.deployment), _number(each.goodput_per_s), _number(each.per_device), str(each.count))
        for each in found
    )
    columns = ("pair", "goodput, req/s", "per GPU", "pairs")
    if not found:
        return SearchReport("distserve-low", columns, (), ("no pair that shares nodes keeps the objectives",))
    best = next((each for each in found if demand.allows(each.whole)), None)
    if best is None:
        line = none_allowed(demand, [each.whole for each in found])
        return SearchReport("distserve-low", columns, rows, (line,))
    line = _best("distserve-low", f"{best.count} × {best.deployment}")
    return SearchReport("distserve-low", columns, rows, (line,), best.whole.pools)


def _vidur(prepared: Prepared, tell: Tell) -> Search[SearchReport]:
    demand, objectives = prepared.demand, prepared.demand.objectives
    found = yield from search_capacities(
        prepared.kinds.mixed,
        bounds_of(prepared, has_objectives=False),
        demand.catalogue,
        _sample(prepared),
        tell=tell,
    )
    kept = {each.kind for each in within(found, objectives)}
    rows = tuple(
        (
            str(each.kind),
            _number(each.capacity_per_s),
            f"{each.requests_per_usd:.0f}",
            _number(each.ttft_p90_s),
            _number(each.tbt_p99_s),
            _number(each.tpot_p90_s),
            _number(each.end_to_end_p90_s),
            "yes" if each.kind in kept else "no",
        )
        for each in found
    )
    columns = (
        "instance",
        "capacity, req/s",
        "req/$",
        "TTFT P90, s",
        "gaps P99, s",
        "TPOT P90, s",
        "E2E P90, s",
        "keeps the SLO",
    )
    replicated = [
        _workers(each.kind, max(1, math.ceil(demand.rate_per_s / each.capacity_per_s)))
        for each in found
        if each.kind in kept
    ]
    best = first_allowed(demand, replicated)
    if best is None:
        line = none_allowed(demand, replicated) if kept else "none keeps the objectives at its capacity"
        return SearchReport("vidur", columns, rows, (line,), (), tuple(found))
    line = _best("vidur", str(best.pools[0].kind))
    return SearchReport("vidur", columns, rows, (line,), best.pools, tuple(found))


def _splitwise(prepared: Prepared, tell: Tell) -> Search[SearchReport]:
    """``prepared.conditions`` has the reference."""
    demand, bounds = prepared.demand, bounds_of(prepared, has_objectives=False)
    budget = demand.budget
    designs = designs_of(prepared.kinds, budget.within)
    requests = len(prepared.conditions.rows)
    slowdowns = ("TTFT, times", "TBT, times", "E2E, times")
    columns = ("design", "machines", "GPUs", "$/h", "kW", "req/s", *slowdowns)
    if demand.objective == "throughput":
        found = yield from most_throughput(designs, bounds, budget, requests, tell)
    else:
        found = yield from cheapest(designs, bounds, demand.cost, demand.rate_per_s, requests, budget, tell)
    rows = tuple(_provisioned_row(each, demand.catalogue) for each in found)
    lines = []
    if demand.objectives != ServiceObjectives():
        lines.append("--slo is not looked at, Table VI's nine bounds are: --out alone writes it down")
    if not found:
        line = f"no design keeps the nine bounds of Table VI{budget.within}"
        rate_per_s = 0.0 if demand.objective == "throughput" else demand.rate_per_s
        least = [fewest_by_bounds(each, bounds, rate_per_s) for each in designs]
        if over := budget.least_over([each.parts for each in least if each is not None]):
            line += f": any takes at least {over}"
        return SearchReport("splitwise", columns, rows, (line, *lines))
    best = found[0]
    lines.insert(0, f"best by {demand.objective}: {best.design.name}, {best.deployment}")
    return SearchReport("splitwise", columns, rows, tuple(lines), best.deployment.pools)


def _provisioned_row(each: Provisioned, catalogue: Catalogue) -> tuple[str, ...]:
    watts = provisioned_w(each.deployment, catalogue)
    counts = [pool.count for pool in each.deployment.pools]
    machines = f"{counts[0]}P/T" if len(counts) == 1 else f"{counts[0]}P, {counts[1]}T"
    slowdowns = [f"{value:.2f}" for value in each.point.slowdowns]
    return (
        each.design.name,
        machines,
        str(each.deployment.devices),
        f"{price_usd_h(each.deployment, catalogue):.2f}",
        "unknown" if watts is None else f"{watts / 1e3:.1f}",
        _number(each.rate_per_s),
        *(" / ".join(slowdowns[part : part + 3]) for part in (0, 3, 6)),
    )


def _aladdin(prepared: Prepared, tell: Tell) -> Search[SearchReport]:
    demand, workload = prepared.demand, prepared.workload
    if demand.objectives.tpot_s is None:
        raise ConfigError("--slo tpot", None, "aladdin needs tpot: its time per token")
    kinds = _one_of_each(prepared.kinds.mixed)
    speeds = speeds_of(prepared, kinds)
    ranked = best_workers(kinds, speeds, workload, demand.objectives.tpot_s)
    columns = ("worker", "tokens/s per GPU", "batch", "step, s", "bound by")
    rows = tuple(
        (
            each.kind.hardware,
            _number(each.tokens_per_device_s),
            str(each.batch),
            _number(each.step_s),
            "time per token" if each.is_slo_bound else "KV memory",
        )
        for each in ranked
    )
    if not ranked:
        return SearchReport("aladdin", columns, (), ("no worker keeps the time per token",))
    best = ranked[0]
    same = [kind for kind in kinds if kind.device == best.kind.device]
    context = round(best.batch * workload.context_tokens)
    law = compute_law(same, speeds, best.batch, context)
    lines = [_best("aladdin", f"{best.kind}; {_equation_5(law)}")]
    if best.batch > best.kind.max_decode_batch:
        most = best.kind.max_decode_batch
        lines.append(
            f"equation 6's batch is {best.batch}, workers are simulated with up to {most}: [space] batches"
            " may have more"
        )
    bound = capacity_bound(best.kind, speeds[best.kind], workload, demand.objectives, demand.goal)
    served = served_by(demand.goal)
    pools = (PoolPlan(kind=best.kind, count=1),)
    capacity = find_capacity(
        _sample(prepared).of(pools, bound.sojourn_s), served, bound.rate_per_s, tolerance=FINE
    )
    [one] = yield from together([capacity], Tally(tell, "workers measured", 1))
    chosen: tuple[PoolPlan, ...] = ()
    if not one.rate_per_s > 0:
        lines.append("one worker by itself does not keep the objectives at any rate")
    else:
        rates = [share * demand.rate_per_s for share in LAW_SHARES]
        workers = yield from worker_law(
            best.kind, served, rates, len(prepared.conditions.rows), bound.rate_per_s, tell
        )
        if workers is None:
            lines.append(
                f"no line of workers over the rate (equation 7): up to {MOST_WORKERS} do not keep the"
                f" objectives at {demand.rate_per_s:g}/s, or at half or a quarter of it"
            )
        else:
            seen = ", ".join(f"{count} at {rate:.3g}/s" for rate, count in workers.seen)
            lines.append(
                f"workers = {law_text(workers.k5_s, workers.c5)} (equation 7), by {seen}:"
                f" {workers.workers(demand.rate_per_s)} at {demand.rate_per_s:g}/s"
            )
            replicated = (_workers(best.kind, workers.seen[-1][1]),)
            named = first_allowed(demand, replicated)
            if named is None:
                lines.append(none_allowed(demand, replicated))
            else:
                chosen = named.pools
    return SearchReport("aladdin", columns, rows, tuple(lines), chosen)


def _equation_5(law: ComputeLaw | None) -> str:
    if law is None:
        return "no equation 5: its workers all have one number of GPUs, and a line takes two"
    return f"its step takes {law.k4_s:.4g} s / GPUs + {law.c4_s:.4g} s (equation 5)"


def _one_of_each(kinds: Sequence[InstanceKind]) -> list[InstanceKind]:
    """Batching is not what is asked: the largest batch of each hardware."""
    found: dict[str, InstanceKind] = {}
    for kind in sorted(kinds, key=lambda kind: (kind.mixed_policy == "chunked", kind.max_decode_batch, kind)):
        found[kind.hardware] = kind
    return sorted(found.values())


def _lamina(prepared: Prepared, tell: Tell) -> Search[SearchReport]:
    demand, workload, shape = prepared.demand, prepared.workload, prepared.conditions.shape
    context = max(1, round(workload.context_tokens))
    found = choose_ratio(
        shape,
        context,
        prepared.conditions.element_bytes,
        prepared.devices,
        most_devices=demand.budget.max_devices or MOST_RATIO_DEVICES,
        step_s=demand.objectives.tpot_s,
    )
    found = [each for each in found if demand.budget.allows(each.parts)]
    columns = ("model", "attention", "(a, b)", "batch", "step, s", "tokens/s", "tokens/$")
    rows = tuple(
        (
            each.model_device,
            each.attention_device or "the same",
            str(each.dop) if each.attention_device else str(each.devices),
            str(each.throughput.batch),
            _number(each.throughput.step_s),
            f"{each.throughput.tokens_s:.0f}",
            f"{each.tokens_usd:.0f}",
        )
        for each in found
    )
    yield from ()
    if not found:
        also = f" and{demand.budget.within}" if demand.budget.limits else ""
        line = f"no ratio holds the model within the time per token{also}"
        return SearchReport("lamina", columns, (), (line,))
    token_mib = kv_token_bytes(shape, prepared.conditions.element_bytes) / (1 << 20)
    apart = next((each for each in found if each.attention_device), None)
    whole = next((each for each in found if not each.attention_device), None)
    lines = [
        f"contexts of {context} tokens on average, {token_mib:.2f} MiB of KV a token; by the cost model alone"
    ]
    if apart is not None and whole is not None:
        gain = 100 * (apart.tokens_usd / whole.tokens_usd - 1)
        pays = "pays" if gain > 0 else "does not pay here"
        lines.append(
            f"attention on devices of its own {pays}: {apart.dop} of {apart.model_device} and"
            f" {apart.attention_device}, {gain:+.1f} % tokens per dollar over {whole.devices}"
            f" {whole.model_device}"
        )
    if prepared.ignored:
        lines.append(
            f"not looked at: {' and '.join(prepared.ignored)}; ratios are of up to"
            f" {demand.budget.max_devices or MOST_RATIO_DEVICES} devices (--max-gpus)"
        )
    if demand.objectives != ServiceObjectives(tpot_s=demand.objectives.tpot_s):
        lines.append("of --slo tpot alone is looked at, as what a step may take")
    return SearchReport("lamina", columns, rows, tuple(lines))


def _workers(kind: InstanceKind, count: int) -> Deployment:
    return Deployment((PoolPlan(kind=kind, count=count),))


def _best(name: SearchName, found: str) -> str:
    return f"best by {SOUGHT[name]}: {found}"


def _number(value: float) -> str:
    return f"{value:.3g}"


_SEARCHES: dict[SearchName, Callable[[Prepared, Tell], Search[SearchReport]]] = {
    "distserve-high": _distserve_high,
    "distserve-low": _distserve_low,
    "vidur": _vidur,
    "splitwise": _splitwise,
    "aladdin": _aladdin,
    "lamina": _lamina,
}


def law_text(k5_s: float, c5: float) -> str:
    """Equation 7. What a fit leaves of nothing is no term."""
    slope, constant = (0.0 if abs(each) < NEARLY_NOTHING else each for each in (k5_s, c5))
    if not slope:
        return f"⌈{constant:.3g}⌉"
    return f"⌈{slope:.3g} · rate{f' {constant:+.3g}' if constant else ''}⌉"
