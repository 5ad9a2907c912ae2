import json
from pathlib import Path

import pytest

from common.errors import ConfigError, ModelError
from common.spec import read_spec, served_context_length

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


def directory_with(tmp_path: Path, config: dict[str, object], weights: str = "model.safetensors") -> Path:
    directory = tmp_path / "SmolLM2-135M-Instruct"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / weights).write_bytes(b"")
    return directory


def test_a_llama_config_is_read_in_our_words(tmp_path: Path) -> None:
    directory = directory_with(tmp_path, LLAMA)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    spec = read_spec(directory)
    assert spec.name == "SmolLM2-135M-Instruct"
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.vocab_size, spec.context_length) == (49152, 8192)
    assert spec.eos_token_ids == (7, 2)
    assert spec.dtype == "bfloat16"
    assert spec.kv_token_bytes(2) == 2 * 30 * 3 * 64 * 2


def test_gpt2_names_are_understood(tmp_path: Path) -> None:
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 100,
    }
    spec = read_spec(directory_with(tmp_path, config))
    assert (spec.layers, spec.hidden_size, spec.heads, spec.kv_heads, spec.context_length) == (
        2,
        32,
        4,
        4,
        64,
    )
    assert spec.eos_token_ids == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("auto_map", {"AutoModel": "code.Model"}),
        ("is_encoder_decoder", True),
        ("quantization_config", {"bits": 4}),
        ("text_config", {"layers": 3}),
        ("architectures", ["BertForMaskedLM"]),
        ("architectures", None),
        ("model_type", None),
        ("num_hidden_layers", None),
        ("vocab_size", "many"),
        ("num_key_value_heads", 4),
        ("eos_token_id", "end"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_key(tmp_path: Path, key: str, value: object) -> None:
    directory = directory_with(tmp_path, {**LLAMA, key: value})
    with pytest.raises(ModelError, match=key):
        read_spec(directory)


def test_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    directory = directory_with(tmp_path, LLAMA, weights="pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle"):
        read_spec(directory)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: missing"):
        read_spec(tmp_path)


def test_broken_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        read_spec(tmp_path)


def test_a_shorter_context_may_be_served_and_a_longer_one_not(tmp_path: Path) -> None:
    spec = read_spec(directory_with(tmp_path, LLAMA))
    assert served_context_length(spec, None) == spec.context_length
    assert served_context_length(spec, spec.context_length - 1) == spec.context_length - 1
    with pytest.raises(ConfigError, match=r"model\.context_length = \d+: must be at most the model's"):
        served_context_length(spec, spec.context_length + 1)
