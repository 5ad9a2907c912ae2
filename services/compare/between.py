"""A profile's passes, taken anew between a comparison's runs: a shared machine is faster in some minutes than
in others, and a profile says what runs took where both found the same ones.

They are taken in ``PARTS``: all of them at first, then one before each run, and one after the last. Each is
kept as it comes. The comparing process has the model and a pool for it meanwhile, and so has the one that
computes beside it.

Parts near a run say at what pace the machine was then, too; all of them, how much longer passes take beside
another process's (``services.profiling.contention``): four said anything between 0.05 and 1.8 ms, which runs
beside them did not follow. Looks during a run (``services.profiling.probe``) feel what a mesh's engines take
from one another more than its passes do: they took 5 to 16 % longer than between runs, passes 3 to 7 %
(measured on a Zen 5). So of them only that counts by which one run's differ from others' (``paces``).
"""

import asyncio
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop

from common.config import Config
from common.errors import ConfigError
from common.profile import Contention, PassTime, Profile, write_profile
from services.compare.comparison import Candidate, Comparison, config_of
from services.compare.paces import with_looks
from services.compare.records import RunKey, RunRecord, keep, read_kept
from services.compare.simulated_mesh import UNREAD, profile_of_instances
from services.hosts.engines import Engine, load_engine
from services.model_directory import model_directory
from services.profiling.contention import (
    ContendedPass,
    ContentionWatch,
    Neighbour,
    fit_contention,
    has_neighbours,
    neighbour_of,
)
from services.profiling.measured import Measured, cases_of, retimed
from services.profiling.pass_watch import PassWatch
from services.profiling.passes import Shared
from services.simulator.performance.profiled import read_machine_profile

PASSES_FILE, PROFILES = "passes.jsonl", "profiles"
PARTS = 7
"""Each takes a processor a few seconds."""
NEAR = 2
"""So many parts before a run, and after it, say at what pace it was: one may have met somebody's burst."""


