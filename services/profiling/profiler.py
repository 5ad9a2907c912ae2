"""Measures chunks and decode steps of a model on this machine, as an instance with these settings runs them
(DistServe 4.3: L_m; TetriInfer 3.3.3: ChunkSize; Aladdin 3: performance models)."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from common.config import Config
from common.errors import ConfigError
from common.model.device import OutOfMemory, accelerator_name, free_unused_memory
from common.model.precision import precision_of, weight_bytes
from common.profile import LAW_TOKENS, Profile, machine_name
from common.spec import ElementType
from common.steps import SequenceStep
from services.hosts.engines import Engine, load_engine
from services.profiling.measured import Measured, profile_of
from services.profiling.passes import (
    LARGER_SHARED,
    SHARED,
    Case,
    Shared,
    as_chunk,
    as_step,
    chunk_cases,
    has_room,
    larger_chunks,
    larger_steps,
    pass_of,
    step_cases,
)
from services.profiling.probe import Probe

BRIEF_S = 0.2
"""What follows in size on a pass that takes no longer is measured, too: accelerators need large ones to be
kept busy, which would take a processor minutes."""
COLD_S = 1.0
"""Up to so long a first pass may have been cold: how brief it is a second one says."""
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
) -> Profile:
    """``clock``: in seconds, of the engine's thread. Raises ConfigError where the pool or the context holds
    none of the cases, ModelError as an instance."""
    engine = await load_engine(config, directory)
    try:
        measured = await _measure(engine, config, rounds, progress, clock)
    finally:
        engine.thread.close()
    machine = machine_name(accelerator_name(config.model.device))
    dtype: ElementType = "bfloat16" if engine.dtype == "bfloat16" else "float32"
    return msgspec.structs.replace(
        profile_of(engine.model_name, dtype, machine, measured),
        weight_bytes=weight_bytes(precision_of(config.model)),
    )


async def _measure(
    engine: Engine, config: Config, rounds: int, progress: Progress, clock: Callable[[], float]
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
    progress(0, rounds)
    for done in range(rounds):
        for number, (case, times) in enumerate(taken.items()):
            if number % LOOK_EVERY == 0:
                # Between passes: beside them a look takes longer by what they happen to be. The pass after
                # it finds a core that slept, and the look's weights in the caches: it does not count.
                looks_s += await asyncio.to_thread(probe.looks, LOOKS)
                await watch.time(case)
            times.append(await watch.time(case))
        progress(done + 1, rounds)
        await asyncio.sleep(0)
    return Measured(taken, looks_s)


class PassWatch:
    """Times passes, each made once, on the engine's own thread."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._passes: dict[Shared, list[SequenceStep]] = {}

    async def time(self, case: Shared) -> float:
        batch = self._passes.get(case)
        if batch is None:
            batch = self._passes[case] = pass_of(self._engine, case)
        return await self._engine.thread.run(_time, self._engine, batch, self._clock)

    async def first(self, case: Shared) -> float | None:
        """None: there is no room for its KV, or for what is between layers."""
        if not has_room(self._engine, case):
            return None
        try:
            return await self.time(case)
        except OutOfMemory:
            free_unused_memory()
            return None

    async def grown(
        self,
        cases: Sequence[Case],
        larger: Callable[[Case], Iterable[Case]],
        whole: Callable[[Case], Shared],
    ) -> dict[Case, float]:
        """How long these take for which there is room, and those beyond them of which the next smaller one is
        brief."""
        found: dict[Case, float] = {}
        seen, waiting = set(cases), deque(cases)
        while waiting:
            case = waiting.popleft()
            seconds = await self.first(whole(case))
            if seconds is None:
                continue
            beyond = [each for each in larger(case) if each not in seen]
            if beyond and BRIEF_S < seconds <= COLD_S:
                seconds = min(seconds, await self.time(whole(case)))
            found[case] = seconds
            if seconds <= BRIEF_S:
                seen.update(beyond)
                waiting += beyond
        return found


def _is_brief(case: Shared, chunk_s: Mapping[Case, float], step_s: Mapping[Case, float]) -> bool:
    """Whether each of its parts was measured and is."""
    chunks, batch, context = case
    times = [chunk_s.get(chunk, math.inf) for chunk in chunks]
    times += [step_s.get((batch, context), math.inf)] if batch else []
    return max(times) <= BRIEF_S


def _by_tokens(chunk: Case) -> Case:
    before, tokens = chunk
    return tokens, before


def _time(engine: Engine, batch: list[SequenceStep], clock: Callable[[], float]) -> float:
    began_s = clock()
    engine.runner.run(batch)
    return clock() - began_s
