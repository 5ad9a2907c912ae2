"""What ``lamella simulate`` prints: a run's tables, and several runs side by side."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from common.latency import Distribution
from services.simulator.config import Pool, Simulated
from services.simulator.hardware import HardwareMetrics
from services.simulator.history import FOR_GOOD, MeshChange
from services.simulator.metrics import Metrics
from services.simulator.operator_metrics import OperatorMetrics
from services.simulator.performance.roofline import Parallelism

UNKNOWN = "unknown"
SHOWN_CHANGES = 12
ANY_WIDTH = 10_000
"""Of a console on which every table fits."""


class Run(NamedTuple):
    """One configuration's."""

    name: str
    metrics: Metrics


def summary_of(metrics: Metrics) -> list[str]:
    lines = [
        f"{metrics.done} of {metrics.requests} requests done, {metrics.rejected} rejected, {metrics.failed}"
        f" failed, {metrics.continued} continuations, in {metrics.elapsed_s:.1f} virtual seconds:"
        f" {metrics.requests_per_s:.2f} requests/s, {metrics.tokens_per_s:.0f} tokens/s"
    ]
    for refusal in metrics.refusals:
        lines.append(f"{refusal.requests} rejected by {refusal.code}, the first: {refusal.message}")
    for failure in metrics.failures:
        lines.append(f"{failure.requests} failed by {failure.code}, the first: {failure.message}")
    if metrics.continued_by:
        causes = ", ".join(f"{times} by {cause}" for cause, times in metrics.continued_by.items())
        lines.append(f"continued elsewhere, or anew: {causes}")
    if metrics.changes:
        kinds = Counter(each.kind for each in metrics.changes)
        lines.append(f"changes of the mesh: {', '.join(f'{kind} {times}' for kind, times in kinds.items())}")
    if len(metrics.changes) > SHOWN_CHANGES:
        lines[-1] += f"; shown are {SHOWN_CHANGES}, those seldom or for good first, --json has all"
    if metrics.idle_faults:
        named = ", ".join(f"fault.{number}" for number in metrics.idle_faults)
        lines.append(f"befell nobody, as those that they name were not there, or the run was over: {named}")
    hits, computed = (
        sum(getattr(pool, name) for pool in metrics.pools) for name in ("hit_tokens", "chunk_tokens")
    )
    if hits:
        lines.append(f"{hits / (hits + computed):.1%} of all prompts' tokens were kept, and not computed")
    if metrics.moved:
        lines.append(
            f"{metrics.moved} sequences moved to another decode instance; {metrics.asked_to_leave} times one"
            " was asked to leave an instance that would run out of memory"
        )
    waits = [(pool.name, 1e3 * pool.admission_wait_s) for pool in metrics.pools if pool.admission_wait_s > 0]
    if waits:
        waited = ", ".join(f"{wait_ms:.1f} ms at {name}" for name, wait_ms in waits)
        lines.append(f"from a sequence's offer until it is in a decode batch: {waited}, on average")
    if metrics.attainment is not None and metrics.goodput_per_s is not None:
        share = metrics.attainment.share
        lines.append(f"{share:.1%} met every objective: goodput {metrics.goodput_per_s:.2f} requests/s")
    attention = metrics.attention
    if attention is not None:
        lines.append(
            f"{attention.workers} attention workers busy {attention.busy:.1%} (one of them"
            f" {attention.busiest:.1%}), model replicas {attention.replicas_busy:.1%};"
            f" {attention.network_hidden:.1%} of {attention.network_s:.1f} s between them hidden,"
            f" workers' links {attention.link_in:.1%} busy with KV, {attention.moves} moves"
        )
    hardware = metrics.hardware
    lines.append(
        f"{_known(hardware.requests_per_usd, '{:,.1f}')} requests per dollar,"
        f" {_known(hardware.requests_per_kwh, '{:,.1f}')} per kWh"
    )
    lines.append(f"records {metrics.digest[:16]}")
    return lines


