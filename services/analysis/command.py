"""The ``analyze`` command: options to an analysis, then tables for people or one JSON object for programs."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from common.cost import ELEMENT_BYTES, LINK_ASSUMPTIONS, Utilisation
from common.devices import DEVICES, Catalogue, DeviceSpec
from common.errors import ConfigError
from common.shapes import SHAPES
from services.analysis.figures import Analysis, AnalysisConfig, ThroughputPoint, analyse
from services.analysis.model_shape import read_shape
from services.analysis.paper_statements import ImpliedMfu, Statement, check_statements, table_3

FORMAT_VERSION = 1
MOST_DIGITS = 9
DEFAULT_RATIOS = "1:1,1:2,1:4,2:1,2:2,2:4,2:8,4:4,4:8"


class AnalysisFile(msgspec.Struct, frozen=True):
    """What ``--json`` prints."""

    version: int
    analysis: Analysis
    statements: tuple[Statement, ...]
    table_3: tuple[ImpliedMfu, ...]


def analyze(
    model: Annotated[str, typer.Argument(help=f"A model directory, or {', '.join(SHAPES)}.")],
    devices: Annotated[
        str, typer.Option(help=f"The first computes the model, others attention: {', '.join(DEVICES)}.")
    ] = "h100,h20",
    device_file: Annotated[
        Path | None, typer.Option(help="A TOML file of [\\[device]] tables: yours beside these.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8,32,128,300,512",
    context: Annotated[str, typer.Option(help="Context lengths, tokens.")] = "1024,4096,8192,32768",
    ratio: Annotated[str, typer.Option(help="a:b, devices for the model and for attention.")] = (
        DEFAULT_RATIOS
    ),
    dtype: Annotated[str, typer.Option(help=f"Of weights and KV: {', '.join(ELEMENT_BYTES)}.")] = "bf16",
    slack: Annotated[
        float | None, typer.Option(help="The share of the computing time that the link may take.")
    ] = None,
    mfu: Annotated[float, typer.Option(help="The share of peak FLOP/s that kernels reach.")] = 1.0,
    mbu: Annotated[float, typer.Option(help="The share of peak memory bandwidth they reach.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show what decoding a model costs on devices: roofline, link, batch, tokens per dollar.

    The papers' own statements are printed beside ours, each with a verdict.
    """
    from services.simulator.devices import read_device_file

    config = AnalysisConfig(
        devices=_parse_devices(devices, read_device_file(device_file)),
        batches=_parse_counts("--batch", batch),
        contexts=_parse_counts("--context", context),
        ratios=_parse_ratios(ratio),
        dtype=_parse_dtype(dtype),
        slack=None if slack is None else _checked("--slack", slack, math.inf),
        utilisation=Utilisation(_checked("--mfu", mfu, 1.0), _checked("--mbu", mbu, 1.0)),
    )
    analysis = analyse(read_shape(model, "MODEL"), config)
    statements, entries = check_statements(config.utilisation), table_3(config.utilisation)
    if as_json:
        content = AnalysisFile(FORMAT_VERSION, analysis, statements, entries)
        print(msgspec.json.format(msgspec.json.encode(content)).decode())
        return
    _print_tables(Console(), analysis, statements, entries)


def _parse_devices(text: str, catalogue: Catalogue) -> tuple[DeviceSpec, ...]:
    found = []
    for name in text.split(","):
        device = catalogue.get(name.strip().lower())
        if device is None or device in found:
            raise ConfigError("--devices", name, f"must be one of {', '.join(catalogue)}, each once at most")
        found.append(device)
    return tuple(found)


def _parse_counts(key: str, text: str) -> tuple[int, ...]:
    return tuple(_count(key, text, part) for part in text.split(","))


def _parse_ratios(text: str) -> tuple[tuple[int, int], ...]:
    found = []
    for part in text.split(","):
        a, _, b = part.partition(":")
        found.append((_count("--ratio", text, a), _count("--ratio", text, b)))
    return tuple(found)


