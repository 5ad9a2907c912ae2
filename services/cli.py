"""The command line. Every command is a thin door: it reads its options and calls one function elsewhere.

Imports of what a command needs happen inside it, so that ``lamella --help`` is fast and a gateway never
loads torch.
"""

import asyncio
import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from common.config import (
    AttentionPartition,
    Config,
    Dtype,
    Pipeline,
    PredictorConfig,
    PredictorKind,
    ScalingConfig,
    ScalingMode,
    Weights,
)
from common.config_file import check_config, load_config
from common.errors import ConfigError, LamellaError, LauncherError
from services.analyze import analyze
from services.bench.command import bench
from services.compare.command import compare
from services.explain import convert
from services.explain_request import explain
from services.flip import flip
from services.length_predictor.command import predictor_app
from services.profile_command import profile
from services.roles import ServiceRole
from services.state_directory import DEFAULT_STATE_DIRECTORY
from services.trace import trace

if TYPE_CHECKING:
    from common.scaling import DesiredCounts
    from services.control import MeshStatus

app = typer.Typer(
    name="lamella",
    help="Serves large language models on disaggregated hardware.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Models on this machine.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(predictor_app, name="predictor")
app.command("bench")(bench)
app.command("compare")(compare)
app.command("analyze")(analyze)
app.command("trace")(trace)
app.command("profile")(profile)
app.command("explain")(explain)
app.command("flip")(flip)
app.command("convert")(convert)

messages = Console(stderr=True)

INTERRUPTED = 130
"""The shell's status of a command that Ctrl-C ended: `up` was stopped before it served."""

ConfigOption = Annotated[Path | None, typer.Option("--config", help="A TOML file of settings.")]
StateOption = Annotated[Path, typer.Option(help="Tells several meshes on one machine apart.")]
StateDirOfConfig = Annotated[
    Path | None, typer.Option("--state-dir", help="Use the settings of the mesh that runs there.")
]
UrlOption = Annotated[str | None, typer.Option("--url", help="The server to talk to.")]


def main() -> None:
    """Runs a command; a LamellaError becomes one line and exit status 1."""
    try:
        app()
    except LamellaError as exc:
        messages.print("[bold red]error:[/bold red]", end=" ")
        messages.print(str(exc), highlight=False, markup=False, soft_wrap=True)
        sys.exit(1)


@app.command()
def serve(role: ServiceRole, config: ConfigOption = None, state_dir: StateDirOfConfig = None) -> None:
    """Run one service in the foreground, anywhere."""
    # What is imported stays. Collections amid it would look through it again and again: 0.4 s with torch.
    gc.disable()
    from common.service import run_process
    from services.roles import service_of

    service = service_of(role, _config_of(config, state_dir))
    gc.freeze()
    gc.enable()
    sys.exit(run_process(service))


@app.command()
def up(
    detach: Annotated[bool, typer.Option("--detach", help="Return when it serves.")] = False,
    port: Annotated[int, typer.Option(help="The gateway's port.", min=0, max=65_535)] = 8000,
    state_dir: StateOption = DEFAULT_STATE_DIRECTORY,
    model: Annotated[Path | None, typer.Option(help="A local transformers directory.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights; default bf16.")] = None,
    weights: Annotated[Weights | None, typer.Option(help="int8: weight-only; w8a8: activations too.")] = None,
    prefill: Annotated[
        int | None, typer.Option(help="Prefill instances; default 1, beside --mixed 0.", min=0)
    ] = None,
    decode: Annotated[
        int | None, typer.Option(help="Decode instances; default 1, beside --mixed 0.", min=0)
    ] = None,
    mixed: Annotated[int, typer.Option(help="Instances that do both.", min=0)] = 0,
    attention: Annotated[int, typer.Option(help="Attention workers that hold decode's KV.", min=0)] = 0,
    schedulers: Annotated[int, typer.Option(help="Schedulers: each places requests, one leads.", min=1)] = 1,
    partition: Annotated[
        AttentionPartition | None,
        typer.Option(
            help="What an attention worker holds: some KV heads of all sequences, or some sequences."
        ),
    ] = None,
    pipeline: Annotated[
        Pipeline | None,
        typer.Option(
            help="Batches of a decode instance take turns at attention: each on a model replica of its own"
            " (fixed), or rotating over one replica less."
        ),
    ] = None,
    batches: Annotated[
        int | None, typer.Option(help="With --pipeline: how many take turns; default 2.")
    ] = None,
    predictor: Annotated[
        PredictorKind | None,
        typer.Option(help="Who predicts how long outputs will be, beside the scheduler's own history."),
    ] = None,
    predictor_from: Annotated[
        Path | None, typer.Option(help="The classifier's directory, or the oracle's file of lengths.")
    ] = None,
    autoscale: Annotated[
        bool, typer.Option("--autoscale", help="As many instances as the load needs.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --autoscale: only log what it would do.")
    ] = False,
    least: Annotated[
        list[str] | None, typer.Option("--min", metavar="ROLE=N", help="With --autoscale: at least so many.")
    ] = None,
    most: Annotated[
        list[str] | None, typer.Option("--max", metavar="ROLE=N", help="At most; default 4 of each.")
    ] = None,
    config: ConfigOption = None,
    nats: Annotated[str | None, typer.Option(help="Use this NATS instead of an embedded one.")] = None,
    redis: Annotated[str | None, typer.Option(help="Use this Redis instead of an embedded one.")] = None,
) -> None:
    """Run a whole mesh on this machine until Ctrl-C."""
    from common.logs import configure_terminal_logging
    from services.autoscale import log as scaling_log
    from services.launch_plan import LaunchPlan
    from services.local import up as run_mesh
    from services.local import up_detached

    settings = _with_model(load_config(config), model, dtype, weights)
    instance = settings.instance
    settings = msgspec.structs.replace(
        settings,
        instance=msgspec.structs.replace(
            instance,
            attention_partition=partition or instance.attention_partition,
            pipeline=pipeline or instance.pipeline,
            staggered_batches=instance.staggered_batches if batches is None else batches,
        ),
        predictor=_chosen_predictor(settings.predictor, predictor, predictor_from),
        scaling=_chosen_scaling(settings.scaling, autoscale, dry_run, least or [], most or []),
    )
    check_config(settings)
    usual = 0 if mixed else 1
    plan = LaunchPlan(
        prefill=usual if prefill is None else prefill,
        decode=usual if decode is None else decode,
        mixed=mixed,
        attention=attention,
        schedulers=schedulers,
        port=port,
        nats_url=nats or os.environ.get("NATS_URL"),
        redis_url=redis or os.environ.get("REDIS_URL"),
    )
    _prepare(settings)
    if detach:
        with messages.status("starting"):
            mesh = up_detached(state_dir, plan, settings)
        _say_ready(mesh)
        return
    configure_terminal_logging(informative=scaling_log.name)
    with messages.status("starting") as status:
        served: list[MeshStatus] = []

        def on_ready(mesh: "MeshStatus") -> None:
            served.append(mesh)
            status.stop()
            _say_ready(mesh)

        run_mesh(state_dir, plan, settings, on_ready)
    if not served:
        sys.exit(INTERRUPTED)


@app.command()
def down(state_dir: StateOption = DEFAULT_STATE_DIRECTORY) -> None:
    """End the mesh: running requests finish first."""
    from services.local import down as end_mesh

    with messages.status("draining"):
        end_mesh(state_dir)


@app.command()
def status(
    state_dir: StateOption = DEFAULT_STATE_DIRECTORY,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show the mesh's instances and processes, and what it kept of what it promises."""
    from services.local import mesh_config
    from services.local import status as mesh_status
    from services.service_levels import read_service_levels, service_table

    mesh = mesh_status(state_dir)
    levels = read_service_levels(mesh_config(state_dir).mesh)
    mesh = msgspec.structs.replace(mesh, service_levels=levels)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(mesh)).decode())
        return
    _print_status(mesh)
    Console().print(service_table(levels))


