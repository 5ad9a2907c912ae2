"""What was measured of a model on this machine, and where it is kept: `lamella profile` writes it, instances
read it."""

import hashlib
import os
from pathlib import Path

import msgspec

from common.config import ModelConfig, TransferConfig
from common.performance import FittedTime
from common.spec import ElementType


class HandOverTimes(msgspec.Struct, frozen=True, kw_only=True):
    """``until_second_s``: medians in seconds until a prompt's second token: (its tokens, with KV handed over
    in one piece, layer by layer), between instances over ``link``. ``layerwise_min_tokens``: from how many on
    layer by layer is better; None: it is for none of them.
    """

    link: str
    until_second_s: tuple[tuple[int, float, float], ...]
    layerwise_min_tokens: int | None


class PassTime(msgspec.Struct, frozen=True, array_like=True):
    """The median in seconds of a pass with several ``chunks``, each (tokens before, tokens), or with chunks
    and decodes: ``batch`` of them with ``context`` each."""

    chunks: tuple[tuple[int, int], ...]
    batch: int
    context: int
    seconds: float


class Contention(msgspec.Struct, frozen=True):
    """How much longer passes take while another process computes some on another core, as both read the same
    memory: each ``s_per_rate`` seconds for each pass a second that the other one would compute alone, and
    ``share`` of what it takes alone whatever that one computes. A pass reads all weights, however few rows it
    has: short ones cost their neighbours most."""

    s_per_rate: float
    share: float


LAW_TOKENS = 16
"""The law is of chunks from here on. Fewer rows wait for weights, or have kernels of their own."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Medians in seconds: ``chunk_s`` by (tokens before, tokens), ``step_s`` by (batch, context of each).
    ``shared_s``: of passes that are more than one chunk or one step.

    ``saturation_tokens``: L_m, and the ChunkSize that instances take. ``chunk_time`` and ``step_time`` are
    fitted to chunks from ``LAW_TOKENS`` on and to all steps, ``…_held_out_error`` is the mean relative error
    of each such case predicted by the others. ``hand_over`` None: not measured. ``look_s``: what some
    layers in this ``dtype`` took between them, on the processor (``services.profiling.probe``). ``dtype``
    is what was computed in; a weight that steps read has ``weight_bytes``, None: those of ``dtype``.
    ``contention`` None: not measured, as on accelerators, and where instances have no cores of their own.
    ``key_tile``: earlier tokens that a chunk attends to are computed in so many at once.
    """

    model: str
    dtype: ElementType
    machine: str
    measured_on: str
    chunk_s: tuple[tuple[int, int, float], ...]
    step_s: tuple[tuple[int, int, float], ...]
    saturation_tokens: int
    chunk_time: FittedTime
    step_time: FittedTime
    chunk_held_out_error: float
    step_held_out_error: float
    shared_s: tuple[PassTime, ...] = ()
    hand_over: HandOverTimes | None = None
    look_s: float | None = None
    weight_bytes: int | None = None
    contention: Contention | None = None
    key_tile: int = 1


def profile_path(
    model: ModelConfig, directory: Path, dtype: ElementType, accelerator: str | None = None
) -> Path:
    """One file per model, precision, kernels, device, threads and kind of machine. ``accelerator``: what
    ``model.device`` names, where that is not the processor; unlike ones may share a cache."""
    text = (directory / "config.json").read_text()
    settings = (model.weights, model.kernels, model.device, str(model.threads))
    parts = (text, dtype, *settings, machine_name(accelerator))
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return model.cache_directory.expanduser() / "profiles" / f"{directory.name}-{digest}.json"


def measured_layerwise_min_tokens(
    profile: Profile | None, transfer: TransferConfig, longest_tokens: int
) -> int | None:
    """Of prompts that are handed over layer by layer, over such a link; more than the longest has where that
    was never better. None: it was not measured."""
    times = None if profile is None else profile.hand_over
    if times is None or times.link != link_of(transfer):
        return None
    return times.layerwise_min_tokens or longest_tokens + 1


def link_of(transfer: TransferConfig) -> str:
    """What of these settings a hand-over's time depends on."""
    bandwidth, latency_s = transfer.emulated_bandwidth_bytes_per_s, transfer.emulated_latency_s
    parts: list[str] = [transfer.path, transfer.protocol]
    if bandwidth is not None:
        parts.append(f"{bandwidth:g} bytes/s")
    if latency_s:
        parts.append(f"{latency_s:g} s")
    return ", ".join(parts)


def read_profile(path: Path) -> Profile | None:
    """None where there is none, or it is another version's."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except (OSError, msgspec.DecodeError):
        return None


def write_profile(path: Path, profile: Profile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".new")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(profile)))
    scratch.replace(path)


def machine_name(accelerator: str | None = None, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The accelerator's and the processor's names, and how many cores there are; what is not known is left
    out."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
    host = f"{os.cpu_count()} x {name}"
    return host if accelerator is None else f"{accelerator}, {host}"