def _count(key: str, text: str, part: str) -> int:
    digits = part.strip()
    is_count = digits.isascii() and digits.isdecimal() and len(digits) <= MOST_DIGITS
    if not is_count or int(digits) < 1:
        example = "a:b, like 1:2,2:4" if key == "--ratio" else "whole numbers, like 1,8,32"
        raise ConfigError(key, text, f"must be {example}, each from 1 to {10**MOST_DIGITS - 1}")
    return int(digits)


def _parse_dtype(dtype: str) -> str:
    if dtype not in ELEMENT_BYTES:
        raise ConfigError("--dtype", dtype, f"must be one of {', '.join(ELEMENT_BYTES)}")
    return dtype


def _checked(key: str, value: float, most: float) -> float:
    if not 0 < value <= most or math.isinf(value):
        raise ConfigError(key, value, "must be above 0" + (f" and at most {most:g}" if most == 1 else ""))
    return value


def _print_tables(
    console: Console, analysis: Analysis, statements: Sequence[Statement], entries: Sequence[ImpliedMfu]
) -> None:
    config, model = analysis.config, analysis.model
    console.print(
        f"[bold]{escape(model.name)}[/]  {model.parameters / 1e9:.3f} B parameters, "
        f"{analysis.weight_bytes / 1e9:.2f} GB of weights, {analysis.kv_token_bytes:,} bytes of KV per token "
        f"({config.dtype}, {model.layers} layers, {model.heads} heads over {model.kv_heads} KV heads)",
        highlight=False,
    )
    console.print(
        f"roofline at {config.utilisation.compute:.0%} of peak FLOP/s and {config.utilisation.memory:.0%} "
        "of memory bandwidth; times are lower bounds, bandwidths upper bounds",
        style="dim",
        highlight=False,
    )
    tables = (
        _device_table(config.devices),
        _model_table(analysis),
        _attention_table(analysis),
        *_link_tables(analysis),
        _batch_table(analysis),
        _throughput_table(analysis),
        _statement_table(statements),
        _implied_table(entries),
    )
    for table in tables:
        console.print()
        console.print(table)


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right")
    return table


def _device_table(devices: Sequence[DeviceSpec]) -> Group:
    columns = ("device", "TFLOPS", "GB", "GB/s", "W", "$/h", "chip GB/s", "net Gbit/s")
    table = _table("Devices", *columns)
    for each in devices:
        numbers = (each.bf16_tflops, each.memory_gb, each.memory_gb_s, each.power_w)
        rest = (f"{each.price_usd_h:.2f}", f"{each.interchip_gb_s:g}", f"{each.network_gbps:g}")
        cells = ("-" if number is None else f"{number:g}" for number in numbers)
        table.add_row(each.name, *cells, *rest)
    sources = (
        f"{each.name}: {each.figures_source}; price: {each.price_source}; network: {each.network_source}"
        for each in devices
    )
    return Group(table, Text("\n".join(sources), style="dim"))


def _model_table(analysis: Analysis) -> Table:
    columns = ("device", "batch", "GFLOP", "GB", "FLOP/B", "ms", "MFU", "bound by")
    table = _table("All but attention, one decode step", *columns)
    for point in analysis.model_points:
        table.add_row(
            f"{point.devices} {point.device}",
            str(point.batch),
            f"{point.flops / 1e9:.1f}",
            f"{point.bytes_moved / 1e9:.2f}",
            f"{point.flops / point.bytes_moved:.1f}",
            f"{point.step_s * 1e3:.3f}",
            f"{point.mfu:.1%}",
            "compute" if point.is_compute_bound else "memory",
        )
    return table


def _attention_table(analysis: Analysis) -> Table:
    columns = ("device", "batch", "context", "GFLOP", "GB", "FLOP/B", "ms", "of step", "bound by")
    table = _table("Attention, one decode step", *columns)
    for point in analysis.attention_points:
        table.add_row(
            f"{point.devices} {point.device}",
            str(point.batch),
            str(point.context),
            f"{point.flops / 1e9:.1f}",
            f"{point.bytes_moved / 1e9:.2f}",
            f"{point.flops / point.bytes_moved:.1f}",
            f"{point.step_s * 1e3:.3f}",
            f"{point.share:.0%}",
            "compute" if point.is_compute_bound else "memory",
        )
    return table


