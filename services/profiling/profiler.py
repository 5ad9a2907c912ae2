"""Measures chunks and decode steps of a model on this machine, as an instance with these settings runs them
(DistServe 4.3: L_m; TetriInfer 3.3.3: ChunkSize; Aladdin 3: performance models)."""

import asyncio
import datetime
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
from common.performance import chunk_features, pairs_of, step_features
from common.profile import Profile, machine_name
from common.steps import Draw, SequenceStep
from scheduler.policy.fitting import LinearFit
from scheduler.policy.saturation import saturation_length
from services.hosts.engines import Engine, load_engine

CHUNKS = (16, 32, 64, 128, 256, 512, 1024)
BEFORE = 1024
"""Tokens before some of the chunks, so that what attention costs is seen."""
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (128, 1024)
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)
REPEATS = 12
"""How often a case's times are shown to the fit: enough for what it believed before to count for nothing."""

Case = tuple[int, int]
Progress = Callable[[int, int], None]
"""(rounds done, of how many)"""


async def measure_profile(config: Config, directory: Path, rounds: int, progress: Progress) -> Profile:
    """Raises ConfigError where the pool or the context holds none of the cases, ModelError as an instance."""
    engine = await load_engine(config, directory)
    try:
        chunks = [(before, tokens) for tokens in CHUNKS for before in (0, BEFORE)]
        chunks = [case for case in chunks if sum(case) <= _longest(engine, 1)]
        steps = [(batch, each) for batch in BATCHES for each in CONTEXTS if each < _longest(engine, batch)]
        if not chunks or not steps:
            raise ConfigError("instance.kv_bytes", config.instance.kv_bytes, "is too small to profile in")
        work = {("chunk", *case): _chunk(engine, *case) for case in chunks}
        work |= {("step", *case): _batch(engine, *case) for case in steps}
        taken: dict[tuple[str, int, int], list[float]] = {name: [] for name in work}
        for done in range(rounds + 1):
            for name, batch in work.items():
                elapsed_s = await engine.thread.run(_time, engine, batch)
                if done:  # the first round touches memory
                    taken[name].append(elapsed_s)
            progress(done, rounds)
            await asyncio.sleep(0)
    finally:
        engine.thread.close()
    chunk_s = {case: taken["chunk", *case] for case in chunks}
    step_s = {case: taken["step", *case] for case in steps}
    return _profile_of(engine, machine_name(accelerator_name(config.model.device)), chunk_s, step_s)


def _profile_of(
    engine: Engine, machine: str, chunk_s: dict[Case, list[float]], step_s: dict[Case, list[float]]
) -> Profile:
    def of_chunk(case: Case) -> tuple[float, ...]:
        return chunk_features(case[1], pairs_of(*case))

    def of_step(case: Case) -> tuple[float, ...]:
        return step_features(case[0], case[0] * (case[1] + 1))

    chunk_fit, step_fit = fit(chunk_s, of_chunk).fitted, fit(step_s, of_step).fitted
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
        saturation_tokens=saturation_length({case[1]: medians[case] for case in chunk_s if case[0] == 0}),
        chunk_time=msgspec.structs.replace(chunk_fit, samples=sum(map(len, chunk_s.values()))),
        step_time=msgspec.structs.replace(step_fit, samples=sum(map(len, step_s.values()))),
        chunk_held_out_error=held_out_error(chunk_s, of_chunk),
        step_held_out_error=held_out_error(step_s, of_step),
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


def _longest(engine: Engine, batch: int) -> int:
    """Tokens that each of so many sequences can have."""
    pool = engine.total_blocks // batch * engine.layout.block_size
    return min(engine.context_length, pool)


def _time(engine: Engine, batch: list[SequenceStep]) -> float:
    began_s = time.perf_counter()
    engine.runner.run(batch)
    return time.perf_counter() - began_s


def _chunk(engine: Engine, before: int, tokens: int) -> list[SequenceStep]:
    """As if ``before`` tokens of the prompt had been computed: what their KV holds costs nothing else."""
    prompt = _prompt(tokens)
    blocks = blocks_for(before + tokens, engine.layout.block_size)
    return [SequenceStep(prompt, before, tuple(range(blocks)), Draw(GREEDY, (1,) * (before + tokens), ()))]


def _batch(engine: Engine, batch: int, context: int) -> list[SequenceStep]:
    blocks = blocks_for(context + 1, engine.layout.block_size)
    return [
        SequenceStep(
            (1,),
            context,
            tuple(range(row * blocks, (row + 1) * blocks)),
            Draw(GREEDY, (1,) * context, (1,)),
        )
        for row in range(batch)
    ]


def _prompt(tokens: int) -> tuple[int, ...]:
    """Of tokens that every vocabulary has: what they say takes no time."""
    return tuple(1 + index % 15 for index in range(tokens))


def rows_of(profile: Profile) -> Iterable[tuple[str, str, str, str]]:
    """(what, of how many tokens, ms, tokens a second), as a table shows them."""
    for before, tokens, seconds in profile.chunk_s:
        yield f"chunk after {before:,}", f"{tokens:,}", f"{1e3 * seconds:.1f}", f"{tokens / seconds:,.0f}"
    for batch, context, seconds in profile.step_s:
        yield f"step of {batch}", f"{context:,} each", f"{1e3 * seconds:.1f}", f"{batch / seconds:,.0f}"
