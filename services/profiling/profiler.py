"""Measures chunks and decode steps of a model on this machine, as an instance with these settings runs them
(DistServe 4.3: L_m; TetriInfer 3.3.3: ChunkSize; Aladdin 3: performance models)."""

import asyncio
import datetime
import math
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from common.config import Config
from common.errors import ConfigError
from common.kv.blocks import blocks_for
from common.messages import SamplingParams
from common.model.device import accelerator_name
from common.model.precision import precision_of, weight_bytes
from common.performance import chunk_features, pairs_of, step_features
from common.profile import LAW_TOKENS, PassTime, Profile, machine_name
from common.steps import Draw, SequenceStep
from scheduler.policy.fitting import LinearFit
from scheduler.policy.saturation import saturation_length
from services.hosts.engines import Engine, load_engine
from services.profiling.probe import Probe

CHUNKS = (16, 32, 64, 128, 256, 512, 1024)
RESTS = (45, 90, 181, 245)
"""Of no round number, as most prompts' last chunks."""
FEW = (1, 4, 8)
"""As a prompt's rest beside what is cached: fewer than ``LAW_TOKENS``."""
BEFORES = (0, 256, 1024)
"""Tokens before chunks: the first before them cost most, as attention has a part more then."""
BATCHES = (1, 2, 4, 8, 16, 17, 24, 32, 33, 48, 49, 64, 65, 128)
"""Up to whole tiles of 16 rows and just over them: there a step begins to take a tile's products more."""
CONTEXTS = (32, 128, 256, 512, 1024)
SHARED = (
    (((0, 32), (0, 32)), 0, 0),
    (((0, 128), (0, 128)), 0, 0),
    (((0, 64),) * 4, 0, 0),
    (((0, 45),), 1, 128),
    (((0, 64),), 4, 128),
    (((0, 128),), 16, 128),
    (((0, 256),), 4, 128),
    (((256, 240),), 2, 512),
    (((0, 181),), 4, 512),
    (((512, 256),), 2, 1024),
)
"""Passes that are more than a chunk or a step: chunks, and how many decodes of which context go along."""
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)
REPEATS = 12
"""How often a case's times are shown to the fit: enough for what it believed before to count for nothing."""

Case = tuple[int, int]
Shared = tuple[tuple[Case, ...], int, int]
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
        chunks = [(before, tokens) for tokens in sorted(FEW + CHUNKS + RESTS) for before in BEFORES]
        chunks = [case for case in chunks if sum(case) <= _longest(engine)]
        steps = [(batch, each) for batch in BATCHES for each in CONTEXTS if _has_room(engine, batch, each)]
        if not steps or all(tokens < LAW_TOKENS for _, tokens in chunks):
            raise ConfigError("instance.kv_bytes", config.instance.kv_bytes, "is too small to profile in")
        shared = [case for case in SHARED if _fits(engine, case)]
        work: dict[tuple[str, Case | Shared], list[SequenceStep]] = {
            ("chunk", case): _chunk(engine, *case) for case in chunks
        }
        work |= {("step", case): _batch(engine, *case) for case in steps}
        work |= {("shared", case): _shared(engine, case) for case in shared}
        taken: dict[tuple[str, Case | Shared], list[float]] = {name: [] for name in work}
        with Probe(config).watch() as pieces:
            for done in range(rounds + 1):
                for name, batch in work.items():
                    elapsed_s = await engine.thread.run(_time, engine, batch, clock)
                    if done:  # the first round touches memory
                        taken[name].append(elapsed_s)
                progress(done, rounds)
                await asyncio.sleep(0)
    finally:
        engine.thread.close()
    chunk_s = {case: taken["chunk", case] for case in chunks}
    step_s = {case: taken["step", case] for case in steps}
    shared_s = tuple(
        PassTime(case[0], case[1], case[2], statistics.median(taken["shared", case])) for case in shared
    )
    machine = machine_name(accelerator_name(config.model.device))
    found = _profile_of(engine, machine, chunk_s, step_s, shared_s)
    return msgspec.structs.replace(
        found,
        probe_s=statistics.median(pieces.taken_s) if pieces.taken_s else None,
        weight_bytes=weight_bytes(precision_of(config.model)),
    )


def _profile_of(
    engine: Engine,
    machine: str,
    chunk_s: dict[Case, list[float]],
    step_s: dict[Case, list[float]],
    shared_s: tuple[PassTime, ...],
) -> Profile:
    def of_chunk(case: Case) -> tuple[float, ...]:
        return chunk_features(case[1], pairs_of(*case))

    def of_step(case: Case) -> tuple[float, ...]:
        return step_features(case[0], case[0] * (case[1] + 1))

    lawful_s = {case: times for case, times in chunk_s.items() if case[1] >= LAW_TOKENS}
    chunk_fit, step_fit = fit(lawful_s, of_chunk).fitted, fit(step_s, of_step).fitted
    assert chunk_fit is not None, "there are enough cases for a fit"
    assert step_fit is not None, "there are enough cases for a fit"
    medians = {case: statistics.median(times) for case, times in chunk_s.items()}
    return Profile(
        model=engine.model_name,
        dtype="bfloat16" if engine.dtype == "bfloat16" else "float32",
        machine=machine,
        measured_on=datetime.datetime.now(datetime.UTC).date().isoformat(),
        chunk_s=tuple((*case, medians[case]) for case in chunk_s),
        step_s=tuple((*case, statistics.median(times)) for case, times in step_s.items()),
        saturation_tokens=saturation_length(
            {case[1]: medians[case] for case in chunk_s if case[0] == 0 and case[1] in CHUNKS}
        ),
        chunk_time=msgspec.structs.replace(chunk_fit, samples=sum(map(len, lawful_s.values()))),
        step_time=msgspec.structs.replace(step_fit, samples=sum(map(len, step_s.values()))),
        chunk_held_out_error=held_out_error(lawful_s, of_chunk),
        step_held_out_error=held_out_error(step_s, of_step),
        shared_s=shared_s,
    )


