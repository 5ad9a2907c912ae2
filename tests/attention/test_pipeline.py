"""Batches that take turns at attention, in rotation over model replicas or fixed, over real workers."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from common.engine_thread import EngineThread
from common.errors import AttentionLost
from common.kv.blocks import POOL_STRIDE
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.messages import SampledToken, SamplingParams
from common.model.attention import LocalAttention
from common.model.program import ModelProgram
from common.model.runner import ModelRunner
from common.steps import Draw, SequenceStep
from common.timeline import Record, records_of, timeline
from common.timeline_events import SLICE
from decode.pipeline import Replica, StaggeredEngine
from scheduler.policy.staggering import Staggering
from tests.attention.lanes import BLOCK_SIZE, BLOCKS, FAMILIES, Workers, attention_workers
from tests.common.model.conftest import MakeTiny

GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
STEPS = 6
LATER = 2
"""Lane 2's first step comes when lane 0 has ended so many."""


@dataclass(frozen=True, slots=True)
class Script:
    """A sequence of one lane, in its steps ``joins``..``leaves``."""

    number: int
    prompt: tuple[int, ...]
    joins: int
    leaves: int


SCRIPTS = {
    0: (Script(0, (5, 6, 7), 0, 6), Script(1, (9,), 0, 3), Script(2, (2, 7, 1), 4, 6)),
    1: (Script(3, (1, 2, 3, 4), 0, 6), Script(4, (8, 3), 2, 5)),
    2: (Script(5, (4, 4), 0, 2), Script(6, (2, 7, 1), 0, 4)),
    3: (Script(7, (6,), 0, 6), Script(8, (3, 3, 9), 1, 4)),
}
"""By lane: requests join and leave its batch."""

SHAPES = {
    2: ((2, True, 1), (2, False, 2)),
    3: ((1, True, 2), (3, False, 1)),
    4: ((2, True, 2), (2, False, 1)),
}
"""By lanes: how many attention workers, whether by heads, and in how many mini-batches."""

Drawn = dict[int, list[int]]
"""Tokens, by sequence."""


def step_of(script: Script, drawn: Drawn, pools: int) -> SequenceStep:
    """The prompt first, then the last token; the sequences are spread over ``pools``."""
    tokens = drawn.get(script.number, [])
    first_block = script.number % pools * POOL_STRIDE + 4 * script.number
    return SequenceStep(
        (tokens[-1],) if tokens else script.prompt,
        len(script.prompt) + len(tokens) - 1 if tokens else 0,
        tuple(range(first_block, first_block + 3)),
        Draw(GREEDY, (), ()),
        key=1 + script.number,
    )


def batch_of(lane: int, step: int, drawn: Drawn, pools: int) -> tuple[list[Script], list[SequenceStep]]:
    scripts = [each for each in SCRIPTS[lane] if each.joins <= step < each.leaves]
    return scripts, [step_of(each, drawn, pools) for each in scripts]


def note(scripts: Sequence[Script], tokens: Sequence[SampledToken | None], drawn: Drawn) -> None:
    for script, token in zip(scripts, tokens, strict=True):
        assert token is not None
        drawn.setdefault(script.number, []).append(token.token_id)


def expected_tokens(program: ModelProgram, lanes: int) -> Drawn:
    spec = program.spec
    layout = KVLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK_SIZE, 4)
    pool = KVPool(layout, BLOCKS, torch.float32, torch.device("cpu"))
    runner = ModelRunner(program, LocalAttention(pool, program.attention_specs))
    drawn: Drawn = {}
    for lane in range(lanes):
        for step in range(STEPS):
            scripts, batch = batch_of(lane, step, drawn, pools=1)
            if batch:
                note(scripts, runner.run(batch), drawn)
    return drawn


@contextmanager
def staggered(program: ModelProgram, workers: Workers, is_fixed: bool = False) -> Iterator[StaggeredEngine]:
    pool = KVPool(KVLayout(1, 1, 1, 1, 4), 1, torch.float32, torch.device("cpu"))
    model = ModelRunner(program, LocalAttention(pool, program.attention_specs))
    batches = [(model.over(remote, remote.lost_chunks), remote) for remote in workers.remote]
    staggering = Staggering(len(batches), is_fixed)
    replicas = [
        Replica(EngineThread(name=f"replica {index}"), program) for index in range(staggering.replicas)
    ]
    process = EngineThread()
    engine = StaggeredEngine(process, staggering, replicas, batches)
    try:
        yield engine
    finally:
        engine.close()
        process.close()


async def run_lanes(engine: StaggeredEngine, pools: int) -> Drawn:
    drawn: Drawn = {}
    later = asyncio.Event()

    async def run(lane: int) -> None:
        if lane == 2:
            await later.wait()
        for step in range(STEPS):
            scripts, batch = batch_of(lane, step, drawn, pools)
            if batch:
                note(scripts, await engine.run(lane, batch), drawn)
            if lane == 0 and step == LATER - 1:
                later.set()

    async with asyncio.TaskGroup() as tasks:
        for lane in range(engine.lanes):
            tasks.create_task(run(lane))
    return drawn


