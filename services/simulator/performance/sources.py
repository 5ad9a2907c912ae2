"""Where a performance model comes from, as a user says it: a kind, and the files that it is made of.

Each source is a table of a TOML file, ``kind`` first. ``open_source`` reads and checks the files at once;
what held-out data say of the fit is computed when it is asked for, as a forest's takes a while.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from common.cost import ELEMENT_BYTES, Utilisation
from common.devices import DeviceSpec
from common.errors import ConfigError
from common.profile import Profile
from common.shapes import ModelShape
from common.toml_tables import read_table
from services.simulator.performance.aiconfigurator import KernelOperators, NodeLinks, read_kernels
from services.simulator.performance.distserve import DistServeModel, read_distserve
from services.simulator.performance.interface import HeldOutError, PerformanceModel
from services.simulator.performance.linear import LinearPerformance
from services.simulator.performance.operators import OperatorModel
from services.simulator.performance.profiled import (
    ProfileFit,
    at_pace,
    profile_held_out,
    profile_model,
    read_machine_profile,
)
from services.simulator.performance.regression import FOLDS, Regression
from services.simulator.performance.roofline import (
    Parallelism,
    RooflineModel,
    check_parallelism,
    usual_utilisation,
)
from services.simulator.performance.splitwise import (
    CorrectedSplitwiseModel,
    SplitwiseModel,
    read_splitwise,
)
from services.simulator.performance.vidur import GROUPED_BATCH_FACTOR, ROW_TILE, VidurOperators, links_of
from services.simulator.performance.vidur_files import VidurFiles, files_in, read_vidur


class LinearSource(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="linear"
):
    """What ``LinearPerformance`` has, as a user writes it."""

    prefill_s: float = 0.0
    per_prompt_token_s: float = 0.0
    per_pair_s: float = 0.0
    step_s: float = 0.0
    per_sequence_s: float = 0.0
    per_context_token_s: float = 0.0
    per_ended_prompt_s: float = 0.0


class RooflineSource(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="roofline"
):
    """Nothing but the model's shape and the device's figures. Shares of its rates that kernels reach; None:
    what is usual of peaks, all of rates that were reached."""

    compute: float | None = None
    memory: float | None = None
    dtype: str = "bf16"


class VidurSource(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="vidur"
):
    """Vidur's CSV files of one model and device."""

    mlp: Path
    attention: Path
    all_reduce: Path | None = None
    send_recv: Path | None = None
    regression: Regression = "linear"
    batch_factor: float = GROUPED_BATCH_FACTOR


class OperatorsSource(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="operators"
):
    """What ``lamella profile --operators`` wrote. ``communication``: measured between processes or devices of
    the machine, or by the links of the catalogue's device."""

    directory: Path
    regression: Regression = "linear"
    communication: Literal["measured", "roofline"] = "measured"


class SplitwiseSource(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="splitwise"
):
    """Splitwise's ``perf_model.csv``. ``is_corrected``: decode steps by batch and context, too."""

    path: Path
    model: str
    hardware: str
    is_corrected: bool = True
    regression: Regression = "linear"


class AiconfiguratorSource(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="aiconfigurator",
):
    """A directory of aiconfigurator's tables of one device and engine. ``all_reduce`` and ``send_recv``:
    Vidur's files of a node with other links than the tables' system."""

    directory: Path
    regression: Regression = "linear"
    all_reduce: Path | None = None
    send_recv: Path | None = None


class DistServeSource(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="distserve"
):
    """DistServe's latency constants. ``is_ray_counted``: with its engine's overhead on the first stage."""

    path: Path
    model: str
    is_ray_counted: bool = False


class ProfileSource(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="profile"
):
    """What ``lamella profile`` wrote. ``by``: the law fitted to it, or a regression between its cases.
    ``pace``: how many times as long as it says the model's passes take, where the machine is another time
    slower or faster. A pass takes ``overhead_s`` beside the model's, and ``overhead_token_s`` for each token
    that decodes draw in it and ``overhead_prompt_s`` for each prompt that ends with it."""

    path: Path
    by: ProfileFit = "linear"
    pace: float = 1.0
    overhead_s: float = 0.0
    overhead_token_s: float = 0.0
    overhead_prompt_s: float = 0.0


