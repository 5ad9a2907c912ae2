"""The ``profile`` command: measures a model on this machine for instances, schedulers and planners to use."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from common.config import Dtype
from common.config_file import load_config
from common.errors import ConfigError
from services.printing import output_console

if TYPE_CHECKING:
    from common.config import Config
    from common.profile import Contention, HandOverTimes

BESIDE_PER_S = 50
"""A neighbour's passes, in what is printed."""
OF_OPERATORS = ("output", "tp", "max_tokens", "max_context", "max_batch", "limit_s", "communication")


def profile(
    context: typer.Context,
    model: Annotated[
        Path | None,
        typer.Option(help="A local transformers directory; of operators a catalogue's shape, too."),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights; default bf16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")] = None,
    rounds: Annotated[int, typer.Option(help="Times that every case is measured.", min=1, max=100)] = 5,
    config: Annotated[Path | None, typer.Option(help="Settings of the instances (TOML).")] = None,
    hand_overs: Annotated[bool, typer.Option(help="Measure hand-overs, in two meshes of two.")] = True,
    operators: Annotated[
        bool, typer.Option("--operators", help="Measure each operator instead, into --output.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Operators: the folder of their files.")] = None,
    tp: Annotated[str, typer.Option(help="Operators: degrees of tensor parallelism.")] = "1",
    max_tokens: Annotated[int, typer.Option(help="Operators: of a pass.")] = 2048,
    max_context: Annotated[int, typer.Option(help="Operators: of a sequence.")] = 4096,
    max_batch: Annotated[int, typer.Option(help="Operators: decodes at once.")] = 64,
    limit_s: Annotated[float, typer.Option(help="Operators: no new round after it.", min=1)] = 150.0,
    communication: Annotated[
        bool, typer.Option(help="Operators: messages between processes, or CUDA devices.")
    ] = True,
) -> None:
    """Measure a model on this machine: chunk and step times, saturation length, fitted models, hand-overs; or
    its operators, of any shard."""
    settings = load_config(config)
    given = settings.model
    if model is not None:
        given = msgspec.structs.replace(given, directory=model)
    if dtype is not None:
        given = msgspec.structs.replace(given, dtype=dtype)
    if device is not None:
        given = msgspec.structs.replace(given, device=device)
    settings = msgspec.structs.replace(settings, model=given)
    if operators:
        from services.profiling.operators_command import OperatorOptions, profile_operators_of

        sizes = (max_tokens, max_context, max_batch)
        profile_operators_of(settings, OperatorOptions(output, tp, sizes, rounds, limit_s, communication))
        return
    _check_of_passes(context)
    _profile_passes(settings, rounds, hand_overs)


def _check_of_passes(context: typer.Context) -> None:
    """Raises ConfigError."""
    for name in OF_OPERATORS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            given = context.params[name]
            if isinstance(given, Path):
                given = str(given)
            if given is False:
                option, given = f"--no-{option[2:]}", True
            raise ConfigError(option, given, "is of --operators: passes know nothing of it")


def _profile_passes(settings: "Config", rounds: int, hand_overs: bool) -> None:
    from common.model.device import accelerator_name
    from common.model.precision import precision_of
    from common.profile import profile_path, read_profile, write_profile
    from services.model_directory import model_directory
    from services.prepare import prepare_model
    from services.profiling.measured import rows_of
    from services.profiling.profiler import measure_profile

    messages = Console(stderr=True)
    given = settings.model
    instance = msgspec.structs.replace(settings.instance, engine="model", attention_workers=0)
    settings = msgspec.structs.replace(settings, instance=instance)
    with messages.status("preparing the model"):
        prepare_model(settings, lambda stage: None)
    directory = model_directory(given)
    with Progress(console=messages) as bar:
        task = bar.add_task("measuring", total=rounds)
        found = asyncio.run(
            measure_profile(
                settings,
                directory,
                rounds,
                lambda done, of: bar.update(task, completed=done, total=of),
                tell=messages.print,
            )
        )
    path = profile_path(given, directory, precision_of(given).compute, accelerator_name(given.device))
    former = read_profile(path)
    found = msgspec.structs.replace(found, hand_over=former.hand_over if former is not None else None)
    # Before the hand-overs: instances are to have their chunks' length from it.
    write_profile(path, found)
    if hand_overs:
        found = msgspec.structs.replace(found, hand_over=_measure_hand_overs(settings, rounds, messages))
        write_profile(path, found)
    table = Table(title=f"{found.model}, {found.dtype}, {found.machine}", title_justify="left")
    for column in ("", "tokens", "ms", "tokens/s"):
        table.add_column(column, justify="right")
    for row in rows_of(found):
        table.add_row(*row)
    output_console().print(table)
    print(
        f"saturation length (L_m, ChunkSize): {found.saturation_tokens} tokens\n"
        f"chunk = {_law(found.chunk_time.coefficients, ('ms/1,000 tokens', 'ms/1,000,000 pairs', 'ms'))},"
        f" held-out error {found.chunk_held_out_error:.1%}\n"
        f"step = {_law(found.step_time.coefficients, ('ms/1,000 tokens of context', 'ms/sequence', 'ms'))},"
        f" held-out error {found.step_held_out_error:.1%}\n"
        f"{_contention_text(found.contention)}{_hand_over_text(found.hand_over)}{path}"
    )


def _measure_hand_overs(config: "Config", rounds: int, messages: Console) -> "HandOverTimes":
    from common.spec import read_spec, served_context_length
    from services.model_directory import model_directory
    from services.profiling.hand_over_times import PROMPT_TOKENS, measure_hand_overs

    spec = read_spec(model_directory(config.model))
    context_length = served_context_length(spec, config.model.context_length)
    with Progress(console=messages) as bar:
        task = bar.add_task("handing over", total=2 * rounds * len(PROMPT_TOKENS))

        @contextmanager
        def stage(text: str) -> Iterator[None]:
            bar.update(task, description=text)
            yield

        return measure_hand_overs(
            config,
            context_length,
            rounds,
            stage,
            lambda done: bar.update(task, completed=done, description="handing over"),
        )


def _hand_over_text(times: "HandOverTimes | None") -> str:
    if times is None:
        return ""
    lines = [
        f"until the second token of {tokens:,}: {1e3 * serialized:.0f} ms in one piece,"
        f" {1e3 * layerwise:.0f} layer by layer"
        for tokens, serialized, layerwise in times.until_second_s
    ]
    best = times.layerwise_min_tokens
    lines.append("handed over layer by layer " + ("never" if best is None else f"from {best:,} tokens on"))
    return "\n".join(lines) + "\n"


def _contention_text(found: "Contention | None") -> str:
    if found is None:
        return ""
    return (
        f"while another process computes {BESIDE_PER_S} passes a second, a pass takes"
        f" {1e3 * BESIDE_PER_S * found.s_per_rate:.2f} ms and {found.share:.1%} of its time longer\n"
    )


def _law(coefficients: tuple[float, ...], units: tuple[str, ...]) -> str:
    return " + ".join(f"{1e3 * each:.3g} {unit}" for each, unit in zip(coefficients, units, strict=True))
