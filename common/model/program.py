"""The model as a program: slices that run between attentions, over flat ragged batches. No sequence is
padded, only a batch's number of rows, where that is quicker (``common.model.padding``).

Started from a cache of generated source, a manifest and constants (``common.model.convert`` fills it when it
is empty), so a serving process imports torch and safetensors, not transformers. One program serves prefill,
decode and mixtures of both: what differs is only the ``AttentionIO`` (house rule: one implementation).
"""

import importlib.util
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import load_file

from common.errors import ModelError
from common.model.cache import Manifest, SliceEntry, cached_conversion, load_manifest
from common.model.interface import AttentionIO
from common.model.linears import compiled_rows, linear_of
from common.model.padding import AttentionOfRows, rows_beside, with_rows
from common.model.precision import WeightForm
from common.model.weights import WeightFiles, load_tensors
from common.spec import AttentionSpec, ElementType, ModelSpec, read_spec, weight_files
from common.timeline import timeline
from common.timeline_events import SLICE

Progress = Callable[[str], None]
Result = TypeVar("Result")

TORCH_DTYPES: dict[ElementType, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class BoundSlice:
    """A slice's function with the weights it uses."""

    run: Callable[..., Any]
    layer: int | None
    bound: tuple[Any, ...]


class LastContext(NamedTuple):
    """What the last slice is given, of all tokens of a batch: the last attention's output, and the slice
    before's."""

    received: torch.Tensor
    values: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class ModelProgram:
    """One model on one device, ready to run. Holds no state between runs."""

    spec: ModelSpec
    attention_specs: tuple[AttentionSpec, ...]
    dtype: torch.dtype
    device: torch.device
    slices: tuple[BoundSlice, ...]
    last_context_token_dims: tuple[int | None, ...]
    compiled_rows: float = 0
    """Of products: see ``linears.compiled_rows``."""

    @torch.inference_mode()
    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionIO,
        output_rows: torch.Tensor,
    ) -> torch.Tensor:
        """``token_ids``, ``positions`` [T] int64 → logits [R, vocab] of the tokens at ``output_rows`` [R].

        The rows are chosen before the last slice, which the others then need not pass. R = 0 still writes
        every layer's K and V and returns [0, vocab].
        """
        return _ended(self.course(token_ids, positions, attention, output_rows))

    def course(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionIO,
        output_rows: torch.Tensor,
        replicas: Sequence["ModelProgram"] = (),
        batch: int = 0,
    ) -> Generator[int, None, torch.Tensor]:
        """``run`` in parts: a slice at a time, and then the layer whose attention is awaited next.

        Whoever drives it may compute another batch's slice meanwhile (Lamina 2, section 4.3), and does so in
        inference mode. Slice i runs on ``replicas[i mod their number]``, to which the context goes before the
        wait, so that it travels while attention computes; none: all on this one. torch orders a copy between
        two devices with the work of both, by events of its own. ``batch`` is for a timeline.
        """
        context = yield from self._until_last(token_ids, positions, attention, replicas, batch)
        last = replicas[(len(self.slices) - 1) % len(replicas)] if replicas else self
        return last._logits(context, attention, output_rows.to(last.device), batch)

    @torch.inference_mode()
    def make_heads(self, counts: Iterable[int], attention: AttentionIO) -> None:
        """Computes logits of so many tokens, each number once: where products of each have kernels of their
        own these are made now. ``attention``: begun with one token."""
        one = torch.ones(1, dtype=torch.int64, device=self.device)
        context = _ended(self._until_last(one, torch.zeros_like(one), attention, (), 0))
        for rows in counts:
            self._logits(context, attention, torch.zeros(rows, dtype=torch.int64, device=self.device), 0)

    def _until_last(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionIO,
        replicas: Sequence["ModelProgram"],
        batch: int,
    ) -> Generator[int, None, LastContext]:
        """``course`` up to the last slice, and without it."""
        replicas = replicas or (self,)
        rows = token_ids.numel()
        beside = rows_beside(rows, self.dtype, self.device)
        if beside:
            token_ids, positions = with_rows(token_ids, beside), with_rows(positions, beside)
            attention = AttentionOfRows(attention, rows, beside)
        context: tuple[torch.Tensor, ...] = (token_ids.unsqueeze(0), positions.unsqueeze(0))
        received: torch.Tensor | None = None
        for index in range(len(self.slices) - 1):
            program = replicas[index % len(replicas)]
            following = replicas[(index + 1) % len(replicas)]
            piece = program.slices[index]
            began_ns = timeline.begin()
            context = piece.run(attention, piece.layer, received, *context, *piece.bound)
            assert piece.layer is not None
            if following.device != program.device:
                context = tuple(value.to(following.device, non_blocking=True) for value in context)
            if began_ns:
                timeline.end(began_ns, SLICE, piece.layer, batch)
            yield piece.layer
            received = attention.receive(piece.layer)
            if received.device != following.device:
                received = received.to(following.device)
        assert received is not None
        return LastContext(received, context)

    def _logits(
        self, context: LastContext, attention: AttentionIO, output_rows: torch.Tensor, batch: int
    ) -> torch.Tensor:
        if output_rows.numel() == 0:
            return torch.empty(0, self.spec.vocab_size, dtype=self.dtype, device=self.device)
        chosen = [
            value if dim is None else value.index_select(dim, output_rows)
            for value, dim in zip(context.values, self.last_context_token_dims, strict=True)
        ]
        received = context.received.index_select(0, output_rows)
        last = self.slices[-1]
        began_ns = timeline.begin()
        logits: torch.Tensor = last.run(attention, None, received, *chosen, *last.bound)
        if began_ns:
            timeline.end(began_ns, SLICE, len(self.slices) - 1, batch)
        return logits.squeeze(0)


