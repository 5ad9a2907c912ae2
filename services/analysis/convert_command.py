"""The ``convert`` command: converts a model into the cache and, asked to, shows how it was cut."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from common.config import Config, Dtype
from common.config_file import load_config
from common.errors import ConfigError
from common.model.cache import cached_conversion
from common.model.precision import precision_of
from common.model.report import ConversionReport, Kept, Operator, Sent, SliceReport, load_report
from services.analysis.slice_classes import SliceClass, computing, fold_slices, label, producer
from services.analysis.slice_picture import draw_slices
from services.model_directory import model_directory

DEFAULT_MODEL = "default"
FORMAT_VERSION = 1


class Crossing(msgspec.Struct, frozen=True):
    """Bytes of one token between the model and one layer's attention."""

    q: int
    k: int
    v: int
    output: int

    @property
    def total(self) -> int:
        return self.q + self.k + self.v + self.output


class ExplanationFile(msgspec.Struct, frozen=True):
    """What ``--json`` prints. ``crossings`` are per layer."""

    version: int
    model: str
    conversion: str
    crossings: tuple[Crossing, ...]
    report: ConversionReport


def convert(
    model: Annotated[str, typer.Argument(help="A transformers directory, or default.")] = DEFAULT_MODEL,
    explain: Annotated[bool, typer.Option("--explain", help="Show the slices and their cuts.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a picture of the graph with the cuts.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The explanation, for programs.")] = False,
    dtype: Annotated[Dtype | None, typer.Option(help="As the server would take it.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A TOML file of settings.")] = None,
) -> None:
    """Cut a model at its attentions into slices, as serving it does, and say where they are kept."""
    settings = _settings(load_config(config), model, dtype)
    with Console(stderr=True).status("model") as status:

        def progress(stage: str) -> None:
            status.update(f"model: {stage} (once)")

        directory = model_directory(settings.model, progress)
        element_type = precision_of(settings.model).compute
        conversion = cached_conversion(directory, element_type, settings.model.cache_directory, progress)
    report = load_report(conversion)
    if svg is not None:
        _write(svg, draw_slices(directory.name, report))
    console = Console()
    if as_json:
        crossings = tuple(crossing(report, layer) for layer in range(len(report.attentions)))
        content = ExplanationFile(FORMAT_VERSION, directory.name, str(conversion), crossings, report)
        print(msgspec.json.format(msgspec.json.encode(content)).decode())
        return
    if explain:
        print_report(console, directory.name, report)
    console.print(f"converted: {conversion}", highlight=False, markup=False, soft_wrap=True)
    if svg is not None:
        console.print(f"picture: {svg}", highlight=False, markup=False, soft_wrap=True)


def _settings(config: Config, model: str, dtype: Dtype | None) -> Config:
    chosen = config.model
    if model != DEFAULT_MODEL:
        chosen = msgspec.structs.replace(chosen, directory=Path(model).expanduser().absolute())
    if dtype is not None:
        chosen = msgspec.structs.replace(chosen, dtype=dtype)
    return msgspec.structs.replace(config, model=chosen)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as exc:
        raise ConfigError("--svg", str(path), f"cannot be written: {exc.strerror}") from exc


def crossing(report: ConversionReport, layer: int) -> Crossing:
    """What layer ``layer`` sends to attention and receives, for one token."""
    piece, spec = report.slices[layer], report.attentions[layer]
    q, k, v = (sent.token_bytes if sent else 0 for sent in (piece.q, piece.k, piece.v))
    return Crossing(q, k, v, spec.heads * spec.head_dim * report.element_bytes)


# -- tables -------------------------------------------------------------------------------------------------


def print_report(console: Console, name: str, report: ConversionReport) -> None:
    layers = len(report.attentions)
    crossings = [crossing(report, layer) for layer in range(layers)]
    first = crossings[0]
    console.print(
        f"[bold]{escape(name)}[/]  {report.architecture}, {report.element_type}: {layers} attentions, "
        f"{layers + 1} slices, {_megabytes(report.weight_bytes)} of weights",
        highlight=False,
    )
    console.print(
        f"between model and attention, per token and layer: {first.total:,} bytes "
        f"(Q {first.q:,}, K {first.k:,}, V {first.v:,}, output {first.output:,}); "
        f"per token over all layers: {sum(each.total for each in crossings):,} bytes",
        highlight=False,
    )
    classes = fold_slices(report)
    console.print()
    console.print(_overview(report, classes))
    for each in classes:
        console.print()
        console.print(f"[bold]{_headline(each)}[/]", highlight=False)
        console.print(Padding(_details(report, each), (0, 0, 0, 2)))
    console.print()


