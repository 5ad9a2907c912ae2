"""Passes as graphs: from the same memory again, filled up, over a ragged batch that changes. Without a
CUDA device what would be captured is computed anew each time, by the definition of its attention."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.kv.blocks import blocks_for
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.messages import SamplingParams
from common.model import flash_plan, step_graphs
from common.model.attention import LocalAttention
from common.model.flash_plan import FlashPlan, has_flash
from common.model.interface import SequenceChunk
from common.model.program import ModelProgram, load_program
from common.model.runner import ModelRunner
from common.model.step_graphs import (
    CAPTURED_AFTER,
    KEYS,
    SEQUENCES,
    TOKENS,
    Capture,
    CudaCapture,
    StepGraphs,
    filled_up,
)
from common.steps import Draw, LayerReports, SequenceStep
from tests.common.model.conftest import MakeTiny
from tests.common.model.test_flash_plan import defined

BLOCK_SIZE, BLOCKS = 4, 200
GREEDY = SamplingParams(max_tokens=50, temperature=0.0)
PROMPTS = ((5, 6, 7), (9,), (2, 7, 1, 3, 3, 8, 4, 1, 6), (1, 2, 3, 4), (8, 3), (4, 4, 4, 4, 4, 4, 7))
STAYS = ((0, 12), (0, 3), (1, 11), (2, 7), (4, 10), (4, 6))
"""The steps in which each prompt's sequence is in the batch."""
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: FlashPlan, scale: float
) -> torch.Tensor:
    ends = zip(pairwise(plan.query_ends.tolist()), pairwise(plan.key_ends.tolist()), strict=True)
    assert plan.query_ends[-1] == len(q), "nothing is computed that nobody computes"
    assert plan.key_ends[-1] <= len(k) == len(v) == plan.most_keys
    found = [
        defined(q[begin:end], k[first:last], v[first:last], plan.window, scale)
        for (begin, end), (first, last) in ends
    ]
    return torch.cat(found).to(q.dtype)