PerformanceSource = (
    LinearSource
    | RooflineSource
    | VidurSource
    | OperatorsSource
    | SplitwiseSource
    | AiconfiguratorSource
    | DistServeSource
    | ProfileSource
)


def read_source(key: str, table: Mapping[str, object], beside: Path) -> PerformanceSource:
    """A table of a TOML file in the folder ``beside``, from which its relative paths start. Raises
    ConfigError, naming ``key``, for what is no source."""

    def decode(kind: type, value: object) -> object:
        if kind is Path and isinstance(value, str) and value:
            return beside / Path(value).expanduser()
        raise ValueError("must be the path of a file or folder")

    found: PerformanceSource = read_table(key, dict(table), PerformanceSource, decode)
    return found


@dataclass(frozen=True, slots=True)
class OpenedSource:
    """``held_out``: computes the errors of the fit on held-out data; none where nothing was fitted.
    ``profile``: that of a machine, from which its instances have sizes, too."""

    model: PerformanceModel
    held_out: Callable[[], tuple[HeldOutError, ...]]
    profile: Profile | None = None


def open_source(
    source: PerformanceSource, shape: ModelShape, device: DeviceSpec | None, parallelism: Parallelism
) -> OpenedSource:
    """Raises ConfigError for an impossible parallelism or where no device is named that has to be,
    PerformanceFileError for a file that breaks a rule.

    Splitwise's, DistServe's and our own profile know the device by what they measured; Splitwise's and our
    own know no pipeline, and our own no tensor parallelism but what the profiled machine had."""
    check_parallelism(shape, parallelism.tensor, parallelism.pipeline)
    match source:
        case LinearSource():
            return _open_linear(source)
        case RooflineSource():
            return _open_roofline(source, shape, _named(device, "roofline"), parallelism)
        case VidurSource():
            return _open_vidur(source, shape, parallelism)
        case OperatorsSource():
            return _open_operators(source, shape, device, parallelism)
        case SplitwiseSource():
            return _open_splitwise(source, parallelism)
        case AiconfiguratorSource():
            return _open_aiconfigurator(source, shape, _named(device, "aiconfigurator"), parallelism)
        case DistServeSource():
            return _open_distserve(source, parallelism)
        case ProfileSource():
            return _open_profile(source, parallelism)


def _named(device: DeviceSpec | None, kind: str) -> DeviceSpec:
    if device is None:
        raise ConfigError("device", None, f"must be named for a performance of kind {kind}")
    return device


def _open_linear(source: LinearSource) -> OpenedSource:
    costs = msgspec.structs.asdict(source)
    for key, seconds in costs.items():
        if not 0 <= seconds < float("inf"):
            raise ConfigError(key, seconds, "must be 0 or more")
    return OpenedSource(LinearPerformance(**costs), tuple)


def _open_roofline(
    source: RooflineSource, shape: ModelShape, device: DeviceSpec, parallelism: Parallelism
) -> OpenedSource:
    usual = usual_utilisation(device)
    compute = usual.compute if source.compute is None else source.compute
    memory = usual.memory if source.memory is None else source.memory
    for key, share in (("compute", compute), ("memory", memory)):
        if not 0 < share <= 1:
            raise ConfigError(key, share, "must be a share over 0 and up to 1")
    if source.dtype not in ELEMENT_BYTES:
        raise ConfigError("dtype", source.dtype, f"must be one of {', '.join(ELEMENT_BYTES)}")
    utilisation = Utilisation(compute, memory)
    model = RooflineModel(shape, device, parallelism=parallelism, utilisation=utilisation, dtype=source.dtype)
    return OpenedSource(model, tuple)


