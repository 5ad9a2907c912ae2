"""Measures chunks and decode steps of a model on this machine, as an instance with these settings runs them,
alone and beside another (DistServe 4.3: L_m; TetriInfer 3.3.3: ChunkSize; Aladdin 3: performance models)."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from common.config import Config
from common.errors import ConfigError
from common.model.device import accelerator_name
from common.model.precision import precision_of, weight_bytes
from common.profile import LAW_TOKENS, Profile, machine_name
from common.spec import ElementType
from services.hosts.engines import Engine, load_engine
from services.profiling.contention import NeighbourLost, has_neighbours, measure_contention
from services.profiling.measured import Measured, profile_of
from services.profiling.pass_watch import BRIEF_S, PassWatch
from services.profiling.passes import (
    LARGER_SHARED,
    SHARED,
    Case,
    Shared,
    as_chunk,
    as_step,
    chunk_cases,
    larger_chunks,
    larger_steps,
    step_cases,
)
from services.profiling.probe import Probe

LOOKS, LOOK_EVERY = 3, 20
"""So many looks at the machine's pace, before every so many cases."""

Progress = Callable[[int, int], None]
"""(rounds done, of how many)"""


async def measure_profile(
    config: Config,
    directory: Path,
    rounds: int,
    progress: Progress,
    clock: Callable[[], float] = time.perf_counter,
    tell: Callable[[str], None] = lambda text: None,
) -> Profile:
    """``clock``: in seconds, of the engine's thread. ``tell``: why something was left out. Raises ConfigError
    where the pool or the context holds none of the cases, ModelError as an instance."""
    engine = await load_engine(config, directory)
    is_beside = has_neighbours(config)
    all_rounds = 2 * rounds if is_beside else rounds
    contention = None
    try:
        measured = await _measure(engine, config, rounds, lambda done: progress(done, all_rounds), clock)
        if is_beside:
            watch = PassWatch(engine, time.thread_time)
            try:
                contention = await measure_contention(
                    watch, config, directory, rounds, lambda done: progress(rounds + done, all_rounds)
                )
            except NeighbourLost as exc:
                # What was measured is worth as much without.
                tell(f"passes beside another process's were not measured: {exc}")
            if contention is None:
                progress(all_rounds, all_rounds)
    finally:
        engine.thread.close()
    machine = machine_name(accelerator_name(config.model.device))
    dtype: ElementType = "bfloat16" if engine.dtype == "bfloat16" else "float32"
    return msgspec.structs.replace(
        profile_of(engine.model_name, dtype, machine, measured),
        weight_bytes=weight_bytes(precision_of(config.model)),
        contention=contention,
        key_tile=engine.key_tile,
    )


async def _measure(
    engine: Engine, config: Config, rounds: int, progress: Callable[[int], None], clock: Callable[[], float]
) -> Measured:
    watch, probe = PassWatch(engine, clock), Probe(config)
    looks_s: list[float] = []
    # The first round touches memory, and says what else is brief.
    chunk_s = await watch.grown(chunk_cases(), larger_chunks, as_chunk)
    step_s = await watch.grown(step_cases(), larger_steps, as_step)
    if not step_s or all(tokens < LAW_TOKENS for _, tokens in chunk_s):
        raise ConfigError("instance.kv_bytes", config.instance.kv_bytes, "is too small to profile in")
    together = [*SHARED, *(case for case in LARGER_SHARED if _is_brief(case, chunk_s, step_s))]
    shared = [case for case in together if await watch.first(case) is not None]
    by_tokens, by_batch = sorted(chunk_s, key=_by_tokens), sorted(step_s)
    taken: dict[Shared, list[float]] = {
        case: [] for case in (*map(as_chunk, by_tokens), *map(as_step, by_batch), *shared)
    }
    progress(0)
    for done in range(rounds):
        for number, (case, times) in enumerate(taken.items()):
            if number % LOOK_EVERY == 0:
                # Between passes: beside them a look takes longer by what they happen to be. The pass after
                # it finds a core that slept, and the look's weights in the caches: it does not count.
                looks_s += await asyncio.to_thread(probe.looks, LOOKS)
                await watch.time(case)
            times.append(await watch.time(case))
        progress(done + 1)
        await asyncio.sleep(0)
    return Measured(taken, looks_s)


def _is_brief(case: Shared, chunk_s: Mapping[Case, float], step_s: Mapping[Case, float]) -> bool:
    """Whether each of its parts was measured and is."""
    chunks, batch, context = case
    times = [chunk_s.get(chunk, math.inf) for chunk in chunks]
    times += [step_s.get((batch, context), math.inf)] if batch else []
    return max(times) <= BRIEF_S


def _by_tokens(chunk: Case) -> Case:
    before, tokens = chunk
    return tokens, before
