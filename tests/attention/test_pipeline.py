"""Two batches that take turns on one model replica, over real attention workers."""

import asyncio

import pytest
import torch

from common.engine_thread import EngineThread
from common.errors import AttentionLost
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.messages import SampledToken, SamplingParams
from common.model.attention import LocalAttention
from common.model.program import ModelProgram
from common.model.runner import ModelRunner
from common.steps import Draw, SequenceStep
from decode.pipeline import StaggeredEngine
from tests.attention.lanes import BLOCK_SIZE, BLOCKS, Workers, attention_workers
from tests.common.model.conftest import MakeTiny, tiny

__all__ = ["tiny"]

GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
PROMPTS = {0: [[5, 6, 7], [9]], 1: [[1, 2, 3, 4], [8, 3]]}
"""By lane."""
STEPS = 6


def step_of(lane: int, index: int, tokens: list[int], start: int) -> SequenceStep:
    first_block = 6 * lane + 3 * index
    table = tuple(range(first_block, first_block + 3))
    return SequenceStep(tuple(tokens), start, table, Draw(GREEDY, (), ()), key=1 + first_block)


def first_batch(lane: int) -> list[SequenceStep]:
    return [step_of(lane, index, prompt, 0) for index, prompt in enumerate(PROMPTS[lane])]


def next_batch(lane: int, batch: list[SequenceStep], tokens: list[SampledToken | None]) -> list[SequenceStep]:
    following = []
    for index, (step, token) in enumerate(zip(batch, tokens, strict=True)):
        assert token is not None
        following.append(step_of(lane, index, [token.token_id], step.start + len(step.token_ids)))
    return following


def expected_tokens(program: ModelProgram, lane: int) -> list[list[int]]:
    spec = program.spec
    layout = KVLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK_SIZE, 4)
    pool = KVPool(layout, BLOCKS, torch.float32, torch.device("cpu"))
    runner = ModelRunner(program, LocalAttention(pool, program.attention_specs))
    batch, drawn = first_batch(lane), []
    for _ in range(STEPS):
        tokens = runner.run(batch)
        drawn.append([token.token_id for token in tokens if token is not None])
        batch = next_batch(lane, batch, tokens)
    return drawn


def staggered(program: ModelProgram, workers: Workers, thread: EngineThread) -> StaggeredEngine:
    replicas = []
    for remote in workers.remote:
        pool = KVPool(KVLayout(1, 1, 1, 1, 4), 1, torch.float32, torch.device("cpu"))
        model = ModelRunner(program, LocalAttention(pool, program.attention_specs))
        replicas.append((model.over(remote, remote.lost_chunks), remote))
    return StaggeredEngine(thread, replicas)


@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_batches_that_take_turns_draw_the_tokens_of_one_process(
    family: str, mini_batches: int, tiny: MakeTiny
) -> None:
    program = tiny(family).program

    async def run(engine: StaggeredEngine, lane: int) -> list[list[int]]:
        batch, drawn = first_batch(lane), []
        for _ in range(STEPS):
            tokens = await engine.run(lane, batch)
            drawn.append([token.token_id for token in tokens if token is not None])
            batch = next_batch(lane, batch, tokens)
        return drawn

    async def both(engine: StaggeredEngine) -> list[list[list[int]]]:
        return list(await asyncio.gather(run(engine, 0), run(engine, 1)))

    thread = EngineThread()
    try:
        for count in (1, 2):
            with attention_workers(program, count, lanes=2, mini_batches=mini_batches) as workers:
                drawn = asyncio.run(both(staggered(program, workers, thread)))
            assert drawn == [expected_tokens(program, 0), expected_tokens(program, 1)]
    finally:
        thread.close()


def test_a_lane_whose_attention_is_lost_fails_alone_and_the_thread_goes_on(tiny: MakeTiny) -> None:
    program = tiny("llama").program
    thread = EngineThread()
    try:
        with attention_workers(program, 1, lanes=2) as workers:
            engine = staggered(program, workers, thread)
            workers.stop(0)
            for lane in (0, 1):
                with pytest.raises(AttentionLost):
                    asyncio.run(engine.run(lane, first_batch(lane)))
    finally:
        thread.close()
