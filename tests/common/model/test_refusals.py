"""Models that cannot be split are refused with what stopped them, named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from common.errors import ModelError
from common.model.program import load_program
from tests.common.model.conftest import FAMILIES, SMALL, VOCAB, save_tiny

TINY: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 512, "hidden_size": 32}

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "own attention, bloom": (
        "BloomConfig",
        {**TINY, "n_layer": 2, "n_head": 4},
        r"BloomAttention at transformer\.h\.0\.self_attention computes attention in its own code",
    ),
    "own attention, falcon": (
        "FalconConfig",
        {**TINY, "num_hidden_layers": 2, "num_attention_heads": 4},
        r"FalconAttention at transformer\.h\.0\.self_attention",
    ),
    "own attention, gpt-j": (
        "GPTJConfig",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 512},
        r"GPTJAttention at transformer\.h\.0\.attn",
    ),
    "positions scaled by the longest in the batch": (
        "LlamaConfig",
        {
            **SMALL,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        r"cannot be captured, at `if seq_len > .*` in LlamaRotaryEmbedding model\.rotary_emb",
    ),
    "a buffer written in every step": (
        "Phi3Config",
        {
            **SMALL,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            },
        },
        r"writes to model\.rotary_emb\.inv_freq",
    ),
    "convolutions' state": (
        "Lfm2Config",
        {**SMALL, "layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 64},
        r"attention in layers \[1\]: Lfm2ShortConv at model\.layers\.0\.conv keeps state",
    ),
    "state spaces beside attention": (
        "FalconH1Config",
        {**SMALL, "head_dim": 8, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32},
        r"FalconH1Mixer at model\.layers\.0\.mamba keeps state",
    ),
    "attention sinks": (
        "GptOssConfig",
        {**SMALL, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        r"GptOssAttention model\.layers\.0\.self_attn: attention sinks of layer 0 are not served: an "
        "attention worker has no weights",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_split_is_refused_with_what_stopped_it(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_class, settings, reason = REFUSED[case]
    monkeypatch.setitem(FAMILIES, case, (config_class, settings))
    save_tiny(case, tmp_path / "model")
    with pytest.raises(ModelError, match=reason):
        load_program(tmp_path / "model", "float32", torch.device("cpu"), tmp_path / "cache")
    assert not list((tmp_path / "cache" / "programs").glob("*/manifest.json"))


def less_the_mean(mlp: Any, hidden: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = mlp.down_proj(F.silu(mlp.gate_proj(hidden)) * mlp.up_proj(hidden))
    return output - output.mean(dim=1, keepdim=True)


def running_sum(mlp: Any, hidden: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = mlp.down_proj(F.silu(mlp.gate_proj(hidden)) * mlp.up_proj(hidden))
    return output.cumsum(dim=1)


@pytest.mark.parametrize(("mixing", "operator"), [(less_the_mean, "mean"), (running_sum, "cumsum")])
def test_an_operator_that_mixes_tokens_is_named(
    mixing: Any, operator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    save_tiny("llama", tmp_path / "model")
    monkeypatch.setattr(LlamaMLP, "forward", mixing)
    with pytest.raises(ModelError, match=rf"mixes tokens .*first by {operator} in model\.layers\.0\.mlp"):
        load_program(tmp_path / "model", "float32", torch.device("cpu"), tmp_path / "cache")
