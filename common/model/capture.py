"""From an unmodified transformers model to a graph of tensor operations, without its weights.

The model is built under fake tensors with attention replaced by one opaque operator per layer, and exported
over a flat batch ``[1, T]``, T free. What cannot be served token by token is refused here or by the
self-check in ``common.model.convert``. Only these two modules need transformers to serve a model.
"""

import copy
import functools
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from common.errors import ModelError
from common.model.refusals import modules_in_the_way, place_of
from common.spec import AttentionSpec

ATTENTION_NAME = "lamella_capture"
EXAMPLE_TOKENS = 7


@dataclass(frozen=True, slots=True)
class CapturedModel:
    """``graph`` computes ``output`` [1, T, vocab] from ``token_ids`` and ``positions`` [1, T].

    ``parameters`` names each weight placeholder's tensor in the files; ``constants`` are buffers that no file
    holds (rotary frequencies, embedding scales). ``attentions`` are the opaque nodes, in layer order.
    """

    graph: fx.Graph
    token_ids: fx.Node
    positions: fx.Node
    output: fx.Node
    attentions: tuple[fx.Node, ...]
    attention_specs: tuple[AttentionSpec, ...]
    parameters: dict[fx.Node, str]
    constants: dict[fx.Node, torch.Tensor]
    base_prefix: str
    """Checkpoints of the bare model lack this prefix of the names."""


