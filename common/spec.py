"""What a model directory says about its model, read from JSON alone: no torch, no transformers.

A directory can be served when it holds ``config.json`` of a decoder-only language model and weights in
safetensors. Everything else (pickled weights, code that comes with the model, quantized checkpoints,
encoder-decoders, multimodal wrappers) is refused here, before anything is loaded.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from common.errors import ConfigError, ModelError, reason_of

ElementType = Literal["bfloat16", "float32"]
"""torch's names, of activations and KV."""
ELEMENT_BYTES: dict[ElementType, int] = {"bfloat16": 2, "float32": 4}

CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")

FIELD_NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab_size": ("vocab_size",),
    "context_length": ("max_position_embeddings", "n_positions"),
}
"""Our word → the names under which families write it, in order of preference."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model's shape (Vidur 4.1's declarative specification).

    ``name`` is the directory's name. ``context_length`` is prompt and output together, in tokens.
    """

    name: str
    model_type: str
    architecture: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    """The checkpoint's own, as its config writes it ("bfloat16"); serving may choose another."""

    def kv_token_bytes(self, element_bytes: int) -> int:
        """KV of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


class AttentionSpec(msgspec.Struct, frozen=True):
    """One layer's attention, all that an attention worker must know of the model.

    A token at position p sees keys at positions > p − ``window`` (None: all). ``softcap`` bounds the scores
    by ``softcap · tanh(score / softcap)``.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None


def served_context_length(spec: ModelSpec, configured: int | None) -> int:
    """Prompt and output together, in tokens. Raises ConfigError where the model was not made for as many."""
    if configured is not None and configured > spec.context_length:
        rule = f"must be at most the model's {spec.context_length}"
        raise ConfigError("model.context_length", configured, rule)
    return spec.context_length if configured is None else configured


def read_spec(directory: Path, *, needs_weights: bool = True) -> ModelSpec:
    """Raises ModelError, naming the file or key, for a directory that cannot be served; without
    ``needs_weights`` one may be that has none."""
    config = _read_json(directory / "config.json", is_required=True)
    _refuse_unservable(directory, config)
    if needs_weights:
        weight_files(directory)
    generation = _read_json(directory / "generation_config.json", is_required=False)
    numbers = {word: _integer(directory, config, names) for word, names in FIELD_NAMES.items()}
    heads = numbers["heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or numbers["hidden_size"] // heads
    if not isinstance(kv_heads, int) or heads % kv_heads:
        raise _bad(directory, "num_key_value_heads", kv_heads, f"must divide {heads} attention heads")
    if not isinstance(head_dim, int) or head_dim < 1:
        raise _bad(directory, "head_dim", head_dim, "must be a positive integer")
    return ModelSpec(
        name=directory.resolve().name,
        model_type=str(config["model_type"]),
        architecture=_architecture(directory, config),
        kv_heads=kv_heads,
        head_dim=head_dim,
        eos_token_ids=_eos_token_ids(directory, config, generation),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        **numbers,
    )


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The weight files, in name order. Raises ModelError where there are none."""
    files = tuple(sorted(directory.glob("*.safetensors")))
    if files:
        return files
    pickled = sorted(path.name for suffix in ("bin", "pt", "pth") for path in directory.glob(f"*.{suffix}"))
    hint = f"; {pickled[0]} is a pickle, which is never loaded: convert it to safetensors" if pickled else ""
    raise ModelError(f"{directory}: no *.safetensors weights{hint}")


def _refuse_unservable(directory: Path, config: Mapping[str, object]) -> None:
    rules = {
        "auto_map": "the model brings its own code, which is never run",
        "is_encoder_decoder": "only decoder-only models can be served",
        "quantization_config": "quantized checkpoints are not served: give the original weights",
        "text_config": "a multimodal wrapper: give the directory of its text model",
    }
    for key, rule in rules.items():
        if config.get(key):
            raise _bad(directory, key, config[key], rule)
    if not config.get("model_type"):
        raise _bad(directory, "model_type", config.get("model_type"), "must name a transformers model type")


def _architecture(directory: Path, config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list):
        raise _bad(directory, "architectures", names, "must list the model's class")
    for name in names:
        if str(name).endswith(CAUSAL_SUFFIXES):
            return str(name)
    raise _bad(directory, "architectures", names, "must name a causal language model (…ForCausalLM)")


def _integer(directory: Path, config: Mapping[str, object], names: tuple[str, ...]) -> int:
    for name in names:
        value = config.get(name)
        if value is not None:
            if not isinstance(value, int) or value < 1:
                raise _bad(directory, name, value, "must be a positive integer")
            return value
    raise _bad(directory, names[0], None, "is missing")


def _eos_token_ids(
    directory: Path, config: Mapping[str, object], generation: Mapping[str, object]
) -> tuple[int, ...]:
    """Both files' ids: chat models list their end-of-turn token in only one of them."""
    found: list[int] = []
    for value in (generation.get("eos_token_id"), config.get("eos_token_id")):
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if not isinstance(token_id, int):
                raise _bad(directory, "eos_token_id", value, "must be a token id or a list of them")
            if token_id not in found:
                found.append(token_id)
    return tuple(found)


def _read_json(path: Path, *, is_required: bool) -> Mapping[str, object]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        if is_required:
            raise ModelError(f"{path}: missing; a transformers model directory is needed") from None
        return {}
    except (OSError, ValueError) as exc:
        raise ModelError(f"{path}: cannot be read: {reason_of(exc)}") from exc
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return content


def _bad(directory: Path, key: str, value: object, rule: str) -> ModelError:
    return ModelError(f"{directory / 'config.json'}: {key} = {value!r}: {rule}")
