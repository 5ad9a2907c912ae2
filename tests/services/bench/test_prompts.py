"""Prompts: exact lengths, equal prefixes for equal hashes, nothing shared otherwise."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from common.errors import ConfigError
from services.bench.prompts import BodyTemplate, PromptShape, TextPrompts, TokenIdPrompts, encode_body
from services.bench.traces import PREFIX_BLOCK_TOKENS

WORDS = [
    f"{first}{second}{third}" for first in "bdfgk" for second in "aeiou" for third in ("nt", "rm", "st", "lk")
]


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer, like GPT-2's and SmolLM's, trained on a hundred words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [" ".join(WORDS), *WORDS]
    tokenizer.train_from_iterator(text * 3, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@given(st.integers(1, 3000), st.lists(st.integers(0, 10**9), max_size=6).map(tuple), st.integers(0, 99))
def test_token_ids_are_of_exact_length_and_in_range(
    length: int, hashes: tuple[int, ...], request_index: int
) -> None:
    prompt = TokenIdPrompts(seed=1).make_prompt(PromptShape(0, request_index, length, hashes))
    assert len(prompt) == length
    assert all(1000 <= token <= 29999 for token in prompt)


def test_equal_hashes_are_equal_blocks_and_the_rest_is_each_requests_own() -> None:
    prompts = TokenIdPrompts(seed=1)
    first = prompts.make_prompt(PromptShape(0, 0, 3 * PREFIX_BLOCK_TOKENS, (4, 5)))
    second = prompts.make_prompt(PromptShape(0, 1, 3 * PREFIX_BLOCK_TOKENS, (4, 6)))
    size = PREFIX_BLOCK_TOKENS
    assert first[:size] == second[:size]
    assert first[size : 2 * size] != second[size : 2 * size]
    assert first[2 * size :] != second[2 * size :]
    # A block that the prompt ends in is the beginning of the whole block.
    assert prompts.make_prompt(PromptShape(0, 2, size + 10, (4, 5))) == first[: size + 10]


def test_class_index_and_seed_each_make_another_prompt() -> None:
    shapes = [PromptShape(kind, index, 64) for kind in (0, 1) for index in (0, 1)]
    made = [tuple(TokenIdPrompts(seed).make_prompt(shape)) for seed in (0, 1) for shape in shapes]
    assert len(set(made)) == 8


@given(length=st.integers(1, 1200), request_index=st.integers(0, 9))
def test_text_encodes_to_exactly_the_length_asked_for(
    tokenizer_directory: Path, length: int, request_index: int
) -> None:
    prompts = TextPrompts(0, tokenizer_directory)
    text = prompts.make_prompt(PromptShape(0, request_index, length, (1,)))
    encoded = Tokenizer.from_file(str(tokenizer_directory / "tokenizer.json")).encode(text)
    assert len(encoded.ids) == length


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        TextPrompts(0, tmp_path)


def test_bodies_ask_for_an_exact_length_and_for_usage() -> None:
    body = json.loads(encode_body(BodyTemplate("completions", "m"), [5, 6], 7))
    assert body == {
        "model": "m",
        "prompt": [5, 6],
        "max_tokens": 7,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    chat = json.loads(
        encode_body(BodyTemplate("chat", "m", ignore_eos=False, extra=(("top_k", 3),)), "hi", 7)
    )
    assert chat["messages"] == [{"role": "user", "content": "hi"}]
    assert chat["top_k"] == 3
    assert "ignore_eos" not in chat