def latency_table(metrics: Metrics) -> Table:
    table = Table("ms", "mean", "p50", "p90", "p95", "p99", "max", box=None)
    for name, spread in (
        ("TTFT", metrics.ttft),
        ("TPOT", metrics.tpot),
        ("second token", metrics.second_token),
        ("slowest gap", metrics.slowest_gap),
        ("prefill queue", metrics.queue),
        ("end to end", metrics.end_to_end),
    ):
        if spread is None:
            table.add_row(name, *["-"] * 6)
            continue
        values = (
            spread.mean_s,
            spread.p50_s,
            spread.p90_s,
            spread.p95_s,
            spread.p99_s,
            spread.maximum_s,
        )
        table.add_row(name, *(f"{1e3 * value:.1f}" for value in values))
    if metrics.tbt_s:
        table.add_row("TBT", "-", *(f"{1e3 * value:.1f}" for value in metrics.tbt_s), "-")
    return table


def pool_table(metrics: Metrics) -> Table:
    """``least, most``: busy, of the pool's instances. ``links``: out and in, busy with KV."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("pool", no_wrap=True)
    for title in ("role", "instances", "busy", "least, most", "batch", "KV peak", "preempted", "links"):
        table.add_column(title, overflow="fold")
    for pool in metrics.pools:
        busy = [each.busy for each in metrics.instances if each.pool == pool.name] or [0.0]
        table.add_row(
            pool.name,
            pool.role,
            str(pool.instances),
            f"{pool.busy:.1%}",
            _pair(min(busy), max(busy)),
            f"{pool.batch:.1f}",
            f"{pool.kv_peak:.1%}",
            str(pool.preempted),
            _pair(pool.link_out, pool.link_in),
        )
    return table


def change_table(changes: Sequence[MeshChange]) -> Table:
    """``SHOWN_CHANGES`` of them, by their times: deaths for good first, then the rarest kind's."""
    table = Table("at, s", "change", "instance", "what", box=None)
    times = Counter(each.kind for each in changes)

    def order_of(number: int) -> tuple[bool, int, int]:
        each = changes[number]
        return not each.detail.startswith(FOR_GOOD), times[each.kind], number

    numbers = sorted(range(len(changes)), key=order_of)
    for each in (changes[number] for number in sorted(numbers[:SHOWN_CHANGES])):
        table.add_row(f"{each.at_s:.1f}", each.kind, each.instance, each.detail)
    return table


def hardware_table(hardware: HardwareMetrics) -> Table:
    """The last row is of all pools."""
    table = Table("pool", "device", "devices", "MFU", "MBU", "mean kW", "$/h", box=None)
    for pool in hardware.pools:
        shares = (_known(value, "{:.1%}") for value in (pool.mfu, pool.mbu))
        paid = _power_and_price(pool.mean_w, pool.usd_h)
        table.add_row(pool.name, pool.device or UNKNOWN, f"{pool.devices:.4g}", *shares, *paid)
    devices = sum(pool.devices for pool in hardware.pools)
    table.add_row("all", "", f"{devices:.4g}", "", "", *_power_and_price(hardware.mean_w, hardware.usd_h))
    return table


def operator_table(operators: Sequence[OperatorMetrics]) -> Table:
    table = Table("pool", "operator", "passes", "tokens each", "ms each", "seconds", "share", box=None)
    for each in operators:
        table.add_row(
            each.pool,
            each.operator,
            f"{each.passes:,}",
            f"{each.tokens:,.1f}",
            f"{1e3 * each.seconds / each.passes:.3f}",
            f"{each.seconds:,.1f}",
            f"{each.share:.1%}",
        )
    return table


def _power_and_price(mean_w: float | None, usd_h: float | None) -> tuple[str, str]:
    return _known(None if mean_w is None else mean_w / 1e3, "{:.2f}"), _known(usd_h, "{:.2f}")


def _pair(one: float, other: float) -> str:
    """Shares, of as little width as a terminal has for a table of nine columns."""
    return f"{100 * one:.0f}, {100 * other:.0f}%"


