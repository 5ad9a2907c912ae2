"""Conversions on disk: one directory per model, dtype and version, complete or absent.

A conversion is ``slices.py`` (generated source), ``manifest.json``, ``constants.safetensors``, and
``weights/`` only where the checkpoint's tensors had to be renamed or fused. It is written beside its place
and moved there, under a lock, so that several processes can start at once.
"""

import hashlib
import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import msgspec

from common.errors import ModelError
from common.file_lock import exclusive, scratch_for
from common.spec import AttentionSpec, ElementType

CONVERTER_VERSION = 5
"""Raise it when generated source or manifest change: older conversions are then made anew."""


class SliceEntry(msgspec.Struct, frozen=True):
    """One slice. ``tensors`` are names in the weight files or among the constants.

    ``context_token_dims`` say, for each context value, which dimension counts tokens (None: no dimension).
    """

    bind: str
    run: str
    layer: int | None
    tensors: tuple[str, ...]
    context_token_dims: tuple[int | None, ...]


class Manifest(msgspec.Struct, frozen=True):
    """What ``slices.py`` needs to be run. ``shapes`` are the weights', by name."""

    slices: tuple[SliceEntry, ...]
    attention_specs: tuple[AttentionSpec, ...]
    shapes: dict[str, tuple[int, ...]]
    base_prefix: str
    has_constants: bool
    source_sha256: str


def cached_conversion(
    model_directory: Path, element_type: ElementType, cache_directory: Path, progress: Callable[[str], None]
) -> Path:
    """The model's conversion, made now where the cache has none. One process makes it, others wait."""
    programs = cache_directory.expanduser() / "programs"
    target = programs / _key(model_directory, element_type)
    if (target / "manifest.json").is_file():
        return target
    programs.mkdir(parents=True, exist_ok=True)
    with exclusive(programs / f"{target.name}.lock"):
        if (target / "manifest.json").is_file():
            return target
        from common.model.convert import convert  # transformers and torch.export, only when needed

        with scratch_for(target) as scratch:
            convert(model_directory, element_type, scratch, progress)
            for path in (scratch, *scratch.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)  # another user's service may read the cache
            scratch.rename(target)
    return target


def load_manifest(conversion: Path) -> tuple[Manifest, Path]:
    """The manifest and the path of the source it was written for."""
    source = conversion / "slices.py"
    manifest = msgspec.json.decode((conversion / "manifest.json").read_bytes(), type=Manifest)
    if hashlib.sha256(source.read_bytes()).hexdigest() != manifest.source_sha256:
        raise ModelError(f"{source}: changed since it was generated; delete {conversion}")
    return manifest, source


def save_conversion(target: Path, manifest: Manifest, source: str) -> None:
    (target / "slices.py").write_text(source)
    (target / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def _key(model_directory: Path, element_type: ElementType) -> str:
    """Everything the conversion depends on. Weights count by their files' names, sizes and times."""
    digest = hashlib.sha256()
    digest.update((model_directory / "config.json").read_bytes())
    for path in sorted(model_directory.glob("*.safetensors")):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    versions = (importlib.metadata.version(package) for package in ("torch", "transformers"))
    digest.update(f"{element_type} {CONVERTER_VERSION} {' '.join(versions)}".encode())
    return f"{model_directory.resolve().name}-{digest.hexdigest()[:16]}"
