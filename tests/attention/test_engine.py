"""A model worker and attention workers over real shared buffers, against attention in one process."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.engine import AttentionLoop, ServedLane
from common.errors import AttentionLost
from common.exchange_shape import ExchangeShape
from common.host_cores import HostCores
from common.ids import BindingId
from common.kv.blocks import POOL_STRIDE
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.model import kernels
from common.model.attention import LocalAttention
from common.model.exchange import Pace
from common.model.interface import SequenceChunk
from common.model.program import ModelProgram
from tests.attention.lanes import BLOCK_SIZE, BLOCKS, FAMILIES, attention_workers, lanes_of, wait
from tests.common.model.conftest import MakeTiny
from tests.common.model.test_cpu_kernels import CACHE
from tests.common.test_host_cores import claiming_process

Step = tuple[list[SequenceChunk], list[int]]

STEPS: tuple[Step, ...] = (
    ([SequenceChunk((3, 1), 0, 5)], [9, 4, 2, 7, 1]),
    ([SequenceChunk((0,), 0, 3), SequenceChunk((3, 1), 5, 1)], [5, 6, 8, 3]),
    ([SequenceChunk((0,), 3, 1), SequenceChunk((3, 1), 6, 1), SequenceChunk((5,), 0, 1)], [1, 2, 3]),
    ([SequenceChunk((3, 1), 7, 1)], [11]),
    ([SequenceChunk((5,), 1, 1), SequenceChunk((0, 7), 4, 1)], [4, 12]),
)
"""Batches that sequences join and leave, and a prompt that arrives beside decode."""


def in_pools(steps: Sequence[Step], pools: int) -> list[Step]:
    """The sequence that begins in block b lives in pool b mod ``pools``, under the same block numbers."""

    def moved(chunk: SequenceChunk) -> SequenceChunk:
        offset = chunk.block_table[0] % pools * POOL_STRIDE
        return SequenceChunk([block + offset for block in chunk.block_table], chunk.start, chunk.length, 1)

    return [([moved(chunk) for chunk in chunks], tokens) for chunks, tokens in steps]


def logits_of(program: ModelProgram, attention: Any, steps: Sequence[Step] = STEPS) -> list[torch.Tensor]:
    results = []
    for chunks, tokens in steps:
        attention.begin(chunks)
        positions = [chunk.start + each for chunk in chunks for each in range(chunk.length)]
        rows = torch.arange(len(tokens))
        results.append(program.run(torch.tensor(tokens), torch.tensor(positions), attention, rows))
    return results


def expected_of(program: ModelProgram, steps: Sequence[Step] = STEPS) -> list[torch.Tensor]:
    spec = program.spec
    layout = KVLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK_SIZE, 4)
    pool = KVPool(layout, BLOCKS, torch.float32, torch.device("cpu"))
    return logits_of(program, LocalAttention(pool, program.attention_specs), steps)


@pytest.mark.parametrize("mini_batches", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_disaggregated_attention_gives_the_logits_of_one_process(
    family: str, mini_batches: int, tiny: MakeTiny
) -> None:
    program = tiny(family).program
    expected = expected_of(program)
    for count, by_heads in ((1, True), (2, True), (1, False), (2, False), (3, False)):
        if by_heads and program.spec.kv_heads % count:
            continue
        steps = in_pools(STEPS, 1 if by_heads else count)
        with attention_workers(program, count, by_heads=by_heads, mini_batches=mini_batches) as workers:
            results = logits_of(program, workers.remote[0], steps)
            assert workers.failures == []
        for got, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_compiled_kernels_give_the_same_logits_out_of_the_exchanges_records(tiny: MakeTiny) -> None:
    program = tiny("llama").program
    decode: list[Step] = [
        ([SequenceChunk((table,), start, 1) for table in (0, 5, 3)], [start, 7, 9]) for start in range(4)
    ]
    expected = expected_of(program, decode)
    kernels.use_compiled(CACHE)
    try:
        for mini_batches, pools in ((1, 1), (2, 1), (1, 3)):
            with attention_workers(program, pools, by_heads=pools == 1, mini_batches=mini_batches) as workers:
                results = logits_of(program, workers.remote[0], in_pools(decode, pools))
                assert workers.failures == []
            for got, wanted in zip(results, expected, strict=True):
                torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    finally:
        kernels.use(None)


def test_lanes_are_batches_of_their_own_over_one_pool(tiny: MakeTiny) -> None:
    program = tiny("llama").program
    expected = expected_of(program)
    with attention_workers(program, 2, lanes=2) as workers:
        first, second = workers.remote
        for index, step in enumerate(STEPS):
            lane = first if index % 2 else second
            torch.testing.assert_close(
                logits_of(program, lane, [step])[0], expected[index], atol=1e-5, rtol=1e-5
            )


def test_a_slower_link_changes_no_logit(tiny: MakeTiny) -> None:
    program = tiny("llama").program
    with attention_workers(program, 1, mini_batches=2, pace=Pace(1e9, 0.0005)) as workers:
        for got, wanted in zip(logits_of(program, workers.remote[0]), expected_of(program), strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_the_only_pools_worker_gone_is_attention_lost(tiny: MakeTiny) -> None:
    program = tiny("llama").program
    with attention_workers(program, 1) as workers:
        logits_of(program, workers.remote[0])
        workers.stop(0)
        with pytest.raises(AttentionLost, match="attention-0: the other side of the exchange is gone"):
            logits_of(program, workers.remote[0], STEPS[:1])
        with pytest.raises(AttentionLost, match="no attention worker holds the KV"):
            workers.remote[0].begin(STEPS[0][0])


def test_a_step_waits_no_longer_for_a_worker_that_somebody_else_knows_to_be_gone(
    tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another host, of which the kernel here says nothing."""
    monkeypatch.setattr("decode.remote_attention.ANSWER_TIMEOUT_S", 1000.0)
    program = tiny("llama").program
    with attention_workers(program, 1) as workers, ThreadPoolExecutor(1) as engine:
        remote, pools = workers.remote[0], workers.pools
        workers.stop(0)
        pools.workers = {0: tuple(replace(each, is_gone=lambda: False) for each in pools.workers[0])}
        step = engine.submit(logits_of, program, remote, STEPS[:1])
        wait(lambda: remote._unanswered is not None)
        assert not step.done()
        pools.lose(0, "its process has ended")
        with pytest.raises(AttentionLost, match=r"^its process has ended$"):
            step.result()


