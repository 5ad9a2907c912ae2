"""What a model is, read from its directory's JSON files alone: no torch, no transformers, no weights.

A directory is refused here for what can be seen without loading it: no config, no safetensors weights
(pickled ones are never read), code of its own (``auto_map``), or an encoder.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ModelError

DEFAULT_CONTEXT_LENGTH = 2048


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model's shape (Vidur 4.1's declarative specification).

    ``context_length`` is prompt and output together, in tokens. ``eos_token_ids`` end a sequence.
    """

    name: str
    architecture: str
    model_type: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]

    def kv_token_bytes(self, element_bytes: int) -> int:
        """KV of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


def read_spec(directory: Path) -> ModelSpec:
    """Reads config.json and generation_config.json. Raises ModelError naming file, key and rule."""
    config = _read_json(directory, "config.json")
    _refuse_unservable(directory, config)
    text = config.get("text_config", config)
    hidden_size = _integer(directory, text, "hidden_size", "n_embd")
    heads = _integer(directory, text, "num_attention_heads", "n_head")
    return ModelSpec(
        name=directory.name,
        architecture=(config.get("architectures") or ["unknown"])[0],
        model_type=str(config["model_type"]),
        layers=_integer(directory, text, "num_hidden_layers", "n_layer"),
        hidden_size=hidden_size,
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or hidden_size // heads,
        vocab_size=_integer(directory, text, "vocab_size"),
        context_length=text.get("max_position_embeddings")
        or text.get("n_positions")
        or DEFAULT_CONTEXT_LENGTH,
        eos_token_ids=_eos_token_ids(directory, config),
    )


def weight_files(directory: Path) -> list[Path]:
    """The directory's safetensors files. Raises ModelError when there is none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for path in directory.iterdir() if path.suffix in {".bin", ".pt", ".pth"})
        found = f"; {', '.join(others)} is pickled and never read" if others else ""
        raise ModelError(f"{directory}: no *.safetensors weights{found}")
    return files


def _refuse_unservable(directory: Path, config: dict[str, Any]) -> None:
    if "auto_map" in config:
        raise ModelError(
            f"{directory}/config.json: auto_map asks to run the model's own code, which is never done"
        )
    if "model_type" not in config:
        raise ModelError(f"{directory}/config.json: model_type is missing")
    if config.get("is_encoder_decoder"):
        raise ModelError(f"{directory}/config.json: is_encoder_decoder = true, only decoders are served")
    weight_files(directory)


def _eos_token_ids(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation: dict[str, Any] = {}
    if (directory / "generation_config.json").exists():
        generation = _read_json(directory, "generation_config.json")
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)


def _integer(directory: Path, config: dict[str, Any], *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError(f"{directory}/config.json: {' or '.join(keys)} must be an integer over 0")


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    path = directory / name
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as exc:
        raise ModelError(f"{path}: no such file, so this is not a transformers model directory") from exc
    except (OSError, ValueError) as exc:
        raise ModelError(f"{path}: cannot be read: {exc}") from exc
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return content