def _ended(course: Generator[int, None, Result]) -> Result:
    """What comes of it once all its slices are computed, one after the other."""
    while True:
        try:
            next(course)
        except StopIteration as end:
            result: Result = end.value
            return result


def load_program(
    model_directory: Path,
    element_type: ElementType,
    device: torch.device,
    cache_directory: Path,
    *,
    weights: WeightForm = "model",
    progress: Progress = lambda stage: None,
) -> ModelProgram:
    """Converts the model first if the cache does not hold it. Raises ModelError where it cannot be served."""
    spec = read_spec(model_directory)
    conversion = cached_conversion(model_directory, element_type, cache_directory, progress)
    progress("loading the weights")
    return load_converted(model_directory, spec, element_type, device, conversion, weights)


def load_converted(
    model_directory: Path,
    spec: ModelSpec,
    element_type: ElementType,
    device: torch.device,
    conversion: Path,
    weights: WeightForm = "model",
) -> ModelProgram:
    """Binds a conversion's slices to the model's weights."""
    dtype = TORCH_DTYPES[element_type]
    manifest, source = load_manifest(conversion)
    _check_specs(model_directory, spec, manifest)
    module = _import_source(source)
    constants = load_file(conversion / "constants.safetensors") if manifest.has_constants else {}
    renamed = conversion / "weights"
    files = WeightFiles(weight_files(renamed if renamed.is_dir() else model_directory), manifest.base_prefix)
    loaded: dict[str, torch.Tensor] = {}
    slices = []
    for index, entry in enumerate(manifest.slices):
        wanted = [name for name in entry.tensors if name not in loaded]
        loaded |= load_tensors(files, constants, wanted, manifest.shapes, dtype, device)
        slices.append(_bind(module, entry, loaded, weights))
        later = {name for other in manifest.slices[index + 1 :] for name in other.tensors}
        loaded = {name: tensor for name, tensor in loaded.items() if name in later}
    return ModelProgram(
        spec=spec,
        attention_specs=manifest.attention_specs,
        dtype=dtype,
        device=device,
        slices=tuple(slices),
        last_context_token_dims=manifest.slices[-1].context_token_dims,
        compiled_rows=compiled_rows(weights, dtype) if device.type == "cpu" else 0,
    )


@torch.inference_mode()
def _bind(
    module: ModuleType, entry: SliceEntry, loaded: dict[str, torch.Tensor], form: WeightForm
) -> BoundSlice:
    tensors = [loaded[name] for name in entry.tensors]
    bound = getattr(module, entry.bind)(tensors, lambda weight, bias: linear_of(weight, bias, form))
    return BoundSlice(getattr(module, entry.run), entry.layer, bound)


def _import_source(source: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location("lamella_slices", source)
    if found is None or found.loader is None:
        raise ModelError(f"{source}: cannot be imported")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _check_specs(directory: Path, spec: ModelSpec, manifest: Manifest) -> None:
    captured = {(each.kv_heads, each.head_dim) for each in manifest.attention_specs}
    said = (spec.kv_heads, spec.head_dim)
    if captured != {said} or len(manifest.attention_specs) != spec.layers:
        raise ModelError(
            f"{directory}: the model's code has {len(manifest.attention_specs)} layers with "
            f"(kv_heads, head_dim) {sorted(captured)}, its config.json says {spec.layers} with {said}"
        )
