"""How far simulated runs are off the live ones, as people read it."""

from collections.abc import Mapping, Sequence

from common.latency import Distribution
from services.compare.simulated import Pair
from services.compare.simulated_mesh import Overhead
from services.simulator.host import HostConfig


def errors_table(pairs: Sequence[Pair]) -> str:
    """A row a run: what was live, and by how much the simulated one is off; the pace, where one is not 1."""
    is_paced = any(pair.pace != 1.0 for pair in pairs)
    pace, rule = (" pace |", " --- |") if is_paced else ("", "")
    lines = [
        f"| workload | configuration | requests/s |{pace} TTFT p50, p95, s | TPOT p50, p95, ms"
        " | end to end p50, p95, s | within objectives |",
        f"| --- | --- | --- |{rule} --- | --- | --- | --- |",
    ]
    for pair in pairs:
        load = pair.record.load
        columns = [pair.record.workload, pair.record.configuration, f"{load.requests_per_s:.2f}"]
        columns += [
            _cell(pair, name, scale, digits)
            for name, scale, digits in (("ttft", 1.0, 2), ("tpot", 1e3, 1), ("end_to_end", 1.0, 2))
        ]
        points, attainment = pair.attainment_points, load.attainment
        if is_paced:
            columns.insert(3, f"{pair.pace:.2f}")
        share = "–" if attainment is None else f"{100 * attainment.share:.1f} %"
        columns.append(share if points is None else f"{share} ({points:+.1f})")
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def _cell(pair: Pair, name: str, scale: float, digits: int) -> str:
    live: Distribution | None = getattr(pair.record.load, name)
    if live is None:
        return "–"
    shown = (f"{scale * value:.{digits}f}" for value in (live.p50_s, live.p95_s))
    off = (pair.errors(percentile).get(name) for percentile in ("p50_s", "p95_s"))
    return (
        f"{', '.join(shown)} ({', '.join('–' if each is None else f'{100 * each:+.1f} %' for each in off)})"
    )


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
        f" {host.worker_cores:.2f} cores a worker in steps; while more are wanted"
        f" {1e3 * host.wake_s:.2f} ms a message and {1e3 * host.exchange_s:.2f} a layer more"
    )