def _overview(report: ConversionReport, classes: tuple[SliceClass, ...]) -> Table:
    table = Table(title="Slices", title_justify="left", title_style="bold", box=None)
    table.add_column("slices")
    for column in ("operators", "weights", "kept after it", "minimum cut", "step constants"):
        table.add_column(column, justify="right")
    for each in classes:
        piece = each.example
        after = report.slices[each.numbers[0] + 1].context if piece.layer is not None else ()
        table.add_row(
            each.title.split(" ", 1)[1],
            str(len(piece.operators)),
            _megabytes(piece.weight_bytes),
            "-" if piece.layer is None else f"{_bytes(after, is_step_constant=False):,} B/token",
            "-" if piece.least_bytes is None else f"{piece.least_bytes:,} B/token",
            "-" if piece.layer is None else f"{_bytes(after, is_step_constant=True):,} B/token",
        )
    return table


def _headline(each: SliceClass) -> str:
    title = each.title.capitalize()
    if each.attention is None:
        return f"{title}: the logits"
    spec = each.attention
    extra = "" if spec.window is None else f", window {spec.window}"
    extra += "" if spec.softcap is None else f", softcap {spec.softcap:g}"
    heads = f"{spec.heads} heads over {spec.kv_heads} KV heads of {spec.head_dim}{extra}"
    return f"{title}: attention with {heads}" + (f" (shown: {each.numbers[0]})" if each.numbers[1:] else "")


def _details(report: ConversionReport, each: SliceClass) -> Table:
    piece, number = each.example, each.numbers[0]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True, justify="right")
    if number:
        received = crossing(report, number - 1).output
        table.add_row("receives", "attention's output", f"{received:,} B")
    for line in _kept_rows(piece.context):
        table.add_row(*line)
    q_end, kv_end = piece.q_operators, piece.q_operators + piece.kv_operators
    if piece.layer is None:
        _add_operators(table, "computes", piece, 0, len(piece.operators))
        return table
    _add_operators(table, "before Q", piece, 0, q_end)
    table.add_row(*_send_row(piece, "Q", piece.q), style="bold cyan")
    _add_operators(table, "before K, V", piece, q_end, kv_end)
    for name, sent in (("K", piece.k), ("V", piece.v)):
        table.add_row(*_send_row(piece, name, sent), style="bold cyan")
    if len(piece.operators) > kv_end:
        _add_operators(table, "during attention", piece, kv_end, len(piece.operators))
    for line in _kept_rows(report.slices[number + 1].context, "keeps"):
        table.add_row(*line)
    return table


def _kept_rows(context: tuple[Kept, ...], word: str = "takes") -> Iterator[tuple[str, Text, str]]:
    for kept in context:
        kind = " (once a step)" if kept.is_step_constant else ""
        where = f" in {kept.module}" if kept.module else ""
        yield word, Text(f"{kept.name}{where}, {kept.shape}{kind}"), f"{kept.token_bytes:,} B"


def _add_operators(table: Table, stage: str, piece: SliceReport, start: int, stop: int) -> None:
    listed = computing(piece.operators[start:stop])
    if listed:
        table.add_row(f"{stage} ({stop - start})", Text(_chain(listed)), "")


def _chain(operators: list[Operator]) -> str:
    return " · ".join(label(operator) for operator in operators)


def _send_row(piece: SliceReport, name: str, sent: Sent | None) -> tuple[str, Text, str]:
    assert sent is not None, "only the last slice sends nothing"
    source = producer(piece, sent.operator)
    if sent.operator is None or source is None:
        return f"send {name}", Text("from the context"), f"{sent.token_bytes:,} B"
    operator = piece.operators[source]
    where = f" in {operator.module}" if operator.module else ""
    text = f"operator {source + 1} of {len(piece.operators)}: {label(operator)}{where}"
    return f"send {name}", Text(text), f"{sent.token_bytes:,} B"


def _bytes(context: tuple[Kept, ...], *, is_step_constant: bool) -> int:
    return sum(kept.token_bytes for kept in context if kept.is_step_constant == is_step_constant)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f} MB" if count >= 10_000 else f"{count:,} B"
