"""The mesh gives the tokens that transformers gives, whatever its shape, and leaves nothing behind."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from common.model.default_model import default_model_directory
from common.model.tokens import Tokenizer
from tests.e2e.meshes import Mesh, running_mesh
from tests.e2e.reference import greedy_tokens

PROMPTS = 20
OUTPUT_TOKENS = 64
FEW = 4, 24
"""Prompts and output tokens where all paths are taken by these."""
ALL = PROMPTS, OUTPUT_TOKENS


@dataclass(frozen=True, slots=True)
class Truth:
    """Prompts as token ids, and the tokens that transformers continues each with."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    tokenizer: Tokenizer

    def texts(self, prompts: int, tokens: int) -> list[str]:
        """Of the first prompts, and of so many tokens."""
        return [
            self.tokenizer.decode(each[:tokens], skip_special_tokens=True) for each in self.tokens[:prompts]
        ]


@pytest.fixture(scope="module")
def truth() -> Truth:
    """Prompts of 3 to 700 tokens of ordinary text: shorter and longer than a chunk and than a block."""
    directory = default_model_directory(Path("~/.cache/lamella"))
    tokenizer = Tokenizer(directory)
    text = Path(__file__).resolve().parents[2].joinpath("README.md").read_text()
    words = tokenizer.encode(text * 2)
    chance = random.Random(7)
    prompts = []
    for index in range(PROMPTS):
        length = (3, 700, 256, 90, 257, 20, 255)[index % 7]
        start = chance.randrange(len(words) - length)
        prompts.append(words[start : start + length])
    return Truth(prompts, greedy_tokens(directory, prompts, OUTPUT_TOKENS), tokenizer)


SHAPES = {
    "one of each, shared memory": ((), "", "shared_memory", ALL),
    "two of each, Mooncake, small chunks and blocks": (
        ("--prefill", "2", "--decode", "2"),
        '[scheduler]\nprefill_policy = "round_robin"\ndecode_policy = "power_of_two"\n'
        '[instance]\nchunk_tokens = 96\nblock_size = 16\nprefill_order = "srpt"\n',
        "mooncake",
        (8, OUTPUT_TOKENS),
    ),
    "mixed instances alone, chunks beside decodes": (
        ("--mixed", "2"),
        "[instance]\nchunk_tokens = 96\nblock_size = 16\n",
        "auto",
        (8, OUTPUT_TOKENS),
    ),
    "mixed instances alone, prompts first": (
        ("--mixed", "2"),
        '[instance]\nchunk_tokens = 96\nmixed_policy = "prefill_first"\nmixed_max_wait_s = 0.1\n',
        "auto",
        (8, OUTPUT_TOKENS),
    ),
    "mixed instances alone, whole prompts beside decodes": (
        ("--mixed", "1"),
        '[instance]\nchunk_tokens = 96\nmixed_policy = "orca"\nmax_decode_batch = 3\n',
        "auto",
        (8, 24),
    ),
    "a static batch after another": (
        ("--mixed", "1"),
        '[instance]\nchunk_tokens = 96\nmixed_policy = "static"\nmax_decode_batch = 3\n',
        "auto",
        (8, 24),
    ),
    "a mixed instance beside one of each, by turns": (
        ("--mixed", "1", "--prefill", "1", "--decode", "1"),
        '[scheduler]\nprefill_policy = "round_robin"\ndecode_policy = "least_outstanding"\n'
        "[instance]\nchunk_tokens = 96\n",
        "auto",
        (8, 24),
    ),
    "attention on three workers": (
        ("--attention", "3"),
        "[instance]\nchunk_tokens = 96\nblock_size = 16\n",
        "auto",
        FEW,
    ),
    "attention on one worker, all over Mooncake": (("--attention", "1"), "", "mooncake", FEW),
    "attention by requests, two decode instances, mini-batches": (
        ("--decode", "2", "--attention", "2", "--partition", "requests"),
        "[instance]\nblock_size = 16\nattention_mini_batches = 2\n",
        "auto",
        FEW,
    ),
    "three batches rotate over two model replicas": (
        ("--attention", "1", "--pipeline", "rotational", "--batches", "3"),
        "",
        "auto",
        FEW,
    ),
    "two batches fixed on a model replica each": (
        ("--attention", "1", "--pipeline", "fixed"),
        "",
        "auto",
        FEW,
    ),
    "token granularity, best fit, decodes by what they will grow to": (
        (),
        '[scheduler]\ndecode_policy = "best_fit"\n'
        '[instance]\nchunk_tokens = 300\nblock_size = 1\ndecode_admission = "reserve_dynamic"\n',
        "auto",
        FEW,
    ),
}
"""Options, settings, transfer path, how many of the prompts and how many tokens of each."""


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_tokens_equal_transformers(shape: str, truth: Truth, tmp_path: Path) -> None:
    arguments, instance, path, (prompts, tokens) = SHAPES[shape]
    config = f'{instance}[transfer]\npath = "{path}"\n'
    with running_mesh(tmp_path / "mesh", "--dtype", "fp32", *arguments, config=config) as mesh:
        texts = asyncio.run(complete_all(mesh, truth.prompts[:prompts], tokens))
        assert texts == truth.texts(prompts, tokens)
        assert asyncio.run(mesh.left_over()) == {}


async def complete_all(mesh: Mesh, prompts: Sequence[Sequence[int]], tokens: int) -> list[str]:
    """All at once, streamed."""
    async with mesh.client() as client:
        return await asyncio.gather(*(complete(client, prompt, tokens) for prompt in prompts))


async def complete(client: openai.AsyncOpenAI, prompt: Sequence[int], tokens: int) -> str:
    stream = await client.completions.create(
        model="default",
        prompt=list(prompt),
        max_tokens=tokens,
        temperature=0,
        stream=True,
        timeout=240,
        extra_body={"ignore_eos": True},
    )
    return "".join([chunk.choices[0].text async for chunk in stream])
