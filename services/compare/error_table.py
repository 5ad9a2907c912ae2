"""How far simulated runs are off the live ones, as people read it."""

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.latency import Distribution
from services.compare.between import Between
from services.compare.pass_rests import Rests
from services.compare.simulated import MOST_TOKEN_S, MOST_TURNS_SHARE, NEARLY_THE_MOST, Pair
from services.compare.simulated_mesh import Overhead
from services.simulator.host_config import HostConfig

RELATIVE, POINTS = 0.09, 2.0
"""From where on an error is bold: of latencies, and of attainment."""
PERCENTILES = {"p50_s": "p50", "p95_s": "p95"}
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "end_to_end": "end to end"}


@dataclass(frozen=True, slots=True)
class Rounds:
    """One configuration's runs of one workload, live and simulated: latencies by the medians of their
    figures, shares, rates and paces by their means."""

    workload: str
    configuration: str
    pairs: tuple[Pair, ...]

    def live(self, name: str, percentile: str) -> float | None:
        """Seconds. None: of no round was anything measured."""
        return _median(_figure(getattr(pair.record.load, name), percentile) for pair in self.pairs)

    def error(self, name: str, percentile: str) -> float | None:
        """Relative, over 0 where the simulated one is longer, of the rounds of which both were measured; None
        where there is none, or live it took no time. A table shows medians: they are what is compared, not
        rounds one by one."""
        both = [
            (live, virtual)
            for pair in self.pairs
            if (live := _figure(getattr(pair.record.load, name), percentile)) is not None
            and (virtual := _figure(getattr(pair.metrics, name), percentile)) is not None
        ]
        live_s, virtual_s = _median(live for live, _ in both), _median(virtual for _, virtual in both)
        return virtual_s / live_s - 1.0 if live_s and virtual_s is not None else None

    @property
    def attainment(self) -> float | None:
        """Of live requests, the share that met its objectives."""
        loads = [pair.record.load.attainment for pair in self.pairs]
        return _mean(None if each is None else each.share for each in loads)

    @property
    def attainment_points(self) -> float | None:
        """How many points more of the simulated requests met theirs."""
        points = _mean(pair.attainment_points for pair in self.pairs)
        return None if points is None else round(points, 6)

    def mean(self, of: Callable[[Pair], float]) -> float:
        """Over the rounds."""
        return statistics.fmean(of(pair) for pair in self.pairs)


def rounds_of(pairs: Iterable[Pair]) -> list[Rounds]:
    """In the order of their first ones."""
    found: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        found.setdefault((pair.record.workload, pair.record.configuration), []).append(pair)
    return [Rounds(*key, tuple(own)) for key, own in found.items()]


def _figure(found: Distribution | None, percentile: str) -> float | None:
    value: float | None = None if found is None else getattr(found, percentile)
    return value