def fit(cases: dict[Case, list[float]], features: Callable[[Case], tuple[float, ...]]) -> LinearFit:
    """To the median of every case, again and again, each as important as the others."""
    found = LinearFit(len(features(next(iter(cases)))))
    for _ in range(REPEATS):
        for case, times in cases.items():
            found.observe(features(case), statistics.median(times))
    return found


def held_out_error(cases: dict[Case, list[float]], features: Callable[[Case], tuple[float, ...]]) -> float:
    """The mean relative error of each case's median, predicted by a fit to all the others."""
    errors = []
    for held_out, times in cases.items():
        others = {case: taken for case, taken in cases.items() if case != held_out}
        fitted = fit(others, features).fitted
        assert fitted is not None, "there are enough cases for a fit"
        measured_s = statistics.median(times)
        errors.append(abs(fitted.seconds(features(held_out)) - measured_s) / measured_s)
    return statistics.fmean(errors)


def _longest(engine: Engine) -> int:
    """Tokens that a sequence can have."""
    return min(engine.context_length, engine.total_blocks * engine.layout.block_size)


def _has_room(engine: Engine, batch: int, context: int) -> bool:
    contexts = spread(batch, context)
    blocks = sum(blocks_for(each + 1, engine.layout.block_size) for each in contexts)
    return blocks <= engine.total_blocks and max(contexts) < engine.context_length


def _time(engine: Engine, batch: list[SequenceStep], clock: Callable[[], float]) -> float:
    began_s = clock()
    engine.runner.run(batch)
    return clock() - began_s


def _fits(engine: Engine, case: Shared) -> bool:
    chunks, batch, context = case
    ends = [sum(each) for each in chunks] + [each + 1 for each in spread(batch, context)]
    blocks = sum(blocks_for(each, engine.layout.block_size) for each in ends)
    return blocks <= engine.total_blocks and max(ends) <= engine.context_length


def _shared(engine: Engine, case: Shared) -> list[SequenceStep]:
    chunks, batch, context = case
    steps: list[SequenceStep] = []
    first = 0
    for before, tokens in chunks:
        steps += _chunk(engine, before, tokens, first)
        first += blocks_for(before + tokens, engine.layout.block_size)
    return steps + _batch(engine, batch, context, first)


def _chunk(engine: Engine, before: int, tokens: int, first: int = 0) -> list[SequenceStep]:
    """As if ``before`` tokens of the prompt had been computed: what their KV holds costs nothing else. In
    blocks from ``first`` on."""
    prompt = _prompt(tokens)
    blocks = tuple(range(first, first + blocks_for(before + tokens, engine.layout.block_size)))
    return [SequenceStep(prompt, before, blocks, Draw(GREEDY, (1,) * (before + tokens), ()))]


def _batch(engine: Engine, batch: int, context: int, first: int = 0) -> list[SequenceStep]:
    """Decodes of ``context`` tokens on average: as live no two are as long, and their blocks lie as they came
    by them in turn, from ``first`` on."""
    contexts = spread(batch, context)
    tables: list[list[int]] = [[] for _ in contexts]
    needed = [blocks_for(each + 1, engine.layout.block_size) for each in contexts]
    for turn in range(max(needed, default=0)):
        for table, blocks in zip(tables, needed, strict=True):
            if turn < blocks:
                table.append(first)
                first += 1
    return [
        SequenceStep((1,), each, tuple(table), Draw(GREEDY, (1,) * each, (1,)))
        for each, table in zip(contexts, tables, strict=True)
    ]


def spread(batch: int, mean: int) -> list[int]:
    """So many numbers of that mean, the shortest first: quantiles of an exponential distribution, as many
    short ones and few long ones come together."""
    parts = [-math.log(1 - (index + 0.5) / batch) for index in range(batch)]
    found = [max(1, int(mean * batch * part / sum(parts))) for part in parts]
    if found:
        found[-1] += mean * batch - sum(found)
    return found


def _prompt(tokens: int) -> tuple[int, ...]:
    """Of tokens that every vocabulary has: what they say takes no time."""
    return tuple(1 + index % 15 for index in range(tokens))


def rows_of(profile: Profile) -> Iterable[tuple[str, str, str, str]]:
    """(what, of how many tokens, ms, tokens a second), as a table shows them."""
    for before, tokens, seconds in profile.chunk_s:
        yield f"chunk after {before:,}", f"{tokens:,}", f"{1e3 * seconds:.1f}", f"{tokens / seconds:,.0f}"
    for batch, context, seconds in profile.step_s:
        yield f"step of {batch}", f"{context:,} each", f"{1e3 * seconds:.1f}", f"{batch / seconds:,.0f}"
    for each in profile.shared_s:
        tokens = sum(count for _, count in each.chunks)
        chunks = "chunk" if len(each.chunks) == 1 else f"{len(each.chunks)} chunks"
        name = f"{chunks} and step of {each.batch}" if each.batch else chunks
        rate = (tokens + each.batch) / each.seconds
        yield name, f"{tokens:,}", f"{1e3 * each.seconds:.1f}", f"{rate:,.0f}"