def test_one_pools_loss_costs_only_its_own_sequences(tiny: MakeTiny) -> None:
    program = tiny("llama").program
    expected = expected_of(program)
    steps = in_pools(STEPS, 3)
    with attention_workers(program, 3, by_heads=False) as workers:
        remote = workers.remote[0]
        logits_of(program, remote, steps[:2])
        workers.stop(2)  # it holds the sequence in block 5
        got = logits_of(program, remote, steps[2:3])[0]
        assert remote.lost_chunks() == [False, False, True]
        torch.testing.assert_close(got[:2], expected[2][:2], atol=1e-5, rtol=1e-5)
        assert got.isfinite().all()
        torch.testing.assert_close(
            logits_of(program, remote, steps[3:4])[0], expected[3], atol=1e-5, rtol=1e-5
        )
        assert remote.lost_chunks() == [False]


def test_a_lost_pool_is_forgotten_with_its_removal_be_it_amid_a_step(tiny: MakeTiny) -> None:
    program = tiny("llama").program
    steps = in_pools(STEPS, 3)
    with attention_workers(program, 3, by_heads=False) as workers:
        remote, pools = workers.remote[0], workers.pools
        logits_of(program, remote, steps[:2])
        remote.begin(steps[2][0])
        assert len(remote._live_parts()) == 2
        workers.stop(2)
        pools.lose(2, "its worker is gone")
        pools.remove(2)
        pools.lose(2, "told by another lane's step")
        pools.check()
        assert pools.lost == {}
        assert len(remote._live_parts()) == 1
        assert remote.lost_chunks() == [False, False, True]
        remote.give_up()
        got = logits_of(program, remote, steps[2:3])[0]
        torch.testing.assert_close(got[:2], expected_of(program)[2][:2], atol=1e-5, rtol=1e-5)
        assert remote._live_parts() is remote._parts


def test_a_step_over_the_exchanges_bounds_is_refused(tiny: MakeTiny) -> None:
    program = tiny("llama").program
    with attention_workers(program, 1) as workers, pytest.raises(ValueError, match="17 tokens"):
        workers.remote[0].begin([SequenceChunk((0, 1, 2, 3, 4), 0, 17)])


