"""The embedded default model, converted from its wheel, against transformers' own generation."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ModelError
from common.kv.blocks import blocks_for
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.messages import SamplingParams
from common.model.attention import LocalAttention
from common.model.default_model import default_model_directory
from common.model.interface import SequenceChunk
from common.model.program import load_program
from common.model.runner import ModelRunner
from common.steps import Draw, SequenceStep

PROMPTS = (
    "The capital of France is",
    "In 1969, three astronauts left for the moon. Their names were",
    "def fibonacci(n):\n    ",
)
OUTPUT_TOKENS = 16


@pytest.fixture(scope="module")
def directory() -> Path:
    cache = Path(os.environ.get("LAMELLA_CACHE", "~/.cache/lamella")).expanduser()
    try:
        return default_model_directory(cache)
    except ModelError as exc:
        pytest.skip(f"the default model is not here: {exc}")


@pytest.fixture(scope="module")
def references(directory: Path) -> list[Any]:
    """transformers' own, in fp32 and in bf16."""
    import transformers

    return [
        transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, local_files_only=True, use_safetensors=True
        )
        for dtype in (torch.float32, torch.bfloat16)
    ]


def test_digits_are_single_tokens(directory: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert tokenizer.tokenize("1234 56") == ["1", "2", "3", "4", "Ġ", "5", "6"]
    assert tokenizer.chat_template
    assert tokenizer.model_max_length == 8192


def test_greedy_tokens_equal_generate(directory: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    prompts = [tuple(tokenizer(prompt).input_ids) for prompt in PROMPTS]
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, use_safetensors=True
    )
    expected = [
        reference.generate(
            torch.tensor([prompt]), max_new_tokens=OUTPUT_TOKENS, do_sample=False, pad_token_id=2
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    del reference
    cache = directory.parents[2]
    program = load_program(directory, "float32", torch.device("cpu"), cache)
    spec = program.spec
    layout = KVLayout(spec.layers, spec.kv_heads, spec.head_dim, block_size=16, element_bytes=4)
    pool = KVPool(layout, 3 * 4, torch.float32, torch.device("cpu"))
    runner = ModelRunner(program, LocalAttention(pool, program.attention_specs))
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0)
    tables = [tuple(range(index, 12, 3)) for index in range(3)]
    outputs: list[list[int]] = [[], [], []]
    for step in range(OUTPUT_TOKENS):
        batch = [
            SequenceStep(
                token_ids=(output[-1],) if output else prompt,
                start=len(prompt) + step - 1 if output else 0,
                block_table=table,
                draw=Draw(sampling, prompt, output),
            )
            for prompt, output, table in zip(prompts, outputs, tables, strict=True)
        ]
        for output, token in zip(outputs, runner.run(batch), strict=True):
            assert token is not None
            output.append(token.token_id)
    for output, tokens in zip(outputs, expected, strict=True):
        assert output[: len(tokens)] == tokens


@pytest.mark.parametrize("chunks", [(37,), (63,), (100,), (127,), (254,), (100, 99), (64, 33, 90)])
def test_logits_in_bf16_are_as_near_to_fp32_as_those_of_transformers(
    directory: Path, references: list[Any], chunks: tuple[int, ...]
) -> None:
    """Chunks that fill no whole tile of a CPU's bf16 products, rows or keys, alone and after others."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    total = sum(chunks)
    prompt = (tokenizer(" ".join(PROMPTS)).input_ids * total)[:total]
    with torch.inference_mode():
        exact, usual = (model(torch.tensor([prompt])).logits[0, -1].float() for model in references)

    program = load_program(directory, "bfloat16", torch.device("cpu"), directory.parents[2])
    spec = program.spec
    layout = KVLayout(spec.layers, spec.kv_heads, spec.head_dim, block_size=16, element_bytes=2)
    blocks = tuple(range(blocks_for(total, 16)))
    pool = KVPool(layout, len(blocks), torch.bfloat16, torch.device("cpu"))
    attention = LocalAttention(pool, program.attention_specs)
    start = 0
    logits = torch.empty(0)
    for count in chunks:
        attention.begin([SequenceChunk(blocks, start, count)])
        end = start + count
        [logits] = program.run(
            torch.tensor(prompt[start:end]), torch.arange(start, end), attention, torch.tensor([count - 1])
        )
        start = end

    assert (logits.float() - exact).std() < 1.5 * (usual - exact).std() < 1
