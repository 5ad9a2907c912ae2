"""``lamella predictor train``: collects a target model's output lengths, trains the classifier on them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from common.config import Weights
from common.config_file import load_config
from common.errors import ConfigError

if TYPE_CHECKING:
    from common.config import Config
    from common.model.tokens import Tokenizer
    from services.length_predictor.collection import KnownLengths
    from services.length_predictor.training import Recipe, Sample, Trained

predictor_app = typer.Typer(help="The output length predictor.", no_args_is_help=True)

LENGTHS_FILE, CONFUSION_FILE = "lengths.jsonl", "confusion.png"
DEFAULT_TARGET = "default"


@predictor_app.callback()
def _predictor() -> None:
    """The output length predictor."""


@predictor_app.command("train")
def train_command(
    prompts: Annotated[Path, typer.Option(help="JSON lines, a JSON list or lines of text; .gz or not.")],
    output: Annotated[Path, typer.Option(help="Where lengths, weights and the picture go.")],
    target: Annotated[
        str, typer.Option(help="A server's URL, a model's directory, or default.", metavar="URL|MODEL")
    ] = DEFAULT_TARGET,
    model: Annotated[
        Path | None, typer.Option(help="With a URL: the directory of what it serves, for its tokenizer.")
    ] = None,
    granularity: Annotated[int, typer.Option(help="Tokens a bucket: 100, 200 or 400.")] = 200,
    max_tokens: Annotated[int, typer.Option(help="Bound of an output.", min=1)] = 512,
    limit: Annotated[int, typer.Option(help="Use so many prompts at most.", min=1)] = 500,
    epochs: Annotated[int, typer.Option(help="At most, of each training.", min=1)] = 30,
    temperature: Annotated[float, typer.Option(help="Of what is collected.", min=0, max=2)] = 1.0,
    concurrency: Annotated[int, typer.Option(help="Prompts at the target at once.", min=1)] = 32,
    config: Annotated[Path | None, typer.Option(help="Settings of the mesh that MODEL is run in.")] = None,
    weights: Annotated[
        Weights | None, typer.Option(help="In that mesh. int8: weight-only; w8a8: activations too.")
    ] = None,
) -> None:
    """Train the length classifier for a target model. What was collected before is not asked again."""
    from common.model.tokens import Tokenizer
    from services.length_predictor.buckets import GRANULARITIES
    from services.length_predictor.collection import KnownLengths
    from services.length_predictor.prompts import encode_prompts, read_prompts
    from services.model_directory import model_directory

    if granularity not in GRANULARITIES:
        raise ConfigError("--granularity", granularity, "must be 100, 200 or 400")
    is_url = "://" in target
    if model is not None and not is_url:
        raise ConfigError("--model", str(model), "is for a --target that is a URL: MODEL says it itself")
    if weights is not None and is_url:
        raise ConfigError("--weights", weights, "is for a MODEL: a server's URL has its own")
    settings = load_config(config)
    if weights is not None:
        settings = msgspec.structs.replace(
            settings, model=msgspec.structs.replace(settings.model, weights=weights)
        )
    if is_url and model is not None:
        settings = _serving(settings, "--model", model, "must be a model's directory")
    elif not is_url and target != DEFAULT_TARGET:
        rule = "must be http://… or https://…, a model's directory, or default"
        settings = _serving(settings, "--target", Path(target), rule)
    console = Console(stderr=True)
    directory = model_directory(settings.model)
    tokenizer = Tokenizer(directory)
    encoded = encode_prompts(read_prompts(prompts, limit), tokenizer)
    known = KnownLengths(output / LENGTHS_FILE, temperature)
    samples = _collect(console, target if is_url else settings, encoded, known, max_tokens, concurrency)
    recipe = _recipe(directory, tokenizer, granularity, max_tokens, epochs)
    trained = _train(console, samples, recipe)
    _write(output, trained)
    _report(trained, granularity)


def _serving(config: "Config", option: str, directory: Path, rule: str) -> "Config":
    path = directory.expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(option, str(directory), rule)
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, directory=path))


def _collect(
    console: Console,
    target: "str | Config",
    prompts: list[tuple[int, ...]],
    known: "KnownLengths",
    max_tokens: int,
    concurrency: int,
) -> "list[Sample]":
    from services.length_predictor.collection import collect_lengths
    from services.length_predictor.training import Sample

    missing = sum(known.length_of(prompt_ids, max_tokens) is None for prompt_ids in prompts)
    if missing:
        with _served(console, target) as url, _progress(console) as bar:
            task = bar.add_task("collecting", total=missing)
            refused = asyncio.run(
                collect_lengths(
                    url,
                    prompts,
                    known,
                    max_tokens=max_tokens,
                    concurrency=concurrency,
                    on_done=lambda: bar.advance(task),
                )
            )
        if refused:
            console.print(f"{refused} prompts were refused by the target and are left out")
    lengths = [(prompt_ids, known.length_of(prompt_ids, max_tokens)) for prompt_ids in prompts]
    return [Sample(prompt_ids, length) for prompt_ids, length in lengths if length is not None]


@contextmanager
def _served(console: Console, target: "str | Config") -> Iterator[str]:
    """The URL of the target; a model is served by a mesh of its own meanwhile."""
    if isinstance(target, str):
        yield target
        return
    from services.launcher.passing_mesh import passing_mesh

    with passing_mesh(target, console.status) as url:
        yield url


def _recipe(
    directory: Path, tokenizer: "Tokenizer", granularity: int, max_tokens: int, epochs: int
) -> "Recipe":
    from services.length_predictor.embeddings import token_embeddings
    from services.length_predictor.engine import WIDTH
    from services.length_predictor.training import Recipe
    from services.model_directory import model_identity

    return Recipe(
        target=model_identity(directory),
        vocab_size=tokenizer.vocab_size,
        granularity=granularity,
        max_tokens=max_tokens,
        epochs=epochs,
        embeddings=token_embeddings(directory, tokenizer.vocab_size, WIDTH),
    )


def _train(console: Console, samples: "list[Sample]", recipe: "Recipe") -> "Trained":
    from services.length_predictor.training import TRAININGS, train

    whole = TRAININGS * recipe.epochs
    with _progress(console) as bar:
        task = bar.add_task("training", total=whole)
        trained = train(
            samples,
            recipe,
            lambda epoch, loss: bar.update(task, completed=epoch, description=f"training (loss {loss:.2f})"),
        )
        bar.update(task, completed=whole)
    return trained


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def _write(output: Path, trained: "Trained") -> None:
    from services.length_predictor.confusion import write_confusion
    from services.length_predictor.engine import save_encoder

    save_encoder(trained.encoder, output)
    write_confusion(output / CONFUSION_FILE, trained.confusion, trained.encoder.shape.granularity)


def _report(trained: "Trained", granularity: int) -> None:
    table = Table("granularity", "held out", "right", "commonest bucket", "gain (95 %)", box=None)
    for each in trained.accuracies:
        served = " (served)" if each.granularity == granularity else ""
        gain = f"{each.right - each.commonest:+.1%} ± {each.gain_error:.1%}"
        table.add_row(
            f"{each.granularity}{served}",
            str(each.prompts),
            f"{each.right:.1%}",
            f"{each.commonest:.1%}",
            gain,
        )
    console = Console()
    console.print(table)
    console.print(
        "Each prompt was judged by one of five trainings that had not seen it; the gain is over always "
        "naming the commonest bucket. "
        f"What was written learned from all {trained.learned}, in {trained.epochs} epochs.",
        soft_wrap=True,
    )