class TakenPart(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``passes.jsonl``: seconds that some passes of a configuration's instances took, and others
    alone and beside another process's, where instances compute beside one another. ``before``: which run came
    next."""

    fingerprint: str
    configuration: str
    before: RunKey | None
    passes: tuple[PassTime, ...]
    contended: tuple[ContendedPass, ...] = ()


class Between(NamedTuple):
    """Of a configuration: a profile with the times that its passes took between runs, bursts included, and
    beside one another, as a file; and how many times as long as on average passes took near each run, and in
    it, as far as looks say. ``pace_change``: as ``pace_change_in``."""

    profile: Path
    paces: Mapping[RunKey, float]
    pace_change: float | None = None


@contextmanager
def passes_between(
    comparison: Comparison, candidate: Candidate, output: Path
) -> Iterator[Callable[[RunKey | None], None]]:
    """Who calls it takes a part, and says before which run; it does nothing where the comparison wants none,
    or no model computes. Raises as ``check_profiled``, ConfigError where the pool has no room for all, and
    NeighbourLost; so does a part."""
    profile = check_profiled(comparison, candidate, output)
    if profile is None:
        yield lambda before: None
        return
    write_profile(_base_file(output, candidate), profile)
    config = config_of(comparison, candidate, UNREAD)
    number = sum(each.configuration == candidate.name for each in _kept(comparison, output))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, ExitStack() as stack:
        instance = msgspec.structs.replace(config.instance, attention_workers=0)
        config = msgspec.structs.replace(config, instance=instance)
        directory = model_directory(config.model)
        engine = runner.run(load_engine(config, directory))
        stack.callback(engine.thread.close)
        neighbour = None
        if comparison.costs and has_neighbours(config):
            neighbour = stack.enter_context(neighbour_of(config, directory))
        passes = _Passes(engine, profile, neighbour)
        if not runner.run(passes.warm_up()):
            rule = "has no room for every pass of the profile: take it with these settings"
            raise ConfigError("instance.kv_bytes", config.instance.kv_bytes, rule)

        def take(before: RunKey | None = None) -> None:
            nonlocal number
            part = TakenPart(
                fingerprint=comparison.fingerprint,
                configuration=candidate.name,
                before=before,
                passes=runner.run(passes.take(number % PARTS)),
                contended=runner.run(passes.take_contended()),
            )
            keep(output / PASSES_FILE, part)
            number += 1

        while number < PARTS:
            take()
        yield take


def check_profiled(comparison: Comparison, candidate: Candidate, output: Path) -> Profile | None:
    """The profile that its instances take; None where passes are not to be taken between runs, or no model
    computes. Raises ConfigError where there is none, or another one than when the comparison began,
    PerformanceFileError where it cannot be read."""
    config = config_of(comparison, candidate, UNREAD)
    if not _is_wanted(comparison, config):
        return None
    profile, begun_with = read_machine_profile(profile_of_instances(config)), _base_file(output, candidate)
    if begun_with.exists() and read_machine_profile(begun_with) != profile:
        rule = f"began with another profile of {candidate.name} than there is now: choose another folder"
        raise ConfigError("--output", str(output), rule)
    return profile


class _Passes:
    """Of an engine in this process."""

    def __init__(self, engine: Engine, profile: Profile, neighbour: Neighbour | None) -> None:
        self._watch = PassWatch(engine, time.perf_counter)
        self._cases = cases_of(profile)
        self._contention = None
        if neighbour is not None:
            self._contention = ContentionWatch(PassWatch(engine, time.thread_time), neighbour)

    async def warm_up(self) -> bool:
        """First passes touch memory. Whether there is room for all."""
        found = [await self._watch.first(case) is not None for case in self._cases]
        if self._contention is not None and not await self._contention.warm_up():
            self._contention = None
        return all(found)

    async def take(self, part: int) -> tuple[PassTime, ...]:
        cases = self._cases[part::PARTS]
        # One finds a core that slept, and other weights in the caches: it does not count.
        await self._watch.time(cases[0])
        return tuple([PassTime(*case, await self._watch.time(case)) for case in cases])

    async def take_contended(self) -> tuple[ContendedPass, ...]:
        return () if self._contention is None else tuple(await self._contention.take())


def read_between(
    comparison: Comparison, candidates: Iterable[Candidate], output: Path, records: Sequence[RunRecord]
) -> dict[str, Between]:
    """By the names of ``candidates`` whose passes were to be taken between runs, of ``records``; writes their
    profiles.
    Raises ConfigError, also for those that were run without, and PerformanceFileError."""
    kept = _kept(comparison, output)
    found = {}
    for candidate in candidates:
        if not _is_wanted(comparison, config_of(comparison, candidate, UNREAD)):
            continue
        parts = [each for each in kept if each.configuration == candidate.name]
        if len(parts) < PARTS:
            rule = f"but {candidate.name} was run without: choose another --output"
            raise ConfigError("profiled_between", True, rule)
        taken: dict[Shared, list[float]] = defaultdict(list)
        for each in chain.from_iterable(part.passes for part in parts):
            taken[each.chunks, each.batch, each.context].append(each.seconds)
        base = read_machine_profile(_base_file(output, candidate))
        bursts = bursts_in(parts, taken)
        times = {case: [bursts * seconds for seconds in taken[case]] for case in cases_of(base)}
        path = _base_file(output, candidate).with_name(f"{candidate.name}-between.json")
        again = retimed(base, Measured(times, ()))
        contention = _contention_in(parts) or base.contention
        write_profile(path, msgspec.structs.replace(again, contention=contention))
        own = [each for each in records if each.configuration == candidate.name]
        paces = _part_paces(parts, taken)
        run_paces = with_looks(_run_paces(parts, paces), own)
        found[candidate.name] = Between(path, run_paces, pace_change_in(paces))
    return found


def _ratios_in(parts: Sequence[TakenPart], taken: Mapping[Shared, Sequence[float]]) -> list[list[float]]:
    """Of each part, how many times as long its passes took as in the median."""
    medians = {case: statistics.median(times) for case, times in taken.items()}
    return [
        [each.seconds / medians[each.chunks, each.batch, each.context] for each in part.passes]
        for part in parts
    ]


def bursts_in(parts: Sequence[TakenPart], taken: Mapping[Shared, Sequence[float]]) -> float:
    """How many times as long passes take on average as in the median, within the minutes of a part: what is
    computed meanwhile, and how long others wait for it, hang on the average. What minutes take otherwise than
    others is their pace. Of passes that were taken once nothing is known."""
    return statistics.fmean(
        statistics.fmean(ratios) / statistics.median(ratios) for ratios in _ratios_in(parts, taken)
    )


def _part_paces(parts: Sequence[TakenPart], taken: Mapping[Shared, Sequence[float]]) -> list[float]:
    """Each pass is held to its own median: those that are profiled by the clock, and those beside another
    process's by processor time."""
    contended = _contended_ratios_in(parts)
    return [
        statistics.median([*ratios, *more])
        for ratios, more in zip(_ratios_in(parts, taken), contended, strict=True)
    ]


def _run_paces(parts: Sequence[TakenPart], paces: Sequence[float]) -> dict[RunKey, float]:
    """Of the parts near each run. Of one that was begun twice, those of the second time."""
    found = {}
    for number, part in enumerate(parts):
        if part.before is not None:
            near = slice(max(0, number + 1 - NEAR), number + 1 + NEAR)
            found[part.before] = statistics.median(paces[near])
    return found


def pace_change_in(paces: Sequence[float]) -> float | None:
    """By what share the machine's pace changes from one part to the next, by the root of the mean square:
    so far its pace in a run is unknown. None where most passes were not taken three times: each part is held
    to what all of them say, its own included."""
    if len(paces) < 3 * PARTS:
        return None
    return math.sqrt(statistics.fmean((later / earlier - 1) ** 2 for earlier, later in pairwise(paces)))


def _contended_ratios_in(parts: Sequence[TakenPart]) -> list[list[float]]:
    """The same of those that were taken alone and beside another process's."""
    taken: dict[tuple[Shared, int], list[float]] = defaultdict(list)
    for key, seconds in chain.from_iterable(map(_contended, parts)):
        taken[key].append(seconds)
    medians = {key: statistics.median(times) for key, times in taken.items()}
    return [[seconds / medians[key] for key, seconds in _contended(part)] for part in parts]


def _contended(part: TakenPart) -> Iterator[tuple[tuple[Shared, int], float]]:
    """Each pass's times, and which of them it is."""
    for each in part.contended:
        case = (each.chunks, each.batch, each.context)
        for which, seconds in enumerate((each.alone_s, *(other.seconds for other in each.beside))):
            yield (case, which), seconds


def _contention_in(parts: Sequence[TakenPart]) -> Contention | None:
    taken = [*chain.from_iterable(part.contended for part in parts)]
    return fit_contention(taken) if taken else None


def _is_wanted(comparison: Comparison, config: Config) -> bool:
    return comparison.profiled_between and config.instance.engine == "model"


def _kept(comparison: Comparison, output: Path) -> list[TakenPart]:
    return read_kept(output / PASSES_FILE, TakenPart, comparison)


def _base_file(output: Path, candidate: Candidate) -> Path:
    return output / PROFILES / f"{candidate.name}.json"
