"""A run's figures for people (a table in the terminal) and for programs (one JSON file)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from common.latency import Distribution, ServiceObjectives
from services.bench.client import Outcome
from services.bench.run import BenchRun
from services.bench.summary import BUSY_CLIENT_SHARE, LATE_S, BenchResult, LoadResult

FORMAT_VERSION = 1
COALESCED = 1.02
"""Above so many tokens an event, the gaps are between events rather than tokens, and the report says so."""

MEASURES = (
    ("TTFT", "ttft", "time to first token"),
    ("TPOT", "tpot", "time per output token, a request's mean"),
    ("TBT", "tbt", "every gap between tokens"),
    ("E2E", "end_to_end", "end to end"),
)


class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request in the JSON file. Times are seconds from the run's start."""

    load: str
    index: int
    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    sent_s: float
    finished_s: float
    token_times_s: list[float]
    counted_output_tokens: int
    failure: str | None = None
    message: str | None = None
    is_cut: bool = False


class ReportFile(msgspec.Struct, frozen=True):
    """The JSON file: the figures, and with ``--json-requests`` every request behind them."""

    version: int
    result: BenchResult
    requests: list[RequestRecord] | None


def write_json(path: Path, run: BenchRun, *, with_requests: bool) -> None:
    records = [_record(one, run.started_s) for one in run.outcomes] if with_requests else None
    report = ReportFile(FORMAT_VERSION, run.result, records)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report, enc_hook=_encode_other), indent=2))


def read_json(path: Path) -> ReportFile:
    """Read a report back. msgspec.ValidationError for another file."""
    return msgspec.json.decode(path.read_bytes(), type=ReportFile, dec_hook=_decode_other)


def _encode_other(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"cannot write a {type(value).__name__} into the report")


def _decode_other(wanted: type[Any], value: object) -> object:
    if issubclass(wanted, Path) and isinstance(value, str):
        return Path(value)
    raise TypeError(f"cannot read a {wanted.__name__} from a report")


def _record(one: Outcome, started_s: float) -> RequestRecord:
    return RequestRecord(
        load=one.class_name,
        index=one.index,
        prompt_tokens=one.prompt_tokens,
        output_tokens=one.output_tokens,
        arrival_s=round(one.arrival_s - started_s, 6),
        sent_s=round(one.sent_s - started_s, 6),
        finished_s=round(one.finished_s - started_s, 6),
        token_times_s=[round(moment_s - started_s, 6) for moment_s in one.token_times_s],
        counted_output_tokens=one.counted_output_tokens,
        failure=None if one.failure is None else one.failure.kind,
        message=None if one.failure is None else one.failure.message,
        is_cut=one.is_cut,
    )


def print_report(console: Console, result: BenchResult) -> None:
    """The table of each load, and under it what the reader must know before trusting it."""
    for load in result.loads:
        console.print(render_load(load, result.config.objectives))
    for note in notes(result):
        console.print(Text.assemble(("! ", "bold yellow"), note))


def render_load(load: LoadResult, objectives: ServiceObjectives | None) -> RenderableType:
    parts: list[RenderableType] = [_latency_table(load), Text(), _rates(load)]
    if load.attainment is not None and objectives is not None:
        parts.append(_attainment_line(load, objectives))
    for failure in load.failures:
        parts.append(
            Text.assemble(("✗ ", "bold red"), f"{failure.count} × {failure.kind}: ", (failure.example, "dim"))
        )
    title = Text.assemble((load.name, "bold"), f" · {load.offered}")
    return Panel(Group(*parts), title=title, title_align="left", border_style="cyan", expand=False)


def _latency_table(load: LoadResult) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("ms")
    for heading in ("mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(heading, justify="right", style="bold" if heading in ("p50", "p99") else "")
    table.add_column("n", justify="right", style="dim")
    table.add_column("", style="dim")
    for label, name, meaning in MEASURES:
        measured: Distribution | None = getattr(load, name)
        if measured is None:
            table.add_row(label, *("–" for _ in range(6)), "0", meaning)
            continue
        values_s = (measured.mean_s, measured.p50_s, measured.p90_s, measured.p95_s, measured.p99_s)
        cells = [_milliseconds(value_s) for value_s in (*values_s, measured.maximum_s)]
        table.add_row(label, *cells, f"{measured.count:,}", meaning)
    return table


def _milliseconds(value_s: float) -> str:
    milliseconds = value_s * 1e3
    return f"{milliseconds:,.0f}" if milliseconds >= 1000 else f"{milliseconds:.2f}"


def _rates(load: LoadResult) -> Text:
    outcome = f"{load.served} served, {load.failed} failed" + (
        f", {load.cut} cut at the end" if load.cut else ""
    )
    return Text.assemble(
        (f"{load.output_tokens_per_s:,.1f} tok/s", "bold green"),
        f" out, {load.prompt_tokens_per_s:,.1f} tok/s in, {load.requests_per_s:,.2f} req/s · ",
        f"{load.requests} requests in {load.elapsed_s:,.1f} s: {outcome}",
    )


def _attainment_line(load: LoadResult, objectives: ServiceObjectives) -> Text:
    attainment = load.attainment
    assert attainment is not None
    each = ", ".join(
        f"{label} ≤ {bound_s * 1e3:g} ms: {share:.1%}"
        for label, bound_s, share in (
            ("TTFT", objectives.ttft_s, attainment.ttft_share),
            ("TPOT", objectives.tpot_s, attainment.tpot_share),
            ("every TBT", objectives.tbt_s, attainment.tbt_share),
            ("E2E", objectives.end_to_end_s, attainment.end_to_end_share),
        )
        if bound_s is not None
    )
    return Text.assemble(
        (f"goodput {load.goodput_per_s or 0.0:,.2f} req/s", "bold green"),
        f", attainment {attainment.share:.1%} ({each})",
    )


def notes(result: BenchResult) -> Iterator[str]:
    """What makes a figure mean less than it seems, in words."""
    if result.is_interrupted:
        yield "interrupted: figures are of what was served by then"
    if result.client_cpu_share > BUSY_CLIENT_SHARE:
        yield (
            f"this client used {result.client_cpu_share:.0%} of a core: its own times are suspect, "
            f"offer less or use several clients"
        )
    for load in result.loads:
        yield from _load_notes(load)


def _load_notes(load: LoadResult) -> Iterator[str]:
    if load.late and load.lateness is not None:
        yield (
            f"{load.name}: {load.late} of {load.requests} requests were sent more than "
            f"{LATE_S * 1e3:g} ms late (p99 {load.lateness.p99_s * 1e3:.1f} ms, "
            f"most {load.lateness.maximum_s * 1e3:.1f} ms); TTFT and E2E count from when they were due"
        )
    if load.tokens_per_event is not None and load.tokens_per_event > COALESCED:
        yield f"{load.name}: {load.tokens_per_event:.2f} tokens an event: TBT is the gap between events"
    if load.without_usage:
        yield f"{load.name}: {load.without_usage} responses came without usage: tokens are events there"
    if load.other_prompt_length:
        counted = load.other_prompt_length
        yield f"{load.name}: in {counted} requests the server counts another prompt length than was sent"
    if load.without_done:
        yield f"{load.name}: {load.without_done} streams ended without [DONE]"
    if load.truncated.requests:
        yield (
            f"{load.name}: {load.truncated.requests} requests were cut to the context, by "
            f"{load.truncated.prompt_tokens:,} prompt and {load.truncated.output_tokens:,} output tokens"
        )
