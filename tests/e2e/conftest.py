"""The model that meshes serve where its size does not matter."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.model.default_model import default_model_directory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, of a size at which every token is drawn anew, under the default model's tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    for file in default_model_directory(Path("~/.cache/lamella")).glob("*token*"):
        shutil.copy(file, directory)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory
