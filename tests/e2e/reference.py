"""What transformers itself generates: the truth that every path of the mesh is held against."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers


@functools.cache
def reference_model(directory: Path) -> Any:
    """In evaluation mode, as from_pretrained leaves it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, use_safetensors=True
    )
    # No end token: generate then neither stops early nor touches its logit.
    model.generation_config.eos_token_id = None
    return model


BATCH = 8
"""Prompts of similar length: among twenty of 3 to 700 tokens, padding would be two thirds of the work."""


def greedy_tokens(directory: Path, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """``tokens`` greedy tokens for each prompt, in fp32; never stops early."""
    model = reference_model(directory)
    shortest_first = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    found: dict[int, list[int]] = {}
    for start in range(0, len(prompts), BATCH):
        batch = shortest_first[start : start + BATCH]
        outputs = greedy_batch(model, [prompts[index] for index in batch], tokens)
        found |= zip(batch, outputs, strict=True)
    return [found[index] for index in range(len(prompts))]


@torch.inference_mode()
def greedy_batch(model: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Left-padded into one batch."""
    width = max(map(len, prompts))
    input_ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(
        input_ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return [row[width:].tolist() for row in output]
