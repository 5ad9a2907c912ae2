"""The device that a setting names, and host memory made ready for its copies."""

from typing import Any

import torch

from common.errors import ConfigError, ServiceError

OutOfMemory = torch.OutOfMemoryError
"""Of a device: what a pass needs between its layers had no room beside weights and KV."""


def device_of(key: str, name: str) -> torch.device:
    """Raises ConfigError where this machine, or this torch, has no such device."""
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise ConfigError(key, name, "must be cpu, cuda or cuda:N") from exc
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(key, name, "needs CUDA, which torch does not find on this machine")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(key, name, f"this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def accelerator_name(name: str) -> str | None:
    """The model of the device that ``device_of`` has accepted; None: the processor computes."""
    device = torch.device(name)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def free_unused_memory() -> None:
    """Of every CUDA device, what torch keeps for later."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def pin_host_memory(memory: torch.Tensor) -> None:
    """Locks the tensor's pages, so that CUDA copies from and to them without a copy between. Raises
    ServiceError where the driver does not."""
    code = _cuda_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(code) != 0:
        raise ServiceError(f"CUDA cannot lock {memory.nbytes} bytes of host memory ({code})")


def unpin_host_memory(memory: torch.Tensor) -> None:
    """Before the memory is unmapped."""
    _cuda_runtime().cudaHostUnregister(memory.data_ptr())


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