@pytest.mark.parametrize("is_fixed", [False, True], ids=["rotational", "fixed"])
@pytest.mark.parametrize("lanes", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_batches_that_take_turns_draw_the_tokens_of_one_process(
    family: str, lanes: int, is_fixed: bool, tiny: MakeTiny
) -> None:
    program = tiny(family).program
    expected = expected_tokens(program, lanes)
    for count, by_heads, mini_batches in SHAPES[lanes]:
        if by_heads and program.spec.kv_heads % count:
            continue
        shape = {"by_heads": by_heads, "mini_batches": mini_batches}
        with (
            attention_workers(program, count, lanes=lanes, **shape) as workers,  # type: ignore[arg-type]
            staggered(program, workers, is_fixed) as engine,
        ):
            assert asyncio.run(run_lanes(engine, 1 if by_heads else count)) == expected
            assert workers.failures == []


@pytest.mark.parametrize("is_fixed", [False, True], ids=["rotational", "fixed"])
@pytest.mark.parametrize("lanes", [3, 4])
def test_a_steps_slices_are_computed_once_in_order_on_the_replicas_they_belong_to(
    lanes: int, is_fixed: bool, tiny: MakeTiny
) -> None:
    program = tiny("llama").program
    staggering = Staggering(lanes, is_fixed)
    with (
        attention_workers(program, 1, lanes=lanes) as workers,
        staggered(program, workers, is_fixed) as engine,
    ):
        timeline.start(60 * 10**9)
        try:
            asyncio.run(run_lanes(engine, 1))
        finally:
            recording = timeline.take()
    assert recording is not None
    found: dict[int, list[tuple[Record, int]]] = {lane: [] for lane in range(lanes)}
    for thread in recording.threads:
        if thread.thread.startswith("replica "):
            slices = [record for record in records_of(thread) if record.event == SLICE]
            assert all(first.end_ns <= later.begin_ns for first, later in pairwise(slices))
            for record in slices:
                found[record.values[1]].append((record, int(thread.thread.removeprefix("replica "))))
    pieces = len(program.slices)
    for lane, slices_of_lane in found.items():
        slices_of_lane.sort(key=lambda each: each[0].begin_ns)
        steps = sum(bool(batch_of(lane, step, {}, 1)[0]) for step in range(STEPS))
        assert len(slices_of_lane) == steps * pieces
        for first in range(0, len(slices_of_lane), pieces):
            step = slices_of_lane[first : first + pieces]
            assert [record.values[0] for record, _ in step] == [*range(pieces)]
            begin = lane if is_fixed else step[0][1]
            assert [replica for _, replica in step] == [
                staggering.replica(begin, piece) for piece in range(pieces)
            ]
            assert all(a.end_ns <= b.begin_ns for (a, _), (b, _) in pairwise(step))


@pytest.mark.parametrize(("lanes", "is_fixed"), [(2, False), (3, False), (2, True)])
def test_a_lane_whose_attention_is_lost_fails_alone_and_the_threads_go_on(
    lanes: int, is_fixed: bool, tiny: MakeTiny
) -> None:
    program = tiny("llama").program
    with (
        attention_workers(program, 1, lanes=lanes) as workers,
        staggered(program, workers, is_fixed) as engine,
    ):
        workers.stop(0)
        for lane in range(lanes):
            with pytest.raises(AttentionLost):
                asyncio.run(engine.run(lane, batch_of(lane, 0, {}, 1)[1]))


def failing(program: ModelProgram, layer: int, fails: Callable[[Any], bool], is_late: bool) -> ModelProgram:
    """The program with a slice that raises, before it computes or when K and V are on their way."""
    whole = program.slices[layer]

    def run(attention: Any, *arguments: Any) -> Any:
        if not fails(attention):
            return whole.run(attention, *arguments)
        if is_late:
            whole.run(attention, *arguments)
        raise ArithmeticError("the replica's slice failed")

    pieces = list(program.slices)
    pieces[layer] = replace(whole, run=run)
    return replace(program, slices=tuple(pieces))


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("lanes", "is_fixed"), [(2, False), (3, False), (2, True)])
def test_a_slice_that_raises_fails_its_batch_and_the_lane_computes_the_next(
    lanes: int, is_fixed: bool, layer: int, is_late: bool, tiny: MakeTiny
) -> None:
    sound = tiny("llama").program
    expected = expected_tokens(sound, lanes)
    failed = threading.Event()
    with attention_workers(sound, 2, lanes=lanes) as workers:

        def fails(attention: Any) -> bool:
            if attention is not workers.remote[1] or failed.is_set():
                return False
            failed.set()
            return True

        async def scenario(engine: StaggeredEngine) -> Drawn:
            others = asyncio.create_task(engine.run(0, batch_of(0, 0, {}, 1)[1]))
            with pytest.raises(ArithmeticError):
                await engine.run(1, batch_of(1, 0, {}, 1)[1])
            note(batch_of(0, 0, {}, 1)[0], await others, {})
            return await run_lanes(engine, 1)

        with staggered(failing(sound, layer, fails, is_late), workers, is_fixed) as engine:
            assert asyncio.run(scenario(engine)) == expected
        assert workers.failures == []


def test_a_step_given_up_leaves_no_attention_worker_waiting_for_it(tiny: MakeTiny) -> None:
    sound = tiny("llama").program
    with attention_workers(sound, 1, lanes=3) as workers:
        program = failing(sound, 1, lambda attention: True, is_late=False)
        with staggered(program, workers) as engine, pytest.raises(ArithmeticError):
            asyncio.run(engine.run(1, batch_of(1, 0, {}, 1)[1]))
        workers.wait_rested()
        assert workers.failures == []


def test_whoever_cancels_a_step_leaves_its_lane_usable(tiny: MakeTiny) -> None:
    program = tiny("llama").program
    expected = expected_tokens(program, 3)
    with attention_workers(program, 1, lanes=3) as workers, staggered(program, workers) as engine:

        async def cancelled() -> None:
            steps = [asyncio.create_task(engine.run(lane, batch_of(lane, 0, {}, 1)[1])) for lane in range(3)]
            await asyncio.sleep(0)
            for step in steps:
                step.cancel()

        asyncio.run(cancelled())
        assert asyncio.run(run_lanes(engine, 1)) == expected
