"""What a profile says, from the times that passes took."""

import datetime
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from common.laws import chunk_features, pairs_of, step_features
from common.profile import LAW_TOKENS, PassTime, Profile
from common.spec import ElementType
from scheduler.policy.fitting import LinearFit
from scheduler.policy.saturation import saturation_length
from services.profiling.passes import FEW, RESTS, Case, Shared, as_chunk, as_step

REPEATS = 12
"""How often a case's times are shown to the fit: enough for what it believed before to count for nothing."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds that each pass took, every time, in the order in which a profile lists them. ``looks_s``: of
    looks at the machine's pace meanwhile (``services.profiling.probe``)."""

    taken_s: Mapping[Shared, Sequence[float]]
    looks_s: Sequence[float]

    @property
    def chunk_s(self) -> dict[Case, Sequence[float]]:
        found = {}
        for (chunks, batch, _), times in self.taken_s.items():
            if len(chunks) == 1 and not batch:
                found[chunks[0]] = times
        return found

    @property
    def step_s(self) -> dict[Case, Sequence[float]]:
        return {
            (batch, context): times for (chunks, batch, context), times in self.taken_s.items() if not chunks
        }

    @property
    def shared_s(self) -> dict[Shared, Sequence[float]]:
        """Of passes that are more than one chunk or one step."""
        return {case: times for case, times in self.taken_s.items() if len(case[0]) + bool(case[1]) > 1}


def cases_of(profile: Profile) -> list[Shared]:
    """The passes that it has times of."""
    chunks = [as_chunk((before, tokens)) for before, tokens, _ in profile.chunk_s]
    steps = [as_step((batch, context)) for batch, context, _ in profile.step_s]
    return [*chunks, *steps, *((each.chunks, each.batch, each.context) for each in profile.shared_s)]


def profile_of(model: str, dtype: ElementType, machine: str, measured: Measured) -> Profile:
    """Of chunks and steps that are enough for a fit each."""

    def of_chunk(case: Case) -> tuple[float, ...]:
        return chunk_features(case[1], pairs_of(*case))

    def of_step(case: Case) -> tuple[float, ...]:
        return step_features(case[0], case[0] * (case[1] + 1))

    chunk_s, step_s = measured.chunk_s, measured.step_s
    lawful_s = {case: times for case, times in chunk_s.items() if case[1] >= LAW_TOKENS}
    chunk_fit, step_fit = fit(lawful_s, of_chunk).fitted, fit(step_s, of_step).fitted
    assert chunk_fit is not None, "there are enough cases for a fit"
    assert step_fit is not None, "there are enough cases for a fit"
    medians = {case: statistics.median(times) for case, times in chunk_s.items()}
    shared_s = {case: statistics.median(times) for case, times in measured.shared_s.items()}
    return Profile(
        model=model,
        dtype=dtype,
        machine=machine,
        measured_on=datetime.datetime.now(datetime.UTC).date().isoformat(),
        chunk_s=tuple((*case, medians[case]) for case in chunk_s),
        step_s=tuple((*case, statistics.median(times)) for case, times in step_s.items()),
        saturation_tokens=saturation_length(
            {case[1]: medians[case] for case in chunk_s if case[0] == 0 and case[1] not in FEW + RESTS}
        ),
        chunk_time=msgspec.structs.replace(chunk_fit, samples=sum(map(len, lawful_s.values()))),
        step_time=msgspec.structs.replace(step_fit, samples=sum(map(len, step_s.values()))),
        chunk_held_out_error=held_out_error(lawful_s, of_chunk),
        step_held_out_error=held_out_error(step_s, of_step),
        shared_s=tuple(PassTime(*case, seconds) for case, seconds in shared_s.items()),
        look_s=statistics.median(measured.looks_s) if measured.looks_s else None,
    )


def retimed(profile: Profile, measured: Measured) -> Profile:
    """With other times of its passes, taken elsewhen. How long chunks are, and from how many tokens on KV is
    handed over layer by layer, stays as instances had it; so do looks, contention and tiles of keys."""
    found = profile_of(profile.model, profile.dtype, profile.machine, measured)
    return msgspec.structs.replace(
        found,
        saturation_tokens=profile.saturation_tokens,
        hand_over=profile.hand_over,
        look_s=profile.look_s,
        weight_bytes=profile.weight_bytes,
        contention=profile.contention,
        key_tile=profile.key_tile,
        measured_on=profile.measured_on,
    )


def fit(cases: Mapping[Case, Sequence[float]], features: Callable[[Case], tuple[float, ...]]) -> LinearFit:
    """To the median of every case, again and again, each as important as the others."""
    found = LinearFit(len(features(next(iter(cases)))))
    for _ in range(REPEATS):
        for case, times in cases.items():
            found.observe(features(case), statistics.median(times))
    return found


def held_out_error(
    cases: Mapping[Case, Sequence[float]], features: Callable[[Case], tuple[float, ...]]
) -> float:
    """The mean relative error of each case's median, predicted by a fit to all the others."""
    errors = []
    for held_out, times in cases.items():
        others = {case: taken for case, taken in cases.items() if case != held_out}
        fitted = fit(others, features).fitted
        assert fitted is not None, "there are enough cases for a fit"
        measured_s = statistics.median(times)
        errors.append(abs(fitted.seconds(features(held_out)) - measured_s) / measured_s)
    return statistics.fmean(errors)


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
