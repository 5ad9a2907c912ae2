"""Tiny models of every family, saved as ordinary directories with random weights (see ``tiny``)."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from common.model import kernels
from common.model.cpu.library import compile_kernels
from common.model.program import ModelProgram, load_program

os.environ["HF_HUB_OFFLINE"] = "1"

VOCAB = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**SMALL, "tie_word_embeddings": True}),
    "llama-rope-scaled": (
        "LlamaConfig",
        {
            **SMALL,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2": ("Qwen2Config", SMALL),
    "qwen3": ("Qwen3Config", {**SMALL, "head_dim": 16}),
    "mistral": ("MistralConfig", {**SMALL, "sliding_window": 11}),
    "opt": (
        "OPTConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
    ),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 512,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **SMALL,
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3": ("Phi3Config", {**SMALL, "tie_word_embeddings": False}),
    "mixtral": ("MixtralConfig", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {**SMALL, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "gpt-neox": (
        "GPTNeoXConfig",
        {name: value for name, value in SMALL.items() if name != "num_key_value_heads"},
    ),
    "cohere": ("CohereConfig", SMALL),
    "gemma2": ("Gemma2Config", {**SMALL, "head_dim": 16, "sliding_window": 9, "attn_logit_softcapping": 0.1}),
}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A family's directory, transformers' own model of it, and our program."""

    directory: Path
    reference: Any
    program: ModelProgram


MakeTiny = Callable[[str], TinyModel]


def save_tiny(family: str, directory: Path) -> Any:
    """Random weights, larger than the initialization's so that attention matters. Returns the model."""
    import transformers

    config_class, settings = FAMILIES[family]
    torch.manual_seed(7)
    config = getattr(transformers, config_class)(**settings)
    build: Any = transformers.AutoModelForCausalLM.from_config
    model = build(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    model.save_pretrained(directory)
    return model


def tiny_models(root: Path) -> MakeTiny:
    """Makes a family's tiny model once, under ``root``."""
    made: dict[str, TinyModel] = {}

    def make(family: str) -> TinyModel:
        if family not in made:
            directory = root / family
            reference = save_tiny(family, directory)
            program = load_program(directory, "float32", torch.device("cpu"), root / "cache")
            made[family] = TinyModel(directory, reference, program)
        return made[family]

    return make


@pytest.fixture(scope="module")
def both_ways() -> Iterator[None]:
    """Compiled kernels are there to be switched on, and off again for the tests of other modules."""
    compile_kernels(Path("~/.cache/lamella"))
    yield
    kernels.use(None)
