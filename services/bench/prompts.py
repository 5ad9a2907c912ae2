"""Synthetic prompts of an exact token length, and the request bodies around them.

Two ways to be exact: token ids (``/v1/completions`` of lamella, vLLM and SGLang takes them as the prompt), or
text that a tokenizer's directory encodes to exactly that many tokens. Content is a function of the seed, the
request's class and its index alone, so two servers get the same prompts; equal block hashes of a trace become
equal prefix blocks, whichever request they come from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from common.errors import ConfigError
from services.bench.traces import PREFIX_BLOCK_TOKENS

Endpoint = str
ENDPOINTS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

# Streams of numbers that must never meet: a trace's shared blocks, and each request's own tokens.
SHARED_BLOCKS, OWN_TOKENS = 0, 1

WORDS_WANTED = 4096
"""Words to draw from: enough that two prompts share no prefix by chance, few enough to find at once."""
FEWEST_WORDS = 16


@dataclass(frozen=True, slots=True)
class PromptShape:
    """What a prompt has to be: its length, and the prefix blocks it shares with others."""

    class_index: int
    request_index: int
    prompt_tokens: int
    block_hashes: tuple[int, ...] = ()


class PromptSource(Protocol):
    def make_prompt(self, shape: PromptShape) -> Sequence[int] | str:
        """A prompt of exactly ``shape.prompt_tokens`` tokens."""
        ...


def draw_symbols(seed: int, symbols: int, shape: PromptShape) -> np.ndarray:
    """``prompt_tokens`` numbers below ``symbols``: shared blocks first, then the request's own."""
    parts: list[np.ndarray] = []
    left = shape.prompt_tokens
    for block_hash in shape.block_hashes:
        taken = min(left, PREFIX_BLOCK_TOKENS)
        if taken == 0:
            break
        generator = np.random.default_rng((seed, SHARED_BLOCKS, block_hash))
        parts.append(generator.integers(symbols, size=PREFIX_BLOCK_TOKENS)[:taken])
        left -= taken
    own = np.random.default_rng((seed, OWN_TOKENS, shape.class_index, shape.request_index))
    parts.append(own.integers(symbols, size=left))
    return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class TokenIdPrompts:
    """Prompts as token ids in ``lowest_id..highest_id``.

    The default range is above the special and byte tokens and inside the vocabulary of every common model
    (OPT 50,272, Llama 32,000, GPT-2 50,257, SmolLM2 49,152); a server refuses an id that it does not have.
    """

    seed: int
    lowest_id: int = 1000
    highest_id: int = 29999

    def make_prompt(self, shape: PromptShape) -> list[int]:
        symbols = self.highest_id - self.lowest_id + 1
        ids: list[int] = (draw_symbols(self.seed, symbols, shape) + self.lowest_id).tolist()
        return ids


class TextPrompts:
    """Prompts as text that ``tokenizer_directory`` encodes to the length asked for.

    Made of words that are one token each, which byte-level and SentencePiece tokenizers keep
    apart. The count is checked on every prompt: ConfigError where the tokenizer joins or splits them.
    """

    def __init__(self, seed: int, tokenizer_directory: Path) -> None:
        from tokenizers import Tokenizer

        path = tokenizer_directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                "--tokenizer", str(tokenizer_directory), "must be a directory with tokenizer.json"
            )
        self._seed = seed
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._words = self._find_words()
        if len(self._words) < FEWEST_WORDS:
            raise ConfigError(
                "--tokenizer",
                str(tokenizer_directory),
                "must have words that are one token, with and without a space before",
            )

    def _find_words(self) -> list[str]:
        """Up to ``WORDS_WANTED`` lower-case words that stay one token in the middle of a text."""
        spelled = (entry.lstrip("Ġ▁") for entry, _ in sorted(self._tokenizer.get_vocab().items(), key=_by_id))
        candidates = dict.fromkeys(
            word for word in spelled if len(word) > 2 and word.isascii() and word.isalpha() and word.islower()
        )
        words: list[str] = []
        frame = self.count_tokens("a b")
        for word in candidates:
            # The first word of a prompt has no space before it.
            if self.count_tokens(f"a {word} b") == frame + 1 and self.count_tokens(word) == 1:
                words.append(word)
                if len(words) == WORDS_WANTED:
                    break
        return words

    def count_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def make_prompt(self, shape: PromptShape) -> str:
        drawn = [self._words[symbol] for symbol in draw_symbols(self._seed, len(self._words), shape).tolist()]
        text = " ".join(drawn)
        counted = self.count_tokens(text)
        if counted != shape.prompt_tokens:
            raise ConfigError(
                "--tokenizer", shape.prompt_tokens, f"a prompt of that many tokens came out as {counted}"
            )
        return text


def _by_id(entry: tuple[str, int]) -> int:
    return entry[1]


@dataclass(frozen=True, slots=True)
class BodyTemplate:
    """What every request of a run has in common. ``extra`` is merged in as given by the user."""

    endpoint: Endpoint
    model: str
    ignore_eos: bool = True
    temperature: float = 0.0
    extra: tuple[tuple[str, object], ...] = ()


def encode_body(template: BodyTemplate, prompt: Sequence[int] | str, output_tokens: int) -> bytes:
    """The JSON body of one streaming request for ``output_tokens`` tokens."""
    body: dict[str, object] = {
        "model": template.model,
        "max_tokens": output_tokens,
        "temperature": template.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if template.ignore_eos:
        body["ignore_eos"] = True
    if template.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    body.update(template.extra)
    return msgspec.json.encode(body)