@app.command()
def scale(
    counts: Annotated[
        list[str] | None, typer.Argument(metavar="ROLE=N …", help="For example prefill=2 decode=3.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Show the scheduler's plan; change nothing.")] = False,
    state_dir: StateOption = DEFAULT_STATE_DIRECTORY,
) -> None:
    """Change how many instances run; returns when they are ready and the surplus has drained."""
    from services.launch_plan import parse_counts
    from services.local import scale as scale_mesh
    from services.local import status as mesh_status

    if show and counts:
        raise LauncherError("--show changes nothing: leave the counts away")
    if show:
        _print_plan(mesh_status(state_dir).plan)
        return
    if not counts:
        raise LauncherError("say how many of what, for example decode=2, or --show")
    wanted = parse_counts(counts)
    with messages.status("scaling"):
        mesh = scale_mesh(state_dir, wanted)
    _print_status(mesh)


@app.command()
def healthcheck(
    url: Annotated[str | None, typer.Option(help="Default: this machine, $LAMELLA_PORT.")] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Ask whether it lives, not whether it is ready.")
    ] = False,
    state_dir: Annotated[Path | None, typer.Option(help="Ask the gateway of the mesh there.")] = None,
) -> None:
    """Exit 0 when a service answers that it is ready: for containers and scripts."""
    from services.healthcheck import is_healthy
    from services.local import local_url

    if url is None and state_dir is not None:
        url = local_url(state_dir)
    if url is None:
        url = f"http://127.0.0.1:{load_config(None).service.port}"
    sys.exit(0 if is_healthy(url, "live" if live else "ready") else 1)


@app.command()
def chat(
    question: Annotated[str | None, typer.Argument(help="Ask once; without it, converse.")] = None,
    url: UrlOption = None,
    state_dir: StateOption = DEFAULT_STATE_DIRECTORY,
    model: str = "default",
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2)] = None,
    seed: int | None = None,
) -> None:
    """Talk to a model in the terminal, streamed."""
    from services.chat import ChatOptions
    from services.chat import chat as converse
    from services.local import local_url

    options = ChatOptions(url or local_url(state_dir), model, system, max_tokens, temperature, seed)
    asyncio.run(converse(options, question, Console()))


