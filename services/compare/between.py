"""A profile's passes, taken anew between a comparison's runs: a shared machine is faster in some minutes than
in others, and a profile says what runs took where both found the same ones.

They are taken in ``PARTS``: all of them at first, then one before each run, and one after the last. Each is
kept as it comes.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import msgspec
import uvloop

from common.config import Config
from common.profile import PassTime, Profile, write_profile
from services.compare.comparison import Candidate, Comparison, config_of
from services.compare.records import keep, read_kept
from services.compare.simulated_mesh import UNREAD, profile_of_instances
from services.hosts.engines import Engine, load_engine
from services.model_directory import model_directory
from services.profiling.measured import Measured, cases_of, retimed
from services.profiling.passes import Shared
from services.profiling.probe import Probe
from services.profiling.profiler import LOOKS, PassWatch
from services.simulator.performance.profiled import read_machine_profile

PASSES_FILE, PROFILES = "passes.jsonl", "profiles"
PARTS = 7
"""Each takes a processor a few seconds."""


class TakenPart(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``passes.jsonl``: seconds that some passes of a configuration's instances took, and looks at
    the pace just before them."""

    fingerprint: str
    configuration: str
    passes: tuple[PassTime, ...]
    looks_s: tuple[float, ...]


@contextmanager
def passes_between(
    comparison: Comparison, candidate: Candidate, output: Path
) -> Iterator[Callable[[], None]]:
    """Who calls it takes a part; it does nothing where the comparison wants none, or no model computes.
    Raises ConfigError where that was not profiled, PerformanceFileError for a profile that cannot be read."""
    config = config_of(comparison, candidate, UNREAD)
    if not comparison.profiled_between or config.instance.engine != "model":
        yield lambda: None
        return
    profile = read_machine_profile(profile_of_instances(config))
    base_file = _base_file(output, candidate)
    if not base_file.exists():
        write_profile(base_file, profile)
    number = sum(each.configuration == candidate.name for each in _kept(comparison, output))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        instance = msgspec.structs.replace(config.instance, attention_workers=0)
        config = msgspec.structs.replace(config, instance=instance)
        engine = runner.run(load_engine(config, model_directory(config.model)))
        try:
            passes = _Passes(engine, config, profile)
            runner.run(passes.warm_up())

            def take() -> None:
                nonlocal number
                taken, looks_s = runner.run(passes.take(number % PARTS))
                part = TakenPart(
                    fingerprint=comparison.fingerprint,
                    configuration=candidate.name,
                    passes=taken,
                    looks_s=looks_s,
                )
                keep(output / PASSES_FILE, part)
                number += 1

            while number < PARTS:
                take()
            yield take
        finally:
            engine.thread.close()


class _Passes:
    """Of an engine in this process."""

    def __init__(self, engine: Engine, config: Config, profile: Profile) -> None:
        self._watch, self._probe = PassWatch(engine, time.perf_counter), Probe(config)
        self._cases = cases_of(profile)

    async def warm_up(self) -> None:
        """First passes touch memory; and is there room for all?"""
        self._cases = [case for case in self._cases if await self._watch.first(case) is not None]

    async def take(self, part: int) -> tuple[tuple[PassTime, ...], tuple[float, ...]]:
        """And what looks took before them."""
        looks_s = await asyncio.to_thread(self._probe.looks, LOOKS)
        cases = self._cases[part::PARTS]
        # One finds a core that slept, and a look's weights in the caches: it does not count.
        await self._watch.time(cases[0])
        return tuple([PassTime(*case, await self._watch.time(case)) for case in cases]), tuple(looks_s)


def profiles_between(comparison: Comparison, output: Path) -> dict[str, Path]:
    """By configuration, of those with such passes: the profile that its instances took, with the times of
    these, as a file. Raises ConfigError, or PerformanceFileError, for a file that cannot be read."""
    kept = _kept(comparison, output)
    found = {}
    for candidate in comparison.configuration:
        parts = [each for each in kept if each.configuration == candidate.name]
        if len(parts) < PARTS:
            continue
        taken: dict[Shared, list[float]] = defaultdict(list)
        for each in chain.from_iterable(part.passes for part in parts):
            taken[each.chunks, each.batch, each.context].append(each.seconds)
        base = read_machine_profile(_base_file(output, candidate))
        times = {case: taken[case] for case in cases_of(base) if case in taken}
        looks_s = list(chain.from_iterable(part.looks_s for part in parts))
        path = _base_file(output, candidate).with_name(f"{candidate.name}-between.json")
        write_profile(path, retimed(base, Measured(times, looks_s)))
        found[candidate.name] = path
    return found


def _kept(comparison: Comparison, output: Path) -> list[TakenPart]:
    return read_kept(output / PASSES_FILE, TakenPart, comparison)


def _base_file(output: Path, candidate: Candidate) -> Path:
    return output / PROFILES / f"{candidate.name}.json"