def test_a_plan_that_is_replaced_while_it_is_read_is_not_taken(tiny: MakeTiny) -> None:
    spec = tiny("llama").program.spec
    shape = ExchangeShape(16, 200, spec.heads, spec.kv_heads, spec.head_dim, "float32")
    model, worker = lanes_of(shape)
    first = [SequenceChunk((3, 1), 4, 1, key=7)]
    model.announce(first, 1, spec.layers)
    step = worker.announced_step(spec.layers)
    assert step == 1
    assert [group.chunks for group in worker.read_plan(step, spec.layers)] == [tuple(first)]
    model.announce([], 0, spec.layers)
    assert worker.read_plan(step, spec.layers) == []
    assert worker.announced_step(spec.layers) == 2
    assert worker.read_plan(2, spec.layers) == []


def test_a_step_that_is_announced_before_its_lane_is_served_is_waited_for(tiny: MakeTiny) -> None:
    """The model worker may be faster than the thread that begins to serve it."""
    spec = tiny("llama").program.spec
    shape = ExchangeShape(4, 100, spec.heads, spec.kv_heads, spec.head_dim, "float32")
    model_end, worker_end = lanes_of(shape)
    model_end.announce([SequenceChunk((3,), 0, 1)], 1, spec.layers)
    layout = KVLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK_SIZE, 4)
    pool = KVPool(layout, BLOCKS, torch.float32, torch.device("cpu"))
    served = ServedLane(BindingId("b"), worker_end, pool, tiny("llama").program.attention_specs)
    assert served.advance()
    assert served.is_in_step
    assert not served.advance()
    assert served.is_in_step


def test_whatever_one_lane_fails_of_the_others_are_served_on(tiny: MakeTiny) -> None:
    program = tiny("llama").program
    with attention_workers(program, 2, by_heads=False) as workers:
        # A pool of other heads than the exchange's: torch refuses, with no error of this project's.
        lane = workers.lanes[0][0]
        layout = KVLayout(program.spec.layers, 1, 3, BLOCK_SIZE, 4)
        lane._pool = KVPool(layout, BLOCKS, torch.float32, torch.device("cpu"))
        steps = in_pools(STEPS, 2)
        remote = workers.remote[0]
        logits_of(program, remote, steps[1:2])
        [(binding_id, error)] = workers.failures
        assert (binding_id, type(error)) == ("b0", IndexError)
        assert remote.lost_chunks() == [True, False]


def test_a_loop_that_cannot_go_on_says_so_and_keeps_nobody_waiting(tiny: MakeTiny, tmp_path: Path) -> None:
    program = tiny("llama").program
    spec = program.spec
    model_end, worker_end = lanes_of(
        ExchangeShape(4, 100, spec.heads, spec.kv_heads, spec.head_dim, "float32")
    )
    layout = KVLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK_SIZE, 4)
    pool = KVPool(layout, BLOCKS, torch.float32, torch.device("cpu"))
    cores = HostCores(2, tmp_path / "cores", "attention")
    loop = AttentionLoop(lambda *_: None, cores)
    loop.add([ServedLane(BindingId("b"), worker_end, pool, program.attention_specs)])
    model_end.announce([SequenceChunk((3,), 0, 1)], 1, spec.layers)
    cores.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        loop.run()
    removal = threading.Thread(target=loop.remove, args=(BindingId("b"),), daemon=True)
    removal.start()
    removal.join(10)
    assert not removal.is_alive()


def test_every_step_takes_its_share_of_the_cores_also_while_another_lanes_stands(
    tiny: MakeTiny, tmp_path: Path
) -> None:
    program = tiny("llama").program
    spec = program.spec
    shape = ExchangeShape(4, 100, spec.heads, spec.kv_heads, spec.head_dim, "float32")
    ends = [lanes_of(shape) for _ in range(2)]
    layout = KVLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK_SIZE, 4)
    pool = KVPool(layout, BLOCKS, torch.float32, torch.device("cpu"))
    shares: list[int] = []

    class Told(HostCores):
        def share(self) -> int:
            shares.append(super().share())
            return 1

    loop = AttentionLoop(lambda *_: None, Told(8, tmp_path / "cores", "attention"))
    served = [ServedLane(BindingId("b"), worker_end, pool, program.attention_specs) for _, worker_end in ends]
    loop.add(served)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        ends[0][0].announce([SequenceChunk((3,), 0, 1)], 1, spec.layers)
        wait(lambda: shares == [8])
        with claiming_process(tmp_path / "cores", "attention") as neighbour:
            ends[1][0].announce([SequenceChunk((5,), 0, 1)], 1, spec.layers)
            wait(lambda: shares == [8, 4])
            neighbour.kill()
        assert all(lane.is_in_step for lane in served)
    finally:
        loop.stop()
        thread.join()