def _link_tables(analysis: Analysis) -> list[Table]:
    tables = []
    for assumptions in LINK_ASSUMPTIONS:
        points = [point for point in analysis.link_points if point.assumptions == assumptions.name]
        first = points[0]
        pools = f"{first.devices} + {first.devices} devices"
        title = f"Least bandwidth, GB/s ({assumptions.source}, slack {first.slack:.0%}), {pools}"
        contexts = analysis.config.contexts
        table = _table(title, "from, to", "batch", *(f"context {context}" for context in contexts))
        needed = {(point.attention_device, point.batch, point.context): point.gb_s for point in points}
        for device in analysis.config.attention_devices:
            for batch in analysis.config.batches:
                cells = (f"{needed[device.name, batch, context]:.2f}" for context in contexts)
                table.add_row(f"{first.model_device}, {device.name}", str(batch), *cells)
        tables.append(table)
    return tables


def _batch_table(analysis: Analysis) -> Table:
    columns = ("device", "context", "beside the weights", "KV alone", "devices that hold the weights")
    table = _table("Largest batch per device", *columns)
    for point in analysis.batch_points:
        beside = str(point.beside_weights) if point.devices_for_weights == 1 else "weights do not fit"
        count = str(point.devices_for_weights)
        table.add_row(point.device, str(point.context), beside, str(point.kv_alone), count)
    return table


def _throughput_table(analysis: Analysis) -> Table:
    contexts = analysis.config.contexts
    title = "Thousand tokens per dollar (largest batch, its step)"
    table = _table(title, "configuration", "$/h", *(f"context {context}" for context in contexts))
    best = {
        context: max((p.tokens_usd for p in analysis.throughput_points if p.context == context), default=0.0)
        for context in contexts
    }
    rows: dict[tuple[str, float], dict[int, str]] = {}
    for point in analysis.throughput_points:
        batch = f"{point.result.batch}, {point.result.step_s * 1e3:.3g} ms"
        cell = f"{point.tokens_usd / 1e3:.1f} ({batch})"
        is_best = point.tokens_usd == best[point.context]
        row = rows.setdefault((_configuration(point), point.result.price_usd_h), {})
        row[point.context] = f"[bold]{cell}[/]" if is_best else cell
    for (name, price), cells in rows.items():
        table.add_row(name, f"{price:.2f}", *(cells.get(context, "-") for context in contexts))
    return table


def _configuration(point: ThroughputPoint) -> str:
    if point.kind == "homogeneous":
        return f"{point.result.a} {point.model_device}, all"
    pools = f"{point.result.a} {point.model_device} + {point.result.b} {point.attention_device}"
    return f"{pools}, staggered" if point.kind == "staggered" else pools


def _statement_table(statements: Sequence[Statement]) -> Table:
    table = _table("The papers' statements", "statement", "reading", "paper", "ours", "", "remark", left=2)
    for one in statements:
        verdict = "[green]holds[/]" if one.holds else "[red]does not hold[/]"
        paper, ours = (f"{number:.4g} {one.unit}" for number in (one.paper, one.ours))
        table.add_row(f"{one.claim} [dim]({one.source})[/]", one.reading, paper, ours, verdict, one.remark)
    return table


def _implied_table(entries: Sequence[ImpliedMfu]) -> Table:
    columns = ("model", "batch", "paper GB/s", "implied MFU", "roofline MFU", "roofline GB/s")
    table = _table("Offloading, Table 3: the MFU that each entry implies, not fitted", *columns)
    for entry in entries:
        table.add_row(
            f"{entry.model} on {entry.devices} a100",
            str(entry.batch),
            f"{entry.paper_gb_s:.2f}",
            f"{entry.implied_mfu:.1%}",
            f"{entry.roofline_mfu:.1%}",
            f"{entry.roofline_gb_s:.2f}",
        )
    return table
