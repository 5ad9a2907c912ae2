"""What ``lamella profile`` measured on a machine: between its medians, or by the law that was fitted to them.

A pass with prompts and decodes takes the sum of what either adds; what any pass costs is paid once, by the
prompts (``common.performance.pass_features``). Over the cases several prompts take what the rows of all do
in one chunk, but for attention, and there is beside it what the profile's shared passes took more than that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from common.devices import DeviceSpec
from common.errors import ConfigError, reason_of
from common.laws import PAIRS, TOKENS, pairs_of
from common.performance import FittedTime
from common.profile import LAW_TOKENS, PassTime, Profile
from common.shapes import ModelShape
from common.spec import ELEMENT_BYTES
from services.simulator.performance.curves import BatchCurves, ChunkSurface
from services.simulator.performance.files import FloatArray, PerformanceFileError
from services.simulator.performance.interface import HeldOutError, PerformanceModel
from services.simulator.performance.regression import Line, Regression, Samples, fit, held_out_error
from services.simulator.shape import PassShape

ProfileFit = Literal["law", "linear", "forest"]
"""The law fitted to the cases, or the cases themselves with a regression between them."""
CONTEXT_GRID, TOKEN_GRID, BEFORE_GRID = 16, 4, 64


def read_machine_profile(path: Path) -> Profile:
    """Raises PerformanceFileError where it is none, or has too little in it."""
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as exc:
        raise PerformanceFileError(path, "", f"cannot be read: {reason_of(exc)}") from exc
    except msgspec.DecodeError as exc:
        rule = f"is no profile of this version's `lamella profile`, which has to be run again: {exc}"
        raise PerformanceFileError(path, "", rule) from exc
    for name, cases in (("chunk_s", profile.chunk_s), ("step_s", profile.step_s)):
        if len(cases) < 2:
            raise PerformanceFileError(path, f"key {name}", "needs two cases at least")
        for row, (before, size, seconds) in enumerate(cases):
            if before < 0 or size < 0 or not 0 < seconds < float("inf"):
                rule = f"{[before, size, seconds]}: must be two sizes and a time over 0"
                raise PerformanceFileError(path, f"key {name}[{row}]", rule)
    for row, case in enumerate(profile.shared_s):
        sizes = [*chain.from_iterable(case.chunks), case.batch, case.context]
        if min(sizes) < 0 or not 0 < case.seconds < float("inf"):
            rule = f"{msgspec.to_builtins(case)}: must be sizes and a time over 0"
            raise PerformanceFileError(path, f"key shared_s[{row}]", rule)
    return profile


def at_pace(profile: Profile, pace: float) -> Profile:
    """All that it measured takes so many times as long."""
    if pace == 1.0:
        return profile

    def law(fitted: FittedTime) -> FittedTime:
        return msgspec.structs.replace(
            fitted, coefficients=tuple(pace * each for each in fitted.coefficients)
        )

    return msgspec.structs.replace(
        profile,
        chunk_s=tuple((*case, pace * seconds) for *case, seconds in profile.chunk_s),
        step_s=tuple((*case, pace * seconds) for *case, seconds in profile.step_s),
        shared_s=tuple(
            msgspec.structs.replace(each, seconds=pace * each.seconds) for each in profile.shared_s
        ),
        chunk_time=law(profile.chunk_time),
        step_time=law(profile.step_time),
    )


def profile_samples(profile: Profile) -> tuple[Samples, Samples]:
    """Chunks by their tokens, over those before; steps by their batch, over each one's context."""
    chunks, steps = np.array(profile.chunk_s), np.array(profile.step_s)
    return (
        Samples("chunk", chunks[:, [1, 0]], chunks[:, 2]),
        Samples("step", steps[:, [0, 1]] + [0, 1], steps[:, 2]),
    )


def profile_held_out(profile: Profile, by: ProfileFit) -> tuple[HeldOutError, ...]:
    """Each case predicted by the others."""
    chunks, steps = profile_samples(profile)
    if by == "law":
        lawful = sum(tokens >= LAW_TOKENS for _, tokens, _ in profile.chunk_s)
        return (
            HeldOutError("chunk", profile.chunk_held_out_error, lawful),
            HeldOutError("step", profile.step_held_out_error, len(steps.values)),
        )
    return tuple(
        held_out_error(each, lambda some: fit(by, some), folds=len(each.values)) for each in (chunks, steps)
    )


