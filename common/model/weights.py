"""Weight tensors by the names the captured model gives them, read from safetensors one at a time."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from common.errors import ModelError
from common.spec import weight_files


class WeightFiles:
    """Open safetensors files. Checkpoints of the bare model lack ``base_prefix``, or carry it twice.

    Raises ModelError for a file that is not safetensors.
    """

    def __init__(self, files: Collection[Path], base_prefix: str = "") -> None:
        self._base_prefix = base_prefix
        self._file_of: dict[str, Any] = {}
        for path in files:
            try:
                opened: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as exc:
                raise ModelError(f"{path}: not a safetensors file: {exc}") from exc
            self._file_of |= dict.fromkeys(opened.keys(), opened)

    @classmethod
    def of_directory(cls, directory: Path, base_prefix: str) -> "WeightFiles":
        return cls(weight_files(directory), base_prefix)

    def missing(self, names: Collection[str]) -> list[str]:
        return [name for name in names if self._key(name) is None]

    def tensor(self, name: str) -> torch.Tensor:
        """In the file's own dtype. Raises ModelError for a name that no file holds."""
        key = self._key(name)
        if key is None:
            raise ModelError(f"the weight files hold no tensor {name}")
        tensor: torch.Tensor = self._file_of[key].get_tensor(key)
        return tensor

    def _key(self, name: str) -> str | None:
        prefix = self._base_prefix
        for key in (name, name.removeprefix(prefix), prefix + name):
            if key in self._file_of:
                return key
        return None


def load_tensors(
    files: WeightFiles,
    constants: Mapping[str, torch.Tensor],
    names: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Constants keep their dtype, weights get the model's. Raises ModelError where a shape disagrees."""
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        if name in constants:
            tensors[name] = constants[name].to(device)
            continue
        tensor = files.tensor(name)
        if tuple(tensor.shape) != shapes[name]:
            raise ModelError(f"tensor {name} = {tuple(tensor.shape)}: config.json says {shapes[name]}")
        tensors[name] = tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype)
    return tensors
