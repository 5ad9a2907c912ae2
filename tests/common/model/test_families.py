"""Every family's program against transformers' own forward pass, through the paged pool."""

from dataclasses import dataclass, field

import pytest
import torch

from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.model.attention import LocalAttention
from common.model.interface import SequenceChunk
from common.spec import AttentionSpec
from tests.common.model.conftest import FAMILIES, VOCAB, MakeTiny, TinyModel

CPU = torch.device("cpu")
TOLERANCE = 2e-5


@dataclass
class Sequences:
    """Some sequences in one pool, advanced by batches of (sequence, tokens)."""

    model: TinyModel
    block_size: int
    token_ids: list[torch.Tensor]
    specs: tuple[AttentionSpec, ...] | None = None
    done: list[int] = field(init=False)
    tables: list[list[int]] = field(init=False)
    attention: LocalAttention = field(init=False)

    def __post_init__(self) -> None:
        spec = self.model.program.spec
        layout = KVLayout(spec.layers, spec.kv_heads, spec.head_dim, self.block_size, 4)
        needed = [-(-len(ids) // self.block_size) for ids in self.token_ids]
        pool = KVPool(layout, sum(needed) + 3, torch.float32, CPU)
        order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(3)).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in needed]
        self.done = [0] * len(needed)
        self.attention = LocalAttention(pool, self.specs or self.model.program.attention_specs)

    def advance(self, batch: list[tuple[int, int]]) -> list[torch.Tensor]:
        """The logits of every token of the batch, per sequence."""
        chunks, ids, positions = [], [], []
        for sequence, tokens in batch:
            start = self.done[sequence]
            chunks.append(SequenceChunk(self.tables[sequence], start, tokens))
            ids.append(self.token_ids[sequence][start : start + tokens])
            positions.append(torch.arange(start, start + tokens))
            self.done[sequence] += tokens
        self.attention.begin(chunks)
        flat = torch.cat(ids)
        rows = torch.arange(len(flat))
        logits = self.model.program.run(flat, torch.cat(positions), self.attention, rows)
        return list(torch.split(logits, [tokens for _, tokens in batch]))


def some_tokens(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]


def reference_logits(model: TinyModel, token_ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.reference(token_ids[None], use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_chunks_and_steps_give_transformers_logits(
    tiny: MakeTiny, family: str, block_size: int
) -> None:
    model = tiny(family)
    sequences = Sequences(model, block_size, some_tokens(24, 13, 30))
    batches = [
        [(0, 17), (1, 1)],
        [(0, 1), (1, 5), (2, 9)],
        [(2, 12), (1, 1)],
        [(0, 1), (1, 1), (2, 1)],
        [(2, 1), (0, 1)],
        [(1, 5), (0, 4), (2, 7)],
    ]
    computed: list[list[torch.Tensor]] = [[], [], []]
    for batch in batches:
        for (sequence, _), logits in zip(batch, sequences.advance(batch), strict=True):
            computed[sequence].append(logits)
    for token_ids, parts in zip(sequences.token_ids, computed, strict=True):
        torch.testing.assert_close(
            torch.cat(parts), reference_logits(model, token_ids), atol=TOLERANCE, rtol=0.0
        )


@pytest.mark.parametrize(
    ("family", "change"),
    [("mistral", {"window": None}), ("gemma3", {"window": None}), ("gemma2", {"softcap": None})],
)
def test_a_wrong_attention_would_be_seen(tiny: MakeTiny, family: str, change: dict[str, None]) -> None:
    model = tiny(family)
    specs = tuple(
        AttentionSpec(**{**{name: getattr(spec, name) for name in spec.__struct_fields__}, **change})
        for spec in model.program.attention_specs
    )
    token_ids = some_tokens(24)
    sequences = Sequences(model, 16, token_ids, specs)
    (logits,) = sequences.advance([(0, 24)])
    assert float((logits - reference_logits(model, token_ids[0])).abs().max()) > 100 * TOLERANCE


def test_only_the_asked_rows_reach_the_last_slice(tiny: MakeTiny) -> None:
    model = tiny("llama")
    token_ids = some_tokens(12)[0]
    sequences = Sequences(model, 16, [token_ids])
    sequences.attention.begin([SequenceChunk(sequences.tables[0], 0, 12)])
    positions = torch.arange(12)
    rows = torch.tensor([11, 3])
    logits = model.program.run(token_ids, positions, sequences.attention, rows)
    expected = reference_logits(model, token_ids)[[11, 3]]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0.0)


def test_a_chunk_without_rows_still_fills_the_pool(tiny: MakeTiny) -> None:
    model = tiny("qwen2")
    token_ids = some_tokens(12)[0]
    sequences = Sequences(model, 16, [token_ids])
    sequences.attention.begin([SequenceChunk(sequences.tables[0], 0, 11)])
    none = torch.empty(0, dtype=torch.int64)
    logits = model.program.run(token_ids[:11], torch.arange(11), sequences.attention, none)
    assert logits.shape == (0, VOCAB)
    sequences.done[0] = 11
    (last,) = sequences.advance([(0, 1)])
    torch.testing.assert_close(last, reference_logits(model, token_ids)[-1:], atol=TOLERANCE, rtol=0.0)


def test_a_block_table_too_short_is_refused(tiny: MakeTiny) -> None:
    sequences = Sequences(tiny("llama"), 16, some_tokens(16))
    with pytest.raises(ValueError, match="chunk of 2 tokens after 15"):
        sequences.attention.begin([SequenceChunk(sequences.tables[0], 15, 2)])