def capture_model(directory: Path, dtype: torch.dtype) -> CapturedModel:
    """Raises ModelError for a model whose attention is not exchangeable or whose state is not only KV."""
    config = _read_config(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, constants = _build_fake(directory, config, dtype)
        try:
            exported = _export(model)
        except Exception as exc:  # torch.export raises dozens of types; all mean the same here
            first_line = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
            place = place_of(model, exc)
            what = f"{type(model).__name__} cannot be captured" + (f", {place}" if place else "")
            raise ModelError(f"{directory}: {what}: {first_line}") from exc
    return _read_graph(directory, model, exported, constants)


def attention_operator() -> Any:
    """The operator that stands for attention in captured graphs: (q, k, v, layer, scale, window, softcap)."""
    _register_attention()
    return torch.ops.lamella.attention.default


def _read_config(directory: Path) -> Any:
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as exc:
        raise ModelError(f"{directory}: transformers cannot read its config: {exc}") from exc


def _build_fake(directory: Path, config: Any, dtype: torch.dtype) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model on fake tensors, and the real values of its buffers that no file holds, by name."""
    import transformers

    _register_attention()
    try:
        model_class: Any = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError as exc:
        raise ModelError(
            f"{directory}: model_type = {config.model_type!r}: no causal language model"
        ) from exc
    config = copy.deepcopy(config)
    if not getattr(model_class, "_supports_attention_backend", False):
        with FakeTensorMode(allow_non_fake_inputs=True):
            reason = modules_in_the_way(model_class._from_config(config))
        raise ModelError(f"{directory}: {model_class.__name__} cannot be split at its attention: {reason}")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model_class._from_config(
            config, dtype=dtype, attn_implementation=ATTENTION_NAME, experts_implementation="batched_mm"
        ).eval()
    return model, _buffer_values(directory, model)


def _buffer_values(directory: Path, model: Any) -> dict[str, torch.Tensor]:
    """Runs each module's own initialization on real memory, as loading a checkpoint does."""
    values: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        names = sorted(module._non_persistent_buffers_set & module._buffers.keys())
        present = [name for name in names if module._buffers[name] is not None]
        fakes = {name: module._buffers[name] for name in present}
        for name, fake in fakes.items():
            real = torch.full(tuple(fake.shape), 0, dtype=fake.dtype)
            values[f"{prefix}.{name}" if prefix else name] = module._buffers[name] = real
        if fakes:
            with torch.no_grad():
                model._init_weights(module)
        module._buffers.update(fakes)
    for name, value in values.items():
        if not bool(value.any()):
            raise ModelError(f"{directory}: buffer {name} is in no file and has no initialization")
    return values


class _Logits(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.model(input_ids=token_ids, position_ids=positions, use_cache=False).logits
        return output


def _export(model: Any) -> torch.export.ExportedProgram:
    fake_mode = next(model.parameters()).fake_mode
    tokens = torch.export.Dim("T", min=2)
    with fake_mode, torch.no_grad():
        example = torch.zeros(1, EXAMPLE_TOKENS, dtype=torch.int64)
        exported = torch.export.export(
            _Logits(model),
            (example, example.clone()),
            dynamic_shapes=({1: tokens}, {1: tokens}),
            strict=False,
        )
        decomposed: torch.export.ExportedProgram = exported.run_decompositions({})
        return decomposed


def _read_graph(
    directory: Path, model: Any, exported: torch.export.ExportedProgram, values: dict[str, torch.Tensor]
) -> CapturedModel:
    signature = exported.graph_signature
    name = type(model).__name__
    if signature.buffers_to_mutate:
        buffers = sorted(signature.buffers_to_mutate.values())
        mutated = ", ".join(buffer.removeprefix("model.") for buffer in buffers)
        raise ModelError(
            f"{directory}: {name} keeps state outside the KV cache or scales by batch: it writes to {mutated}"
        )
    graph = exported.graph
    nodes = {node.name: node for node in graph.nodes}
    tied = dict(model.all_tied_weights_keys)
    parameters: dict[fx.Node, str] = {}
    for placeholder, dotted in signature.inputs_to_parameters.items():
        own = dotted.removeprefix("model.")
        parameters[nodes[placeholder]] = tied.get(own, own)
    constants: dict[fx.Node, torch.Tensor] = {}
    for placeholder, dotted in signature.inputs_to_buffers.items():
        own = dotted.removeprefix("model.")
        if own in values:
            constants[nodes[placeholder]] = values[own]
        else:
            parameters[nodes[placeholder]] = own
    for placeholder, dotted in signature.inputs_to_lifted_tensor_constants.items():
        constants[nodes[placeholder]] = exported.constants[dotted].detach()
    token_ids, positions = (nodes[user_input] for user_input in signature.user_inputs)
    attentions = tuple(node for node in graph.nodes if node.target is attention_operator())
    return CapturedModel(
        graph=graph,
        token_ids=token_ids,
        positions=positions,
        output=nodes[signature.user_outputs[0]],
        attentions=attentions,
        attention_specs=_attention_specs(directory, model, attentions),
        parameters=parameters,
        constants=constants,
        base_prefix=f"{model.base_model_prefix}." if model.base_model_prefix else "",
    )


def _attention_specs(
    directory: Path, model: Any, attentions: tuple[fx.Node, ...]
) -> tuple[AttentionSpec, ...]:
    name, count = type(model).__name__, model.config.num_hidden_layers
    layers = [node.args[3] for node in attentions]
    if layers != list(range(count)):
        raise ModelError(
            f"{directory}: {name}: {count} layers, but attention in layers {layers}: "
            f"{modules_in_the_way(model)}"
        )
    specs = []
    for node in attentions:
        args: Any = node.args
        q, k, v = (argument.meta["val"] for argument in args[:3])
        scale, window, softcap = args[4:7]
        if k.shape[1] != v.shape[1] or not q.shape[3] == k.shape[3] == v.shape[3]:
            raise ModelError(f"{directory}: {name}: keys and values of different shapes are not served")
        specs.append(AttentionSpec(q.shape[1], k.shape[1], q.shape[3], scale, window, softcap))
    shapes = {(spec.kv_heads, spec.head_dim) for spec in specs}
    if len(shapes) > 1:
        raise ModelError(f"{directory}: {name}: layers with different KV shapes {sorted(shapes)}")
    return tuple(specs)


@functools.cache
def _register_attention() -> Any:
    """Defines the operator and makes it known to transformers under our own name.

    The name is unknown to transformers' mask functions, so no mask enters the graph.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    library: Any = torch.library.Library("lamella", "DEF")  # type: ignore[no-untyped-call]
    library.define(
        "attention(Tensor q, Tensor k, Tensor v, int layer, float scale, int? window, float? softcap)"
        " -> Tensor"
    )
    torch.library.register_fake("lamella::attention", _fake_attention, lib=library)
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention_of_a_layer)
    return library


def _fake_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """q [1, heads, T, head_dim] → [1, T, heads, head_dim], as transformers' attention functions return it."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def _attention_of_a_layer(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    if s_aux is not None:
        raise ModelError(
            f"attention sinks of layer {module.layer_idx} are not served: an attention worker has no weights"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: torch.Tensor = torch.ops.lamella.attention(
        query, key, value, module.layer_idx, scale, sliding_window, softcap
    )
    return output, None
