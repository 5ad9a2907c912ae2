"""A model worker is gone: another one goes on with the KV that the attention workers kept."""

import pytest
import torch

from attention.engine import KeptKV, kept_kv
from common.errors import InvalidRequest, UnknownRequest
from common.kv.blocks import blocks_for
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.model.interface import SequenceChunk
from common.model.program import ModelProgram
from tests.attention.lanes import BLOCK_SIZE, BLOCKS, attention_workers
from tests.attention.test_engine import Step, expected_of, logits_of
from tests.common.model.conftest import MakeTiny

KEY = 77
OTHER_KEY = 78
PROMPT = [9, 4, 2, 7, 1, 3]
REST = [5, 6, 8, 3]


def steps_in(table: tuple[int, ...], key: int = KEY) -> list[Step]:
    """A prompt, then one token at a time."""
    steps: list[Step] = [([SequenceChunk(table, 0, len(PROMPT), key)], PROMPT)]
    for index, token in enumerate(REST):
        steps.append(([SequenceChunk(table, len(PROMPT) + index, 1, key)], [token]))
    return steps


def pool_for(program: ModelProgram, parts: int) -> KVPool:
    spec = program.spec
    layout = KVLayout(spec.layers, spec.kv_heads // parts, spec.head_dim, BLOCK_SIZE, 4)
    return KVPool(layout, BLOCKS, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gemma3"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_sequence_goes_on_over_the_copy_with_the_logits_it_would_have_had(
    family: str, workers: int, tiny: MakeTiny
) -> None:
    program = tiny(family).program
    if program.spec.kv_heads % workers:
        pytest.skip(f"{family} has {program.spec.kv_heads} KV heads")
    begun, table = 3, (6, 2, 9)
    expected = expected_of(program, steps_in((0, 1, 2)))
    with attention_workers(program, workers) as former:
        logits_of(program, former.remote[0], steps_in((5, 3, 8))[:begun])
        former.wait_steps(begun)
        for index in range(workers):
            former.stop(index)
        kept = [kept_kv(lanes, pool) for lanes, pool in zip(former.lanes, former.kv, strict=True)]
    computed = len(PROMPT) + begun - 1
    assert [each.tokens(KEY) for each in kept] == [computed] * workers
    with attention_workers(program, workers) as heirs:
        for each, pool in zip(kept, heirs.kv, strict=True):
            each.copy_to(pool, KEY, computed, table[: blocks_for(computed, BLOCK_SIZE)])
        got = logits_of(program, heirs.remote[0], steps_in(table)[begun:])
    for one, wanted in zip(got, expected[begun:], strict=True):
        torch.testing.assert_close(one, wanted, atol=1e-5, rtol=1e-5)


def test_a_sequence_amid_a_step_is_kept_without_that_steps_tokens(tiny: MakeTiny) -> None:
    program = tiny("llama").program
    with attention_workers(program, 1) as workers:
        remote = workers.remote[0]
        logits_of(program, remote, steps_in((5, 3, 8))[:2])
        workers.wait_steps(2)
        remote.begin([SequenceChunk((5, 3, 8), len(PROMPT) + 1, 1, KEY), SequenceChunk((0,), 0, 1)])
        workers.wait_in_step()
        workers.stop(0)
        kept = kept_kv(workers.lanes[0], workers.kv[0])
    assert kept.held == {KEY: (len(PROMPT) + 1, (5, 3, 8))}


def test_a_sequence_that_changed_lanes_is_kept_as_it_was_last(tiny: MakeTiny) -> None:
    program = tiny("llama").program
    with attention_workers(program, 1, lanes=2) as workers:
        steps = steps_in((5, 3, 8))
        logits_of(program, workers.remote[1], steps[:1])
        logits_of(program, workers.remote[0], [*steps[1:3], *steps_in((4, 1, 2), OTHER_KEY)[:1]])
        logits_of(program, workers.remote[0], steps[3:4])
        workers.wait_steps(5)
        workers.stop(0)
        kept = kept_kv(workers.lanes[0], workers.kv[0])
    assert kept.held == {KEY: (len(PROMPT) + 3, (5, 3, 8))}


def test_what_is_not_kept_or_does_not_fit_is_refused_and_nothing_is_written(tiny: MakeTiny) -> None:
    program = tiny("llama").program
    source, target = pool_for(program, 1), pool_for(program, 1)
    source.tensor.fill_(1)
    kept = KeptKV(source, {KEY: (6, (5, 3))})
    with pytest.raises(UnknownRequest, match="not kept here"):
        kept.copy_to(target, OTHER_KEY, 6, (0, 1))
    with pytest.raises(UnknownRequest, match="of 6 tokens is kept, not of 7"):
        kept.copy_to(target, KEY, 7, (0, 1))
    for blocks in ((), (0,), (0, 1, 2), (0, 0), (0, BLOCKS), (-1, 0)):
        with pytest.raises(InvalidRequest, match="do not fit"):
            kept.copy_to(target, KEY, 6, blocks)
    assert not target.tensor.any()
    kept.copy_to(target, KEY, 4, (7,))
    assert target.keys[0][7].bool().all()
    assert not target.keys[0][:7].any()
