"""How far a profile's table is off passes that it did not measure: of several prompts, with decodes beside.

The profile's own passes and random ones are taken in turns on one engine of one thread on a processor, by
processor time, so that the machine's pace is the same for both; the table is made of the first and says what
the second take.

    lamella profile --config settings.toml
    python bench/mixed_passes.py PROFILE [--config settings.toml] [--passes 160] [--rounds 3]
"""

import argparse
import asyncio
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from common.config_file import load_config
from common.errors import ConfigError
from services.hosts.engines import load_engine
from services.model_directory import model_directory
from services.profiling.allocating import begin_as_instances
from services.profiling.measured import Measured, cases_of, retimed
from services.profiling.pass_watch import PassWatch
from services.profiling.passes import Shared, has_room
from services.simulator.performance.profiled import profile_model, read_machine_profile
from services.simulator.shape import PassShape

SHORT = (2, 3, 4, 6, 9, 13, 18, 23, 29, 37, 47, 58)
"""Tokens of prompts that share a chunk."""
PROMPTS = (1, 1, 1, 2, 2, 3, 4, 5)
BATCHES = (1, 2, 3, 4, 6, 8, 10, 12, 14, 18, 22, 26)
CONTEXTS = (12, 20, 30, 40, 60, 80, 120, 160)
MOST_DRAWS = 20
"""For each pass that is wanted: some were drawn already, or have no room."""


def random_pass(drawn: random.Random, chunk_tokens: int) -> Shared:
    """A chunk of one long prompt, or prompts that share one; half of the time with decodes, which leave the
    chunk fewer rows, and now and then these alone."""
    batch, context = drawn.choice(BATCHES), drawn.choice(CONTEXTS)
    kind = drawn.random()
    if kind < 0.2:
        return (), batch, context
    if drawn.random() < 0.5:
        batch = context = 0
    chunks, left = [], max(1, chunk_tokens - batch)
    if kind < 0.5:
        before = drawn.choice((drawn.randrange(1, 8) * left, drawn.randrange(1, 8 * chunk_tokens)))
        chunks.append((before, drawn.choice((left, left, max(1, left // 3)))))
        left -= chunks[0][1]
    for _ in range(drawn.choice(PROMPTS)):
        tokens = min(left, drawn.choice(SHORT))
        if tokens:
            chunks.append((0, tokens))
            left -= tokens
    return tuple(chunks), batch, context


def kind_of(case: Shared) -> str:
    chunks, batch, _ = case
    if not chunks:
        return "decodes alone"
    number = "one chunk" if len(chunks) == 1 else "two chunks" if len(chunks) == 2 else "three and more"
    return f"{number}{', tokens before' if chunks[0][0] else ''}{', decodes' if batch else ''}"


async def measure(path: Path, config_file: Path | None, passes: int, rounds: int) -> None:
    profile = read_machine_profile(path)
    config = load_config(config_file)
    if config.model.threads != 1 or config.model.device != "cpu":
        raise ConfigError("model.threads", config.model.threads, "must be 1, on a processor: see --help")
    engine = await load_engine(config, model_directory(config.model))
    drawn = random.Random(0)
    known = cases_of(profile)
    seen, unknown = set(known), list[Shared]()
    for _ in range(MOST_DRAWS * passes):
        case = random_pass(drawn, profile.saturation_tokens)
        if len(unknown) < passes and case not in seen and has_room(engine, case):
            seen.add(case)
            unknown.append(case)
    try:
        watch = PassWatch(engine, time.thread_time)
        taken: dict[Shared, list[float]] = {case: [] for case in (*known, *unknown)}
        for case in taken:
            await watch.time(case)
        for _ in range(rounds):
            for case, times in taken.items():
                times.append(await watch.time(case))
    finally:
        engine.thread.close()
    model = profile_model(retimed(profile, Measured({case: taken[case] for case in known}, ())), "linear")
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for case in unknown:
        chunks, batch, context = case
        said_s = model.pass_s(PassShape(chunks, batch, batch * (context + 1)))
        ratios[kind_of(case)].append(said_s / statistics.median(taken[case]))
    print("| passes | how many | said / taken: median | 10th, 90th percentile |\n| --- | --- | --- | --- |")
    for kind, found in sorted(ratios.items()):
        low, middle, high = np.percentile(found, (10, 50, 90))
        print(f"| {kind} | {len(found)} | {middle:.2f} | {low:.2f}, {high:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("profile", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--passes", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    begin_as_instances()
    asyncio.run(measure(options.profile, options.config, options.passes, options.rounds))
