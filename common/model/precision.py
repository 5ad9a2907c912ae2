"""Element types: what a configuration asks for, and what this machine computes with.

``dtype = "bf16"`` means weights in bf16. Where the device multiplies bf16 in hardware, everything else is
bf16 too; elsewhere activations and KV are fp32, which is faster there and loses nothing.
"""

from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from common.config import ModelConfig
from common.errors import ConfigError
from common.spec import ELEMENT_BYTES, ElementType

WeightForm = Literal["model", "bf16", "int8", "w8a8"]
"""How linear weights are held; see ``common.model.linears``."""

CPUINFO = Path("/proc/cpuinfo")
AMX_FLAG = "amx_bf16"
BF16_FLAGS = {AMX_FLAG, "avx512_bf16", "bf16"}
"""Intel's and AMD's instructions, and Arm's."""


class Precision(msgspec.Struct, frozen=True):
    compute: ElementType
    weights: WeightForm


def precision_of(model: ModelConfig) -> Precision:
    """Raises ConfigError for an unknown device."""
    if model.dtype == "fp32":
        return Precision("float32", model.weights)
    if model.device == "cpu":
        if has_fast_bf16():
            return Precision("bfloat16", model.weights)
        return Precision("float32", "bf16" if model.weights == "model" else model.weights)
    if model.device.split(":")[0] != "cuda":
        raise ConfigError("model.device", model.device, "must be cpu or cuda")
    import torch

    is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
    return Precision("bfloat16" if is_fast else "float32", model.weights)


def weight_bytes(precision: Precision) -> int:
    """Of each weight that a decode step reads."""
    match precision.weights:
        case "model":
            return ELEMENT_BYTES[precision.compute]
        case "bf16":
            return 2
        case "int8" | "w8a8":
            return 1


def wants_compiled(model: ModelConfig) -> bool:
    """Whether compiled kernels (``common.model.cpu``) compute what they can, on the host."""
    return model.kernels == "auto" and model.device == "cpu"


def wants_graphs(model: ModelConfig) -> bool:
    """Whether short passes are replayed as graphs (``common.model.step_graphs``), on a CUDA device."""
    return model.kernels == "auto" and model.device != "cpu"


def has_fast_bf16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether the CPU has bf16 products; unknown counts as no."""
    return not BF16_FLAGS.isdisjoint(_cpu_flags(cpuinfo))


@cache
def has_amx(cpuinfo: Path = CPUINFO) -> bool:
    """Whether the CPU computes bf16 products of whole tiles, of 16 rows; unknown counts as no."""
    return AMX_FLAG in _cpu_flags(cpuinfo)


def _cpu_flags(cpuinfo: Path) -> list[str]:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