@model_app.command("path")
def model_path(config: ConfigOption = None, state_dir: StateDirOfConfig = None) -> None:
    """Print the served model's directory (converts the default model the first time)."""
    from services.model_directory import model_directory

    with messages.status("default model") as status:
        directory = model_directory(
            _config_of(config, state_dir).model, lambda stage: status.update(f"default model: {stage}")
        )
    print(directory)


def _config_of(file: Path | None, state_dir: Path | None) -> Config:
    """Of the file, or of the mesh that runs in a state directory. Raises ConfigError, MeshNotRunning."""
    if state_dir is None or file is not None:
        return load_config(file)
    from services.local import mesh_config

    return mesh_config(state_dir)


def _with_model(
    config: Config, directory: Path | None, dtype: Dtype | None, weights: Weights | None
) -> Config:
    """The configuration with the command line's choices over the file's."""
    model = config.model
    if directory is not None:
        model = msgspec.structs.replace(model, directory=directory.expanduser().absolute())
    if dtype is not None:
        model = msgspec.structs.replace(model, dtype=dtype)
    if weights is not None:
        model = msgspec.structs.replace(model, weights=weights)
    return msgspec.structs.replace(config, model=model)


def _chosen_predictor(
    predictor: PredictorConfig, kind: PredictorKind | None, source: Path | None
) -> PredictorConfig:
    """Raises ConfigError for a source that the predictor has no use for."""
    predictor = msgspec.structs.replace(predictor, kind=kind or predictor.kind)
    if source is None:
        return predictor
    path = source.expanduser().absolute()
    match predictor.kind:
        case "classifier":
            return msgspec.structs.replace(predictor, directory=path)
        case "oracle":
            return msgspec.structs.replace(predictor, lengths_file=path)
        case _:
            raise ConfigError("--predictor-from", str(source), "needs --predictor classifier or oracle")


def _chosen_scaling(
    scaling: ScalingConfig, is_on: bool, is_dry_run: bool, least: list[str], most: list[str]
) -> ScalingConfig:
    """Raises ConfigError for limits that are none, or that nothing asks for."""
    from services.launch_plan import check_counts, parse_counts

    limits: dict[str, int] = {}
    for option, name, counts in (("--min", "min", least), ("--max", "max", most)):
        parsed = parse_counts(counts, option)
        check_counts(parsed)
        if "scheduler" in parsed:
            raise ConfigError(option, "scheduler", "is not scaled by load")
        limits |= {f"{name}_{role}": count for role, count in parsed.items()}
    policy: ScalingMode = scaling.policy
    if is_on:
        policy = "dry_run" if is_dry_run else "on"
    if policy == "off" and (limits or is_dry_run):
        raise ConfigError("--min, --max, --dry-run", None, "need --autoscale")
    return msgspec.structs.replace(scaling, policy=policy, **limits)


def _prepare(config: Config) -> None:
    """What takes long only the first time, before any process waits for it: weights and the program."""
    from services.prepare import prepare_model

    with messages.status("model") as status:
        prepare_model(config, lambda stage: status.update(f"model: {stage} (once)"))


def _say_ready(mesh: "MeshStatus") -> None:
    """One line with the URL, one to try."""
    example = (
        f"curl {mesh.url}/v1/chat/completions -H 'content-type: application/json' -d "
        '\'{"model": "default", "messages": [{"role": "user", "content": "Hello!"}]}\''
    )
    print(f"lamella is ready at {mesh.url}\n  {example}", flush=True)


def _print_status(mesh: "MeshStatus") -> None:
    console = Console()
    console.print(mesh.url or f"{mesh.state}: no gateway yet", highlight=False)
    instances = {instance.id: instance for instance in mesh.instances}
    table = Table("process", "role", "pid", "state", "restarts", box=None)
    for process in mesh.processes:
        shown = instances.get(process.id, process)
        state = shown.state
        if mesh.leader is not None and mesh.leader.id == process.id:
            state += ", leads"
        instance = instances.get(process.id)
        role = shown.role
        if instance is not None and instance.home not in (None, instance.role):
            role += f" (home: {instance.home})"
        table.add_row(process.id, role, str(process.pid), state, str(process.restarts))
    console.print(table)
    if mesh.plan is not None:
        _print_plan(mesh.plan)


def _print_plan(plan: "DesiredCounts | None") -> None:
    """Raises LauncherError where there is none."""
    if plan is None:
        raise LauncherError("nothing is planned (yet): `lamella up --autoscale`, and a window of requests")
    console = Console()
    console.print(
        f"{plan.rate_per_s:.3g} requests/s of {plan.prompt_tokens:.0f} + {plan.output_tokens:.0f} tokens"
        + (f"; changed: {', '.join(plan.changed)}" if plan.changed else ""),
        highlight=False,
    )
    table = Table("service", "ready", "wanted", "why", box=None)
    for each in plan.counts:
        table.add_row(each.service, str(each.current), str(each.desired), each.reason)
    console.print(table)


if __name__ == "__main__":
    main()
