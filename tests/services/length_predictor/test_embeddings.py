"""The target's own token embeddings let a classifier understand words that it has not been taught."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.config import ModelConfig
from common.model.tokens import Tokenizer
from services.length_predictor.embeddings import token_embeddings
from services.length_predictor.engine import WIDTH
from services.length_predictor.prompts import encode_prompts
from services.length_predictor.training import Recipe, Sample, train
from services.model_directory import model_directory

TASKS = {
    40: ("Answer with one word: is {} good?", "Yes or no: do people like {}?", "Name the colour of {}."),
    340: ("Write a long story about {}.", "Write an essay about {}.", "Tell a tale in which {} is lost."),
}
"""Output tokens, and what draws about so many."""
THINGS = [
    "a horse",
    "the sea",
    "London",
    "a violin",
    "winter",
    "an old house",
    "the moon",
    "bread",
    "a ship",
    "a garden",
    "a king",
    "rain",
    "a mountain",
    "the market",
    "a clock",
    "a letter",
    "a bridge",
    "the desert",
    "a lamp",
    "a river",
    "a train",
    "a mirror",
]


def tasks_in_words(tokenizer: Tokenizer) -> list[Sample]:
    """What is asked for says how long the output is; what it is about says nothing."""
    draw = random.Random(1)
    asked = [
        (form.format(thing), tokens) for tokens, forms in TASKS.items() for form in forms for thing in THINGS
    ]
    encoded = encode_prompts([prompt for prompt, _ in asked], tokenizer)
    return [
        Sample(ids, tokens + draw.randrange(-30, 30)) for ids, (_, tokens) in zip(encoded, asked, strict=True)
    ]


def test_with_the_default_models_embeddings_tasks_in_words_are_told_apart() -> None:
    directory = model_directory(ModelConfig())
    tokenizer = Tokenizer(directory)
    recipe = Recipe(
        target="any",
        vocab_size=tokenizer.vocab_size,
        granularity=200,
        max_tokens=500,
        epochs=12,
        embeddings=token_embeddings(directory, tokenizer.vocab_size, WIDTH),
    )
    trained = train(tasks_in_words(tokenizer), recipe)
    for each in trained.accuracies[:2]:
        assert each.prompts == len(THINGS) * 6
        assert each.right > 0.9 > 0.6 > each.commonest, each


def test_embeddings_lie_on_the_axes_along_which_the_target_tells_its_tokens_apart(tmp_path: Path) -> None:
    """Two groups of tokens, apart along one axis, among noise."""
    noise = torch.randn((40, 16), generator=torch.Generator().manual_seed(0)) * 0.1
    noise[:20, 3] += 5.0
    save_file({"model.embed_tokens.weight": noise.bfloat16()}, tmp_path / "model.safetensors")
    found = token_embeddings(tmp_path, 40, 2)
    assert found is not None
    assert found.shape == (40, 2)
    assert float(found.std()) == pytest.approx(1.0, abs=1e-3)
    groups = found[:20, 1].sign(), found[20:, 1].sign()
    assert len(set(groups[0].tolist())) == 1
    assert set(groups[0].tolist()) != set(groups[1].tolist())


@pytest.mark.parametrize(
    "tensors", [{}, {"lm_head.weight": (40, 16)}, {"wte.weight": (39, 16)}, {"wte.weight": (40, 1)}]
)
def test_a_directory_without_embeddings_that_would_do_has_none(
    tmp_path: Path, tensors: dict[str, tuple[int, int]]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    if tensors:
        save_file(
            {name: torch.zeros(shape) for name, shape in tensors.items()}, tmp_path / "model.safetensors"
        )
    assert token_embeddings(tmp_path, 40, 2) is None
