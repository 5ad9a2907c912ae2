"""How far simulated runs are off the live ones, as people read it."""

import math
from collections.abc import Collection, Mapping, Sequence

from common.latency import Distribution
from services.compare.simulated import Pair
from services.compare.simulated_mesh import Overhead
from services.simulator.host import HostConfig

RELATIVE, POINTS = 0.09, 2.0
"""From where on an error is bold: of latencies, and of attainment."""
PERCENTILES = {"p50_s": "p50", "p95_s": "p95"}
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "end_to_end": "end to end"}


def errors_table(pairs: Sequence[Pair], fitted: Collection[str] = ()) -> str:
    """A row a run: what was live, and by how much the simulated one is off; the pace, where one is not 1.
    Then how many are near, without the workloads that something was ``fitted`` to."""
    is_paced = any(pair.pace != 1.0 for pair in pairs)
    pace, rule = (" pace |", " --- |") if is_paced else ("", "")
    lines = [
        f"| workload | configuration | requests/s |{pace} TTFT p50, p95, s | TPOT p50, p95, ms"
        " | end to end p50, p95, s | within objectives |",
        f"| --- | --- | --- |{rule} --- | --- | --- | --- |",
    ]
    for pair in pairs:
        load = pair.record.load
        workload = pair.record.workload + (" (fitted)" if pair.record.workload in fitted else "")
        columns = [workload, pair.record.configuration, f"{load.requests_per_s:.2f}"]
        columns += [
            _cell(pair, name, scale, digits)
            for name, scale, digits in (("ttft", 1.0, 2), ("tpot", 1e3, 1), ("end_to_end", 1.0, 2))
        ]
        points, attainment = pair.attainment_points, load.attainment
        if is_paced:
            columns.insert(3, f"{pair.pace:.2f}")
        share = "–" if attainment is None else f"{100 * attainment.share:.1f} %"
        columns.append(share if points is None else f"{share} ({_bold(f'{points:+.1f}', points, POINTS)})")
        lines.append(f"| {' | '.join(columns)} |")
    judged = [pair for pair in pairs if pair.record.workload not in fitted]
    return "\n".join([*lines, *_counts(judged)]) + "\n"


def _counts(judged: Sequence[Pair]) -> list[str]:
    if not judged:
        return []
    near = []
    for name, shown in NAMES.items():
        within = (
            f"{sum(abs(pair.errors(key).get(name, math.inf)) <= RELATIVE for pair in judged)} ({percentile})"
            for key, percentile in PERCENTILES.items()
        )
        near.append(f"{shown} in {' and '.join(within)}")
    off = (pair.attainment_points for pair in judged)
    points = sum(each is not None and abs(each) <= POINTS for each in off)
    return [
        "",
        f"Of {len(judged)} runs that nothing was fitted to, within {100 * RELATIVE:.0f} %: {', '.join(near)};"
        f" within {POINTS:.0f} points: {points}.",
    ]


def _bold(text: str, value: float, limit: float) -> str:
    return f"**{text}**" if abs(value) > limit else text


def _cell(pair: Pair, name: str, scale: float, digits: int) -> str:
    live: Distribution | None = getattr(pair.record.load, name)
    if live is None:
        return "–"
    shown = (f"{scale * value:.{digits}f}" for value in (live.p50_s, live.p95_s))
    off = (pair.errors(percentile).get(name) for percentile in PERCENTILES)
    errors = ("–" if each is None else _bold(f"{100 * each:+.1f} %", each, RELATIVE) for each in off)
    return f"{', '.join(shown)} ({', '.join(errors)})"


def describe_overheads(overheads: Mapping[str, Overhead]) -> str:
    lines = []
    for name, each in overheads.items():
        own = f"{1e3 * each.pass_s:.2f} ms a pass beside the profile's, {1e3 * each.hop_s:.2f} ms a message"
        lines.append(f"{name}: {own}{'' if each.host is None else _describe_host(each.host)}")
    return "\n".join(lines)


def _describe_host(host: HostConfig) -> str:
    return (
        f"; of {host.cores} cores {host.idle_cores:.3f} idle, {1e3 * host.pass_s:.2f} ms a pass,"
        f" {1e3 * host.token_s:.2f} a token, {1e3 * host.prompt_s:.2f} a prompt,"
        f" {1e6 * host.prompt_token_s:.0f} µs each of its tokens;"
        f" while more are wanted {1e3 * host.wake_s:.2f} ms a message and {1e3 * host.exchange_s:.2f} a layer"
        " more"
    )
