"""``lamella profile --operators``: options to a request, a bar while it is measured, and what was found."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from common.config import Config
from common.errors import ConfigError
from common.shapes import ModelShape
from services.output_files import check_folder
from services.printing import output_console


@dataclass(frozen=True, slots=True)
class OperatorOptions:
    """``sizes``: the largest pass's tokens, context and batch."""

    output: Path | None
    tensor_parallel: str
    sizes: tuple[int, int, int]
    rounds: int
    limit_s: float
    has_messages: bool


def profile_operators_of(settings: Config, options: OperatorOptions) -> None:
    """Raises ConfigError."""
    if options.output is None:
        raise ConfigError("--output", None, "is needed: the folder that operators' files go to")
    check_folder("--output", options.output)
    from services.profiling.operators.profiling import OperatorsRequest, parse_degrees, profile_operators
    from services.profiling.operators.sizes import Effort, Limits

    messages = Console(stderr=True)
    shape = _shape_of(settings, messages)
    request = OperatorsRequest(
        shape=shape,
        tensor_parallel=parse_degrees(options.tensor_parallel),
        model=settings.model,
        block_size=settings.instance.block_size,
        limits=Limits(*options.sizes),
        effort=Effort(options.rounds, options.limit_s),
        has_messages=options.has_messages,
    )
    with Progress(console=messages) as bar:
        tasks: dict[str, TaskID] = {}

        def stage(text: str, share: float) -> None:
            if text not in tasks:
                tasks[text] = bar.add_task(text, total=1.0)
            bar.update(tasks[text], completed=share)

        files = profile_operators(request, options.output, stage)
    for degree in request.tensor_parallel:
        output_console().print(_table(options.output, shape, degree, options.has_messages))
    for path in files:
        print(path)
    print(f'performance = {{ kind = "operators", directory = "{options.output}" }}')


def _shape_of(settings: Config, messages: Console) -> ModelShape:
    from services.analysis.model_shape import read_shape
    from services.model_directory import model_directory
    from services.prepare import prepare_model

    if settings.model.directory is not None:
        return read_shape(str(settings.model.directory.expanduser()), "model.directory")
    with messages.status("preparing the model"):
        prepare_model(settings, lambda stage: None)
    return read_shape(str(model_directory(settings.model)))


def _table(directory: Path, shape: ModelShape, degree: int, has_messages: bool) -> Table:
    """What the estimator makes of the files."""
    from services.simulator.performance.vidur_files import files_in, read_vidur

    profile = read_vidur(files_in(directory), shape, degree, are_messages_measured=has_messages)
    table = Table(title=f"{shape.name}, a shard of {degree}", title_justify="left")
    for column in ("operator", "cases", "least ms", "most ms", "off on held-out data"):
        table.add_column(column, justify="left" if column == "operator" else "right")
    for samples, error in zip(profile.samples, profile.held_out(), strict=True):
        least, most = samples.values.min(), samples.values.max()
        row = (samples.operator, f"{len(samples.values):,}", f"{least:.3g}", f"{most:.3g}")
        table.add_row(*row, f"{error.mape:.1%}")
    return table