class Again:
    """A ``Capture`` of no device."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1

        def again() -> None:
            self.replayed += 1
            work()

        return again


def pool_of(program: ModelProgram) -> KVPool:
    spec = program.spec
    layout = KVLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK_SIZE, program.dtype.itemsize)
    return KVPool(layout, BLOCKS, program.dtype, program.device)


def run_all(runner: ModelRunner) -> list[list[int]]:
    """Sequences come and go: prompts are computed with the others' decodes, the other steps are of decodes
    alone."""
    drawn: list[list[int]] = [[] for _ in PROMPTS]
    each = blocks_for(max(map(len, PROMPTS)) + STAYS[0][1], BLOCK_SIZE)
    for step in range(max(end for _, end in STAYS)):
        here = [index for index, (begin, end) in enumerate(STAYS) if begin <= step < end]
        batch = []
        for index in here:
            tokens, prompt = drawn[index], PROMPTS[index]
            table = tuple(range(each * index, each * (index + 1)))
            draw = Draw(GREEDY, prompt, tokens)
            if tokens:
                start = len(prompt) + len(tokens) - 1
                batch.append(SequenceStep((tokens[-1],), start, table, draw))
            else:
                batch.append(SequenceStep(prompt, 0, table, draw))
        for index, token in zip(here, runner.run(batch), strict=True):
            assert token is not None
            drawn[index].append(token.token_id)
    return drawn


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_steps_from_the_same_memory_are_the_model_s(
    monkeypatch: pytest.MonkeyPatch, tiny: MakeTiny, family: str
) -> None:
    monkeypatch.setattr(flash_plan, "flash_attention", by_definition)
    program = tiny(family).program
    windows = {spec.window for spec in program.attention_specs}
    assert len(windows) == {"llama": 1, "mistral": 1, "gemma3": 2}[family]
    expected_pool, pool, again = pool_of(program), pool_of(program), Again()
    expected = run_all(ModelRunner(program, LocalAttention(expected_pool, program.attention_specs)))
    graphs = StepGraphs(program, pool, again)
    runner = ModelRunner(program, LocalAttention(pool, program.attention_specs), graphs=graphs)
    monkeypatch.setattr(step_graphs, "CAPTURED_AFTER", 1)
    assert [run_all(runner) for _ in range(2)] == [expected] * 2
    torch.testing.assert_close(
        pool.tensor.view(program.dtype), expected_pool.tensor.view(program.dtype), atol=1e-5, rtol=1e-4
    )
    # Passes of 4, 7, 11 and 12 tokens with prompts, filled up to 4, 8 and 16, and of 1 to 5 decodes.
    assert again.captured == len((4, 8, 16)) + len((1, 2, 4, 8))
    assert again.replayed == 2 * STAYS[0][1] - again.captured


@needs_cuda
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_replayed_graph_computes_what_was_captured(tiny: MakeTiny, family: str) -> None:
    device = torch.device("cuda")
    model = tiny(family)
    program = load_program(model.directory, "bfloat16", device, model.directory.parent / "cache")
    captures: tuple[Capture, ...] = CudaCapture(device), Again()
    pools = [pool_of(program) for _ in captures]
    assert all(has_flash(pool, has_softcap=False) for pool in pools)
    runners = [
        ModelRunner(
            program,
            LocalAttention(pool, program.attention_specs),
            graphs=StepGraphs(program, pool, capture),
        )
        for pool, capture in zip(pools, captures, strict=True)
    ]
    for _ in range(1 + step_graphs.CAPTURED_AFTER):
        found, expected = (run_all(runner) for runner in runners)
        assert found == expected
        assert torch.equal(*(pool.tensor for pool in pools))


def test_what_no_graph_takes_goes_the_usual_way(monkeypatch: pytest.MonkeyPatch, tiny: MakeTiny) -> None:
    monkeypatch.setattr(flash_plan, "flash_attention", by_definition)
    program = tiny("llama").program
    pool, again = pool_of(program), Again()
    graphs = StepGraphs(program, pool, again)
    one = SequenceChunk((0, 1), 3, 1)

    def often(chunks: list[SequenceChunk]) -> torch.Tensor | None:
        tokens = [1] * sum(chunk.length for chunk in chunks)
        for _ in range(CAPTURED_AFTER):
            assert graphs.logits(tokens, chunks, (0,)) is None, "it is not worth it yet"
        return graphs.logits(tokens, chunks, (0,))

    assert often([SequenceChunk(tuple(range(200)), 0, TOKENS[-1] + 1)]) is None, "too many tokens"
    assert often([one] * 257) is None, "too many sequences"
    assert often([]) is None
    with pytest.raises(ValueError, match="its block table holds 8 tokens"):
        graphs.logits((1,), [SequenceChunk((0, 1), 8, 1)], (0,))
    with pytest.raises(ValueError, match="chunk of 0 tokens"):
        graphs.logits((1,), [SequenceChunk((0, 1), 8, 0)], (0,))
    with pytest.raises(ValueError, match="leaves the pool of 200 blocks"):
        graphs.logits((1,), [SequenceChunk((0, 200), 3, 1)], (0,))
    monkeypatch.setattr(step_graphs, "KEYS", (256,))
    long = SequenceChunk(tuple(range(65)), 256, 1)
    assert often([long]) is None, "more tokens than are gathered"
    assert again.captured == 0
    answer = often([one])
    assert answer is not None
    assert answer.shape == (1, program.spec.vocab_size)
    assert again.captured == 1
    monkeypatch.setattr(step_graphs, "MOST_GRAPHS", 1)
    assert often([one] * 2) is None, "there are as many graphs as there may be"
    assert graphs.logits((1,), [one], (0,)) is not None
    assert again.captured == 1


def test_a_step_of_which_layers_are_told_is_none(monkeypatch: pytest.MonkeyPatch, tiny: MakeTiny) -> None:
    monkeypatch.setattr(flash_plan, "flash_attention", by_definition)
    program = tiny("llama").program
    pool, again, told = pool_of(program), Again(), list[int]()
    runner = ModelRunner(
        program,
        LocalAttention(pool, program.attention_specs),
        graphs=StepGraphs(program, pool, again),
    )
    batch = [SequenceStep((4,), 0, (0,), None)]
    for _ in range(1 + CAPTURED_AFTER):
        told.clear()
        assert runner.run(batch, LayerReports(1, told.append)) == [None]
        assert told == list(range(1, program.spec.layers + 1))
    assert again.captured == 0
    for _ in range(CAPTURED_AFTER):
        assert not runner.is_settled(batch)
        assert runner.run(batch) == [None]
    assert again.captured == 0
    assert runner.run(batch) == [None]
    assert again.captured == 1
    assert runner.is_settled(batch)


def test_what_cannot_be_captured_is_computed_as_before(
    monkeypatch: pytest.MonkeyPatch, tiny: MakeTiny, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flash_plan, "flash_attention", by_definition)
    program = tiny("llama").program
    tried = 0

    def fails(work: Callable[[], None]) -> Callable[[], None]:
        nonlocal tried
        tried += 1
        work()
        raise RuntimeError("operation not permitted when stream is capturing")

    expected = run_all(ModelRunner(program, LocalAttention(pool_of(program), program.attention_specs)))
    pool = pool_of(program)
    runner = ModelRunner(
        program,
        LocalAttention(pool, program.attention_specs),
        graphs=StepGraphs(program, pool, fails),
    )
    monkeypatch.setattr(step_graphs, "CAPTURED_AFTER", 1)
    batch = [SequenceStep((4,), 0, (0,), None)]
    assert not runner.is_settled(batch)
    assert run_all(runner) == expected
    assert tried == 1
    assert runner.is_settled(batch)
    assert [record.getMessage() for record in caplog.records if record.name == "lamella.model"] == [
        "passes_not_captured"
    ]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=6), st.integers(0, 30))
def test_filled_up_is_what_is_computed_anyway(sequences: list[tuple[int, int]], more: int) -> None:
    chunks = [SequenceChunk((index,), *each) for index, each in enumerate(sequences)]
    ids = {(chunk.block_table, position): hash((chunk, position)) for chunk, position in tokens_of(chunks)}
    tokens = len(ids) + more
    filled, token_ids = filled_up(chunks, list(ids.values()), tokens)
    assert filled[: len(chunks)] == chunks
    assert [ids[chunk.block_table, position] for chunk, position in tokens_of(filled)] == token_ids
    assert len(token_ids) == tokens
    ends = {chunk.block_table: chunk.start + chunk.length for chunk in chunks}
    assert all(chunk.start + chunk.length == ends[chunk.block_table] for chunk in filled)


def tokens_of(chunks: Sequence[SequenceChunk]) -> list[tuple[SequenceChunk, int]]:
    return [(chunk, chunk.start + index) for chunk in chunks for index in range(chunk.length)]


def test_sizes_are_in_order() -> None:
    for sizes in (TOKENS, SEQUENCES, KEYS):
        assert list(sizes) == sorted(set(sizes))