def _known(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else form.format(value)


def pools_by_source(simulated: Simulated) -> list[list[Pool]]:
    """Together where their passes take what the same source says."""
    found: list[list[Pool]] = []
    for pool in simulated.pools:
        for others in found:
            if _source_of(others[0]) == _source_of(pool):
                others.append(pool)
                break
        else:
            found.append([pool])
    return found


def _source_of(pool: Pool) -> tuple[dict[str, Any], str | None, Parallelism]:
    return pool.config.performance, pool.config.device, pool.config.parallelism


def held_out_text(pools: Sequence[Pool]) -> str:
    """Of pools with one source, how far it is off where it was not fitted: computed now."""
    kind = pools[0].config.performance["kind"]
    named = f"{', '.join(pool.config.name for pool in pools)} ({kind})"
    errors = pools[0].held_out()
    if not errors:
        return f"{named}: nothing was fitted here"
    return "\n".join((f"{named}:", *(f"  {error}" for error in errors)))


def comparison_tables(runs: Sequence[Run], console: Console) -> Iterator[Table]:
    """A column for each run; in brackets how many times the first one's. Several tables, each with the first
    run in front, where one would be wider than the console."""
    first, *others = runs
    wide = console.options.update(width=ANY_WIDTH)
    while others:
        table, shown = comparison_table([first, others[0]]), 1
        while shown < len(others):
            wider = comparison_table([first, *others[: shown + 1]])
            if console.measure(wider, options=wide).maximum > console.width:
                break
            table, shown = wider, shown + 1
        yield table
        others = others[shown:]


def comparison_table(runs: Sequence[Run]) -> Table:
    table = Table("", *(run.name for run in runs), box=None)
    for label, scale, value_of in COMPARED:
        values = [value_of(run.metrics) for run in runs]
        if any(value is not None for value in values):
            table.add_row(label, *_beside_first(values, scale))
    return table


def _beside_first(values: Sequence[float | None], scale: float) -> Iterator[str]:
    first = values[0]
    for number, value in enumerate(values):
        if value is None:
            yield UNKNOWN
            continue
        shown = str(value) if isinstance(value, int) else f"{scale * value:.2f}"
        yield shown if number == 0 or not first else f"{shown} ({value / first:.2f}×)"


def _p50(spread: Distribution | None) -> float | None:
    return None if spread is None else spread.p50_s


def _p99(spread: Distribution | None) -> float | None:
    return None if spread is None else spread.p99_s


def _attainment(metrics: Metrics) -> float | None:
    return None if metrics.attainment is None else metrics.attainment.share


COMPARED: tuple[tuple[str, float, Callable[[Metrics], float | None]], ...] = (
    ("requests done", 1.0, lambda metrics: metrics.done),
    ("rejected", 1.0, lambda metrics: metrics.rejected),
    ("failed", 1.0, lambda metrics: metrics.failed),
    ("continued", 1.0, lambda metrics: metrics.continued),
    ("requests/s", 1.0, lambda metrics: metrics.requests_per_s),
    ("tokens/s", 1.0, lambda metrics: metrics.tokens_per_s),
    ("TTFT p50, ms", 1e3, lambda metrics: _p50(metrics.ttft)),
    ("TTFT p99, ms", 1e3, lambda metrics: _p99(metrics.ttft)),
    ("TPOT p50, ms", 1e3, lambda metrics: _p50(metrics.tpot)),
    ("TPOT p99, ms", 1e3, lambda metrics: _p99(metrics.tpot)),
    ("slowest gap p99, ms", 1e3, lambda metrics: _p99(metrics.slowest_gap)),
    ("prefill queue p99, ms", 1e3, lambda metrics: _p99(metrics.queue)),
    ("end to end p50, ms", 1e3, lambda metrics: _p50(metrics.end_to_end)),
    ("end to end p99, ms", 1e3, lambda metrics: _p99(metrics.end_to_end)),
    ("met every objective, %", 100.0, _attainment),
    ("goodput, requests/s", 1.0, lambda metrics: metrics.goodput_per_s),
    ("preempted", 1.0, lambda metrics: sum(pool.preempted for pool in metrics.pools)),
    ("moved", 1.0, lambda metrics: metrics.moved),
    ("mean kW", 1e-3, lambda metrics: metrics.hardware.mean_w),
    ("$/h", 1.0, lambda metrics: metrics.hardware.usd_h),
    ("requests per dollar", 1.0, lambda metrics: metrics.hardware.requests_per_usd),
    ("requests per kWh", 1.0, lambda metrics: metrics.hardware.requests_per_kwh),
)
"""What of runs is compared: its name, what it is multiplied by, and where it is."""