class LawModel:
    """The profile's laws: straight lines over tokens, pairs, sequences and contexts. Every pass takes
    ``overhead_s`` longer, and ``token_s`` for each of its decodes and ``prompt_s`` for each prompt that ends
    with it."""

    stages = 1

    def __init__(
        self,
        chunk_time: FittedTime,
        step_time: FittedTime,
        overhead_s: float = 0.0,
        token_s: float = 0.0,
        prompt_s: float = 0.0,
    ) -> None:
        *chunk_parts, chunk_s = chunk_time.coefficients
        per_context, per_sequence, step_s = step_time.coefficients
        self._chunk = (*chunk_parts, chunk_s + overhead_s)
        self._step = (per_context, per_sequence + token_s, step_s + overhead_s)
        self._prompt_s = prompt_s

    def pass_s(self, shape: PassShape) -> float:
        per_context, per_sequence, _ = self._step
        if not shape.chunks:
            return self.steps_s(shape.sequences, shape.context_tokens, 1) if shape.sequences else 0.0
        per_token, per_pair, seconds = self._chunk
        seconds += self._prompt_s * shape.ended
        for before, tokens in shape.chunks:
            seconds += per_token * tokens / TOKENS + per_pair * pairs_of(before, tokens) / PAIRS
        return max(
            0.0, seconds + per_context * shape.context_tokens / TOKENS + per_sequence * shape.sequences
        )

    def steps_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        """No step takes less than nothing: those whose line is under 0 count for 0."""
        per_context, per_sequence, step_s = self._step
        first = per_context * context_tokens / TOKENS + per_sequence * sequences + step_s
        rise = per_context * sequences / TOKENS
        begin, end = 0, steps
        if first < 0:
            begin = min(steps, math.ceil(-first / rise)) if rise > 0 else steps
        elif first + rise * (steps - 1) < 0:
            end = min(steps, math.floor(-first / rise) + 1)
        return max(0.0, (end - begin) * (first + rise * (begin + end - 1) / 2))

    def model_s(self, sequences: int) -> float:
        _, per_sequence, step_s = self._step
        return max(0.0, per_sequence * sequences + step_s)

    def attention_s(self, sequences: int, context_tokens: int) -> float:
        return max(0.0, self._step[0] * context_tokens / TOKENS)


class Beside(NamedTuple):
    """Seconds over those of a pass's parts: of a chunk more, of decodes beside chunks, of each of these
    chunks' tokens, of a chunk after tokens that are no whole tiles."""

    more_chunk_s: float = 0.0
    decodes_s: float = 0.0
    token_s: float = 0.0
    broken_s: float = 0.0


TOKENS_BESIDE = Beside._fields.index("token_s")
NEVER_LESS = tuple([Beside._fields.index(name) for name in ("more_chunk_s", "broken_s")])


class _Parts(NamedTuple):
    """``broken``: of the ``chunks``, those after tokens that are no whole tiles."""

    chunks: tuple[tuple[int, int], ...]
    sequences: int
    context_tokens: int
    broken: int

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """As ``Beside`` has them."""
        tokens = sum([tokens for _, tokens in self.chunks])
        has_both = bool(self.sequences and self.chunks)
        return max(0, len(self.chunks) - 1), int(has_both), tokens if has_both else 0, self.broken