def _median(values: Iterable[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return statistics.median(known) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return statistics.fmean(known) if known else None


def errors_table(
    pairs: Sequence[Pair], fitted: Collection[str] = (), between: Mapping[str, Between] | None = None
) -> str:
    """A row a workload of a configuration: what was live, and by how much the simulated one is off, by the
    medians of their rounds; the mean pace, where one is not 1. Then how many are near, without the workloads
    that something was ``fitted`` to, and how far the machine's own pace changed ``between`` runs."""
    is_paced = any(pair.pace != 1.0 for pair in pairs)
    pace, rule = (" pace |", " --- |") if is_paced else ("", "")
    lines = [
        f"| workload | configuration | requests/s |{pace} TTFT p50, p95, s | TPOT p50, p95, ms"
        " | end to end p50, p95, s | within objectives |",
        f"| --- | --- | --- |{rule} --- | --- | --- | --- |",
    ]
    found = rounds_of(pairs)
    for each in found:
        workload = each.workload + (" (fitted)" if each.workload in fitted else "")
        rate_per_s = each.mean(lambda pair: pair.record.load.requests_per_s)
        columns = [workload, each.configuration, f"{rate_per_s:.2f}"]
        columns += [
            _cell(each, name, scale, digits)
            for name, scale, digits in (("ttft", 1.0, 2), ("tpot", 1e3, 1), ("end_to_end", 1.0, 2))
        ]
        points, attainment = each.attainment_points, each.attainment
        if is_paced:
            columns.insert(3, f"{each.mean(lambda pair: pair.pace):.2f}")
        share = "–" if attainment is None else f"{100 * attainment:.1f} %"
        columns.append(share if points is None else f"{share} ({_bold(f'{points:+.1f}', points, POINTS)})")
        lines.append(f"| {' | '.join(columns)} |")
    judged = [each for each in found if each.workload not in fitted]
    return "\n".join([*lines, *_counts(judged), *_pace_changes(between or {})]) + "\n"


def _counts(judged: Sequence[Rounds]) -> list[str]:
    if not judged:
        return []
    near = []
    for name, shown in NAMES.items():
        within = (
            f"{sum(_off(each, name, key) <= RELATIVE for each in judged)} ({percentile})"
            for key, percentile in PERCENTILES.items()
        )
        near.append(f"{shown} in {' and '.join(within)}")
    off = (each.attainment_points for each in judged)
    points = sum(each is not None and abs(each) <= POINTS for each in off)
    most = max(len(each.pairs) for each in judged)
    medians = f", latencies by the medians of up to {most} rounds" if most > 1 else ""
    return [
        "",
        f"Of {len(judged)} rows that nothing was fitted to{medians}, within {100 * RELATIVE:.0f} %:"
        f" {', '.join(near)}; within {POINTS:.0f} points: {points}.",
    ]


def _pace_changes(between: Mapping[str, Between]) -> list[str]:
    shown = [
        f"{100 * each.pace_change:.1f} % ({name})"
        for name, each in between.items()
        if each.pace_change is not None
    ]
    if not shown:
        return []
    return [
        "",
        f"From part to part of the passes between runs the machine's pace changed by {', '.join(shown)}.",
    ]


def _off(each: Rounds, name: str, percentile: str) -> float:
    error = each.error(name, percentile)
    return math.inf if error is None else abs(error)


def _bold(text: str, value: float, limit: float) -> str:
    return f"**{text}**" if abs(value) > limit else text


def _cell(found: Rounds, name: str, scale: float, digits: int) -> str:
    live = [found.live(name, percentile) for percentile in PERCENTILES]
    shown = [f"{scale * value:.{digits}f}" for value in live if value is not None]
    if not shown:
        return "–"
    off = (found.error(name, percentile) for percentile in PERCENTILES)
    errors = ("–" if each is None else _bold(f"{100 * each:+.1f} %", each, RELATIVE) for each in off)
    return f"{', '.join(shown)} ({', '.join(errors)})"


def describe_overheads(overheads: Mapping[str, Overhead]) -> str:
    lines = []
    for name, each in overheads.items():
        own = f"{_describe_rests(each)}, {1e3 * each.hop_s:.2f} ms a message"
        lines.append(f"{name}: {own}{'' if each.host is None else _describe_host(each.host, each.hidden)}")
    return "\n".join(lines)


def _describe_rests(overhead: Overhead) -> str:
    """As they were counted, and what was found of who did not count."""
    found = [
        f"{each.role} {1e3 * each.pass_s:.2f} ms, {1e6 * each.token_s:.0f} µs a token,"
        f" {1e3 * each.prompt_s:.2f} ms a prompt"
        for each in overhead.rests
    ]
    if overhead.pass_s or overhead.token_s or not found:
        others = "others " if found else ""
        token = f", {1e6 * overhead.token_s:.0f} µs a token" if overhead.token_s else ""
        limit = _limit_note(overhead.token_s / MOST_TOKEN_S)
        found.append(f"{others}{1e3 * overhead.pass_s:.2f} ms{token}{limit}")
    late = f" and ends {1e3 * overhead.late_s:.2f} ms late" if overhead.late_s else ""
    return f"a pass rests {'; '.join(found)}{late}"


def _describe_host(host: HostConfig, hidden: Rests) -> str:
    limit = _limit_note(host.turns_share / MOST_TURNS_SHARE)
    turns = f"{100 * host.turns_share:.1f} % of a layer more{limit}"
    return (
        f"; of {host.cores} cores {host.idle_cores:.3f} idle, {1e3 * host.pass_s:.2f} ms a pass,"
        f" {1e3 * host.token_s:.2f} a token, {1e3 * host.prompt_s:.2f} a prompt,"
        f" {1e6 * host.prompt_token_s:.0f} µs each of its tokens; while engines rest"
        f" {1e3 * hidden.pass_s:.2f} ms a pass, {1e6 * hidden.token_s:.0f} µs a token,"
        f" {1e3 * hidden.prompt_s:.2f} ms a prompt of that; while more are wanted {turns}"
    )


def _limit_note(share: float) -> str:
    """``share``: of the most."""
    return " (the most that is looked for)" if share >= NEARLY_THE_MOST else ""
