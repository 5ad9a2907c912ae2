"""A model's shape by name or from its directory: config.json and the headers of its weight files.

No weight is read, so a model larger than this machine can be analysed; of the usual families config.json
alone is enough.
"""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

import msgspec

from common.errors import ConfigError, ModelError
from common.shapes import SHAPES, ModelShape, body_parameters
from common.spec import ModelSpec, read_spec, weight_files

HEADER_LENGTH = struct.Struct("<Q")
HEADER_LIMIT_BYTES = 100 << 20
OUTPUT_MATRIX = "lm_head.weight"
WIDTH_KEYS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
USUAL_WIDTH = 4
"""Hidden sizes, where a config names none: BLOOM's and GPT-2's."""
FEED_FORWARD_MATRICES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "granite", "olmo2"), 3),
    **dict.fromkeys(("gpt2", "opt", "bloom", "gpt_neox"), 2),
}
"""Of families whose parameters follow from their config alone, where no weights are at hand."""
TIED_BY_DEFAULT = ("gpt2", "opt", "bloom", "gemma", "gemma2")
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


class TensorEntry(msgspec.Struct, frozen=True):
    """What a safetensors header says of one tensor, as far as it matters here."""

    shape: list[int]


def read_shape(model: str, key: str = "model") -> ModelShape:
    """A built-in shape or that of a directory. Raises ConfigError, under ``key``, or ModelError, naming what
    is wrong.

    Sliding windows are not counted: KV and attention of such a model are those of full attention.
    """
    if model in SHAPES:
        return SHAPES[model]
    directory = Path(model)
    if not directory.is_dir():
        rule = f"must be a model directory or one of {', '.join(SHAPES)}"
        raise ConfigError(key, model, rule)
    spec = read_spec(directory, needs_weights=False)
    config = json.loads((directory / "config.json").read_bytes())
    for key in EXPERT_KEYS:
        if config.get(key):
            rule = "a mixture of experts: the formulas read and multiply every weight for every token"
            raise ModelError(f"{directory / 'config.json'}: {key} = {config[key]!r}: {rule}")
    inner = _intermediate_size(config, spec.hidden_size)
    embedding = spec.vocab_size * spec.hidden_size
    if any(directory.glob("*.safetensors")) or spec.model_type not in FEED_FORWARD_MATRICES:
        files = weight_files(directory)
        elements = {name: count for file in files for name, count in _elements(file).items()}
        is_tied = OUTPUT_MATRIX not in elements or config.get("tie_word_embeddings") is True
        if is_tied:
            elements.pop(OUTPUT_MATRIX, None)
        parameters = sum(elements.values())
    else:
        is_tied = config.get("tie_word_embeddings", spec.model_type in TIED_BY_DEFAULT) is True
        parameters = _counted(spec, inner) + (embedding if is_tied else 2 * embedding)
    return ModelShape(
        name=spec.name,
        layers=spec.layers,
        hidden_size=spec.hidden_size,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=inner,
        vocab_size=spec.vocab_size,
        parameters=parameters,
        lookup_parameters=0 if is_tied else embedding,
    )


def _counted(spec: ModelSpec, inner: int) -> int:
    """Parameters of all but the embeddings, of a config alone. Biases and position tables, which are not in
    it, are left out: under a thousandth part."""
    return body_parameters(
        layers=spec.layers,
        hidden_size=spec.hidden_size,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=inner,
        feed_forward_matrices=FEED_FORWARD_MATRICES[spec.model_type],
    )


def _intermediate_size(config: Mapping[str, object], hidden_size: int) -> int:
    named = (config.get(key) for key in WIDTH_KEYS)
    return next((width for width in named if isinstance(width, int) and width > 0), USUAL_WIDTH * hidden_size)


def _elements(file: Path) -> dict[str, int]:
    """Tensor name → how many elements. The file starts with its header's length and the header, JSON."""
    try:
        with file.open("rb") as stream:
            (length,) = HEADER_LENGTH.unpack(stream.read(HEADER_LENGTH.size))
            header = json.loads(stream.read(min(length, HEADER_LIMIT_BYTES)))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        entries = msgspec.convert(tensors, dict[str, TensorEntry])
    except (OSError, ValueError, struct.error, AttributeError, msgspec.ValidationError) as exc:
        raise ModelError(f"{file}: not a safetensors file: {exc}") from exc
    return {name: math.prod(entry.shape) for name, entry in entries.items()}