class TableModel:
    """Between the profile's cases, by a regression. Several chunks have the rows of one of all their tokens,
    whose attention is over each one's own prompt only; decodes beside chunks take what they take over the
    laws' fixed part, which a pass has once. A chunk of one token counts as a decode, as it is computed but
    for a prompt's first beside other chunks. ``_beside``: what the profile's such passes took over that.
    Earlier tokens count in whole tiles, as they were measured alone."""

    stages = 1

    def __init__(self, profile: Profile, by: Regression = "linear") -> None:
        chunks, steps = profile_samples(profile)
        self._chunk, self._step = fit(by, chunks), fit(by, steps)
        self._step_fixed_s = max(0.0, profile.step_time.coefficients[2])
        self._key_tile = profile.key_tile
        self._chunks = ChunkSurface(self._chunk_s, before_grid=BEFORE_GRID, token_grid=TOKEN_GRID)
        self._steps = BatchCurves(self._step_s, CONTEXT_GRID)
        self._per_context_s = max(0.0, profile.step_time.coefficients[0])
        self._per_pair_s = max(0.0, profile.chunk_time.coefficients[1])
        contexts = steps.features.prod(axis=1)
        self._rest = Line(steps.features[:, 0], steps.values - self._per_context_s * contexts / TOKENS)
        self._most_tokens = int(chunks.features[:, 0].max())
        # A law of few cases may say that tokens cost nothing.
        mean_s = self._chunks.at(0, self._most_tokens) / self._most_tokens if self._most_tokens else 0.0
        self._beyond_token_s = max(0.0, profile.chunk_time.coefficients[0] / TOKENS) or mean_s
        self._beside = Beside()
        if profile.shared_s:
            self._beside = self._fit_beside(profile.shared_s)

    def _fit_beside(self, cases: Sequence[PassTime]) -> Beside:
        """With the least squares of what passes are off by, relative to them, as a hundredth of a long pass
        is more than what a part costs: short ones of many parts say most. What none has costs nothing."""
        counts, wanted = [], []
        for case in cases:
            shape = PassShape(case.chunks, case.batch, case.batch * (case.context + 1))
            counts.append(self._parts(shape).counts)
            wanted.append((case.seconds - self.pass_s(shape)) / case.seconds)
        columns = np.array(counts) / np.array([[case.seconds] for case in cases])
        # One number of tokens beside decodes does not tell what is of each from what is of the decodes.
        numbers = {tokens for _, decodes, tokens, _ in counts if decodes}
        kept = [part for part in range(columns.shape[1]) if part != TOKENS_BESIDE or len(numbers) > 1]
        while True:
            found = np.zeros(columns.shape[1])
            found[kept] = np.linalg.lstsq(columns[:, kept], np.array(wanted), rcond=None)[0]
            negative = [part for part in NEVER_LESS if found[part] < 0]
            if not negative:
                return Beside(*map(float, found))
            kept = [part for part in kept if part not in negative]

    def _parts(self, shape: PassShape) -> _Parts:
        chunks, sequences, context_tokens = shape.chunks, shape.sequences, shape.context_tokens
        for before, tokens in chunks:
            if tokens == 1:
                sequences += 1
                context_tokens += before + 1
        if sequences > shape.sequences:
            chunks = tuple([chunk for chunk in chunks if chunk[1] > 1])
        broken = 0
        if self._key_tile > 1:
            broken = sum([before % self._key_tile > 0 for before, _ in chunks])
        return _Parts(chunks, sequences, context_tokens, broken)

    def pass_s(self, shape: PassShape) -> float:
        chunks, sequences, context_tokens, broken = self._parts(shape)
        step_s = self._steps.of(sequences).at(context_tokens / sequences) if sequences else 0.0
        if not chunks:
            return step_s
        if broken:
            chunks = tuple([(self._whole_tiles(before), tokens) for before, tokens in chunks])
        chunks_s = self._chunks.at(*chunks[0]) if len(chunks) == 1 else self._several_s(chunks)
        if sequences:
            beside_s = self._beside.decodes_s + self._beside.token_s * sum([tokens for _, tokens in chunks])
            chunks_s += max(0.0, step_s - self._step_fixed_s + beside_s)
        return chunks_s + broken * self._beside.broken_s

    def _whole_tiles(self, keys: int) -> int:
        return -(-keys // self._key_tile) * self._key_tile

    def _several_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Each (tokens before, tokens). Attention from prompt to prompt, which one chunk of them all has, is
        the law's or, where that says more, the cases'. Tokens beyond those of the largest case take what the
        law says."""
        at, per_pair_s = self._chunks.at, self._per_pair_s
        all_tokens = sum([tokens for _, tokens in chunks])
        rows = min(all_tokens, self._most_tokens)
        seconds = at(0, rows) + (all_tokens - rows) * self._beyond_token_s
        seconds += (len(chunks) - 1) * self._beside.more_chunk_s
        start, longest_s = 0, 0.0
        for tokens, before in sorted([(tokens, before) for before, tokens in chunks], reverse=True):
            own_s = at(before, tokens)
            longest_s = max(longest_s, own_s)
            if before:
                seconds += max(0.0, own_s - at(0, tokens))
            inside = max(0, min(tokens, rows - start))
            if start and inside:
                after_others_s = max(0.0, at(start, inside) - at(0, inside))
                seconds -= min(start * inside / PAIRS * per_pair_s, after_others_s)
            seconds += (pairs_of(0, tokens) - pairs_of(0, inside)) / PAIRS * per_pair_s
            start += tokens
        return max(longest_s, seconds)

    def steps_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        return self._steps.of(sequences).total(context_tokens / sequences, steps)

    def model_s(self, sequences: int) -> float:
        """Of a step, what the law's contexts leave of it."""
        return max(0.0, float(self._rest.at(np.array([float(sequences)]))[0]))

    def attention_s(self, sequences: int, context_tokens: int) -> float:
        """By the law."""
        return self._per_context_s * context_tokens / TOKENS

    def _chunk_s(self, before: FloatArray, tokens: FloatArray) -> FloatArray:
        return self._chunk.predict(np.column_stack((tokens, before)))

    def _step_s(self, sequences: int, contexts: FloatArray) -> FloatArray:
        return self._step.predict(np.column_stack((np.full(len(contexts), float(sequences)), contexts)))


@dataclass(frozen=True, slots=True)
class WithOverhead:
    """A table whose passes take longer by what their process does between two of them, and for each token
    that decodes drew, and each prompt that ended."""

    model: TableModel
    pass_overhead_s: float
    token_s: float = 0.0
    prompt_s: float = 0.0

    @property
    def stages(self) -> int:
        return self.model.stages

    def model_s(self, sequences: int) -> float:
        return self.model.model_s(sequences) + self._overhead_s(sequences)

    def attention_s(self, sequences: int, context_tokens: int) -> float:
        return self.model.attention_s(sequences, context_tokens)

    def pass_s(self, shape: PassShape) -> float:
        beside_s = self._overhead_s(shape.sequences) + self.prompt_s * shape.ended
        return self.model.pass_s(shape) + beside_s

    def steps_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        return self.model.steps_s(sequences, context_tokens, steps) + steps * self._overhead_s(sequences)

    def _overhead_s(self, sequences: int) -> float:
        return self.pass_overhead_s + self.token_s * sequences


def profile_model(
    profile: Profile, by: ProfileFit, overhead_s: float = 0.0, token_s: float = 0.0, prompt_s: float = 0.0
) -> PerformanceModel:
    if by == "law":
        return LawModel(profile.chunk_time, profile.step_time, overhead_s, token_s, prompt_s)
    model = TableModel(profile, by)
    if overhead_s or token_s or prompt_s:
        return WithOverhead(model, overhead_s, token_s, prompt_s)
    return model


def machine_device(
    profile: Profile, shape: ModelShape, *, name: str, memory_gb: float, price_usd_h: float
) -> DeviceSpec:
    """A profiled machine as a catalogue's device: the rates that the profile's laws come to, reached and no
    peaks. Links are those of its own memory. Raises ConfigError where a law has no such rate."""
    per_token_s = profile.chunk_time.coefficients[0] / TOKENS
    step_s = profile.step_time.coefficients[2]
    if per_token_s <= 0 or step_s <= 0:
        rule = "says that tokens or steps take no time: profile again, on an idle machine"
        raise ConfigError("profile", profile.machine, rule)
    weight_bytes = profile.weight_bytes or ELEMENT_BYTES[profile.dtype]
    flop_s = 2 * (shape.multiplied_parameters - shape.head_parameters) / per_token_s
    memory_bytes_s = shape.multiplied_parameters * weight_bytes / step_s
    measured = f"{profile.model} in {profile.dtype}, {profile.machine}, {profile.measured_on}"
    return DeviceSpec(
        name=name,
        bf16_tflops=flop_s / 1e12,
        memory_gb=memory_gb,
        memory_gb_s=memory_bytes_s / 1e9,
        power_w=None,
        price_usd_h=price_usd_h,
        interchip_gb_s=memory_bytes_s / 1e9,
        network_gbps=8 * memory_bytes_s / 1e9,
        figures_source=f"`lamella profile` of {measured}: reached, not peaks",
        price_source="given by the user",
        network_source="its own memory's rate: instances of one machine hand over there",
        has_reached_rates=True,
    )