def _open_vidur(source: VidurSource, shape: ModelShape, parallelism: Parallelism) -> OpenedSource:
    if not 0 < source.batch_factor < float("inf"):
        raise ConfigError("batch_factor", source.batch_factor, "must be over 0")
    files = VidurFiles(source.mlp, source.attention, source.all_reduce, source.send_recv)
    profile = read_vidur(
        files, shape, parallelism.tensor, is_pipeline_on_network=parallelism.is_pipeline_on_network
    )
    operators = VidurOperators(
        profile,
        pipeline_parallel=parallelism.pipeline,
        regression=source.regression,
        batch_factor=source.batch_factor,
    )
    model = OperatorModel(operators, row_rounding=ROW_TILE)
    return OpenedSource(model, lambda: profile.held_out(source.regression, FOLDS))


def _open_operators(
    source: OperatorsSource, shape: ModelShape, device: DeviceSpec | None, parallelism: Parallelism
) -> OpenedSource:
    is_measured = source.communication == "measured"
    profile = read_vidur(
        files_in(source.directory),
        shape,
        parallelism.tensor,
        is_pipeline_on_network=parallelism.is_pipeline_on_network,
        are_messages_measured=is_measured,
    )
    links = None
    if not is_measured:
        named = _named(device, 'operators with communication = "roofline"')
        links = links_of(profile, named, parallelism)
    operators = VidurOperators(
        profile,
        pipeline_parallel=parallelism.pipeline,
        regression=source.regression,
        batch_factor=1.0,
        launch_ms=0.0,
        are_contexts_summed=False,
        links=links,
    )
    model = OperatorModel(operators, head_grid=1)
    return OpenedSource(model, lambda: profile.held_out(source.regression, FOLDS))


def _open_splitwise(source: SplitwiseSource, parallelism: Parallelism) -> OpenedSource:
    _refuse_pipeline("splitwise", parallelism)
    profile = read_splitwise(source.path, source.model, source.hardware, parallelism.tensor)
    if source.is_corrected:
        model = CorrectedSplitwiseModel(profile, source.regression)
        return OpenedSource(model, lambda: profile.held_out(source.regression))
    return OpenedSource(SplitwiseModel(profile), profile.held_out_published)


def _open_aiconfigurator(
    source: AiconfiguratorSource, shape: ModelShape, device: DeviceSpec, parallelism: Parallelism
) -> OpenedSource:
    tables = read_kernels(
        source.directory,
        shape,
        parallelism.tensor,
        NodeLinks(source.all_reduce, source.send_recv),
        is_pipeline_on_network=parallelism.is_pipeline_on_network,
    )
    operators = KernelOperators(tables, shape, device, parallelism=parallelism, regression=source.regression)
    return OpenedSource(OperatorModel(operators), lambda: tables.held_out(source.regression))


def _open_distserve(source: DistServeSource, parallelism: Parallelism) -> OpenedSource:
    constants = read_distserve(source.path, source.model, parallelism.tensor)
    model = DistServeModel(
        constants, pipeline_parallel=parallelism.pipeline, is_ray_counted=source.is_ray_counted
    )
    return OpenedSource(model, tuple)


def _open_profile(source: ProfileSource, parallelism: Parallelism) -> OpenedSource:
    _refuse_pipeline("profile", parallelism)
    if parallelism.tensor > 1:
        rule = "a profile is of one instance as it was measured: profile with this parallelism"
        raise ConfigError("tensor_parallel", parallelism.tensor, rule)
    for key in ("overhead_s", "overhead_token_s", "overhead_prompt_s"):
        if not 0 <= getattr(source, key) < float("inf"):
            raise ConfigError(key, getattr(source, key), "must be 0 or more")
    if not 0 < source.pace < float("inf"):
        raise ConfigError("pace", source.pace, "must be over 0")
    profile = at_pace(read_machine_profile(source.path), source.pace)
    model = profile_model(
        profile, source.by, source.overhead_s, source.overhead_token_s, source.overhead_prompt_s
    )
    return OpenedSource(model, lambda: profile_held_out(profile, source.by), profile)


def _refuse_pipeline(kind: str, parallelism: Parallelism) -> None:
    if parallelism.pipeline > 1:
        raise ConfigError("pipeline_parallel", parallelism.pipeline, f"{kind} measured no pipelines")
