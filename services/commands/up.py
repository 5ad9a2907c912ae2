"""The ``up`` command: options over the file's settings, then a mesh on this machine."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import msgspec
import typer
from rich.status import Status

from common.config import (
    AttentionPartition,
    Config,
    Dtype,
    InstanceConfig,
    Pipeline,
    PredictorConfig,
    PredictorKind,
    ScalingConfig,
    ScalingMode,
    Weights,
)
from common.config_file import check_config, load_config, load_named_servers
from common.errors import ConfigError
from common.scaling import ScaledService
from services.commands.mesh import warn_missing
from services.commands.options import ConfigOption, StateOption, messages
from services.launcher.state_directory import DEFAULT_STATE_DIRECTORY

if TYPE_CHECKING:
    from services.launcher.control import MeshStatus
    from services.launcher.launch_plan import LaunchPlan

INTERRUPTED = 130
"""The shell's status of a command that Ctrl-C ended: `up` was stopped before it served."""


OfPrefill = Annotated[int | None, typer.Option(help="Prefill instances; default 1, beside --mixed 0.", min=0)]
OfDecode = Annotated[int | None, typer.Option(help="Decode instances; default 1, beside --mixed 0.", min=0)]
PartitionOption = Annotated[
    AttentionPartition | None,
    typer.Option(help="What an attention worker holds: some KV heads of all sequences, or some sequences."),
]
PipelineOption = Annotated[
    Pipeline | None,
    typer.Option(
        help="Batches of a decode instance take turns at attention: each on a model replica of its own"
        " (fixed), or rotating over one replica less."
    ),
]
BatchesOption = Annotated[int | None, typer.Option(help="With --pipeline: how many take turns; default 2.")]
PredictorOption = Annotated[
    PredictorKind | None,
    typer.Option(help="Who predicts how long outputs will be, beside the scheduler's own history."),
]
PredictorFromOption = Annotated[
    Path | None, typer.Option(help="The classifier's directory, or the oracle's file of lengths.")
]
AutoscaleOption = Annotated[bool, typer.Option("--autoscale", help="As many instances as the load needs.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="With --autoscale: only log what it would do.")]
AtLeastOption = Annotated[
    list[str] | None, typer.Option("--min", metavar="ROLE=N", help="With --autoscale: at least so many.")
]
AtMostOption = Annotated[
    list[str] | None, typer.Option("--max", metavar="ROLE=N", help="At most; default 4 of each.")
]


def up(
    detach: Annotated[bool, typer.Option("--detach", help="Return when it serves.")] = False,
    port: Annotated[int, typer.Option(help="The gateway's port.", min=0, max=65_535)] = 8000,
    state_dir: StateOption = DEFAULT_STATE_DIRECTORY,
    model: Annotated[Path | None, typer.Option(help="A local transformers directory.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights; default bf16.")] = None,
    weights: Annotated[Weights | None, typer.Option(help="int8: weight-only; w8a8: activations too.")] = None,
    prefill: OfPrefill = None,
    decode: OfDecode = None,
    mixed: Annotated[int, typer.Option(help="Instances that do both.", min=0)] = 0,
    attention: Annotated[int, typer.Option(help="Attention workers that hold decode's KV.", min=0)] = 0,
    schedulers: Annotated[int, typer.Option(help="Schedulers: each places requests, one leads.", min=1)] = 1,
    partition: PartitionOption = None,
    pipeline: PipelineOption = None,
    batches: BatchesOption = None,
    predictor: PredictorOption = None,
    predictor_from: PredictorFromOption = None,
    autoscale: AutoscaleOption = False,
    dry_run: DryRunOption = False,
    least: AtLeastOption = None,
    most: AtMostOption = None,
    config: ConfigOption = None,
    nats: Annotated[str | None, typer.Option(help="Use this NATS instead of an embedded one.")] = None,
    redis: Annotated[str | None, typer.Option(help="Use this Redis instead of an embedded one.")] = None,
) -> None:
    """Run a whole mesh on this machine until Ctrl-C."""
    from services.launcher.launch_plan import LaunchPlan, check_plan
    from services.launcher.local import check_early

    settings = _with_model(load_config(config), model, dtype, weights)
    settings = msgspec.structs.replace(
        settings,
        instance=_chosen_attention(settings.instance, partition, pipeline, batches),
        predictor=_chosen_predictor(settings.predictor, predictor, predictor_from),
        scaling=chosen_scaling(settings.scaling, autoscale, dry_run, least or [], most or []),
    )
    check_config(settings)
    usual = 0 if mixed else 1
    named = load_named_servers(config)
    plan = LaunchPlan(
        prefill=usual if prefill is None else prefill,
        decode=usual if decode is None else decode,
        mixed=mixed,
        attention=attention,
        schedulers=schedulers,
        port=port,
        nats_url=nats or named.nats_url,
        redis_url=redis or named.redis_url,
    )
    check_plan(plan, settings)
    check_early(state_dir, plan, settings)
    tell_of_memory(plan, settings)
    _prepare(settings)
    _check_shares(attention, settings)
    if detach:
        _run_detached(state_dir, plan, settings)
    else:
        _run_until_interrupted(state_dir, plan, settings)


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


def _chosen_attention(
    instance: InstanceConfig,
    partition: AttentionPartition | None,
    pipeline: Pipeline | None,
    batches: int | None,
) -> InstanceConfig:
    return msgspec.structs.replace(
        instance,
        attention_partition=partition or instance.attention_partition,
        pipeline=pipeline or instance.pipeline,
        staggered_batches=instance.staggered_batches if batches is None else batches,
    )


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


def chosen_scaling(
    scaling: ScalingConfig, is_on: bool, is_dry_run: bool, least: list[str], most: list[str]
) -> ScalingConfig:
    """Raises ConfigError for limits that are none, or that nothing asks for."""
    from services.launcher.launch_plan import check_counts, parse_counts

    limits: dict[str, int] = {}
    for option, name, counts in (("--min", "min", least), ("--max", "max", most)):
        parsed = parse_counts(counts, option)
        check_counts(parsed)
        for role in parsed.keys() - get_args(ScaledService):
            raise ConfigError(option, role, "is not scaled by load")
        limits |= {f"{name}_{role}": count for role, count in parsed.items()}
    policy: ScalingMode = scaling.policy
    if is_on:
        policy = "dry_run" if is_dry_run else "on"
    given = (("--min", ", ".join(least)), ("--max", ", ".join(most)), ("--dry-run", is_dry_run))
    for option, value in given if policy == "off" else ():
        if value:
            raise ConfigError(option, value, "needs --autoscale")
    return msgspec.structs.replace(scaling, policy=policy, **limits)


def tell_of_memory(plan: "LaunchPlan", config: Config) -> None:
    """That it will not do once pools are full. Raises LauncherError where it does not do at all."""
    from services.launcher.launch_plan import configured, counts_of
    from services.launcher.memory import available_memory_bytes, check_memory

    warning = check_memory(counts_of(plan), configured(config, plan), available_memory_bytes())
    if warning is not None:
        messages.print(f"[yellow]memory:[/yellow] {warning}", highlight=False, soft_wrap=True)


def _prepare(config: Config) -> None:
    """What takes long only the first time, before any process waits for it: weights and the program."""
    from services.prepare import prepare_model

    with messages.status("model") as status:
        prepare_model(config, lambda stage: say_stage(status, f"model: {stage} (once)"))


def _check_shares(workers: int, config: Config) -> None:
    """That they can share the model's heads out, where they are to. Raises ConfigError."""
    if not workers or config.instance.attention_partition != "heads":
        return
    from common.spec import read_spec
    from decode.attention_needs import check_share
    from services.model_directory import model_directory

    check_share("--attention", workers, read_spec(model_directory(config.model)).kv_heads)


def _run_detached(state_dir: Path, plan: "LaunchPlan", settings: Config) -> None:
    from services.launcher.local import up_detached

    with messages.status("starting") as status:
        say_stage(status, "starting")
        mesh = up_detached(state_dir, plan, settings)
    _say_ready(mesh, settings.gateway.api_keys_file is not None)


def _run_until_interrupted(state_dir: Path, plan: "LaunchPlan", settings: Config) -> None:
    from common.logs import configure_terminal_logging
    from services.launcher.autoscale import log as scaling_log
    from services.launcher.local import up as run_mesh

    configure_terminal_logging(informative=scaling_log.name)
    with messages.status("starting") as status:
        say_stage(status, "starting")
        served: list[MeshStatus] = []

        def on_ready(mesh: "MeshStatus") -> None:
            served.append(mesh)
            status.stop()
            _say_ready(mesh, settings.gateway.api_keys_file is not None)

        def on_stop(open_requests: int) -> None:
            messages.print(ending(open_requests, settings.mesh.drain_timeout_s), highlight=False)

        run_mesh(state_dir, plan, settings, on_ready, on_stop)
    if not served:
        sys.exit(INTERRUPTED)


def say_stage(status: Status, stage: str) -> None:
    """In the line that moves; where there is no terminal as a line of its own: silence looks like a fault."""
    if messages.is_terminal:
        status.update(stage)
    else:
        messages.print(stage, highlight=False)


def ending(open_requests: int, drain_timeout_s: float) -> str:
    """What Ctrl-C has begun."""
    if not open_requests:
        return "ending"
    running = "1 request runs" if open_requests == 1 else f"{open_requests} requests run"
    return f"ending: {running}, at most {drain_timeout_s:g} s; Ctrl-C again cuts off"


def example_call(url: str | None, wants_keys: bool) -> str:
    key = '-H "authorization: Bearer $OPENAI_API_KEY" ' if wants_keys else ""
    return (
        f"curl {url}/v1/chat/completions {key}-H 'content-type: application/json' -d "
        '\'{"model": "default", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 50}\''
    )


def _say_ready(mesh: "MeshStatus", wants_keys: bool) -> None:
    """The URL, one to try, one for who operates it, and what is missing for it to serve."""
    example = example_call(mesh.url, wants_keys)
    page = f"the page is at {mesh.private_url}/ui/, its admin key in {mesh.admin_key_file}"
    print(f"lamella is ready at {mesh.url}\n  {example}\n  {page}", flush=True)
    warn_missing(mesh)
