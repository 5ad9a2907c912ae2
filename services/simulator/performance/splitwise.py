"""Splitwise's performance model from its ``perf_model.csv`` (V-B), as its simulator uses it and corrected.

Theirs looks a decode step up by its number of sequences in medians over prompt size x batch size, so that a
step hardly depends on its batch, and not at all on its context. It is kept as it is, to be compared with;
what follows the same rows by batch and context stands beside it.
"""

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.laws import pairs_of
from services.simulator.performance.curves import BatchCurves
from services.simulator.performance.files import FloatArray, PerformanceFileError, Table, read_table
from services.simulator.performance.interface import HeldOutError
from services.simulator.performance.regression import (
    Regression,
    Samples,
    fit,
    held_out_errors,
    medians,
)
from services.simulator.shape import PassShape

KEYS = ("model", "hardware", "tensor_parallel")
SIZES = ("prompt_size", "batch_size", "token_size")
TIMES = ("prompt_time", "token_time")
MS = 1e-3
SHARED_PASS = 1.1
"""Of a prompt iteration that decodes share, in their model."""
SPLITWISE_FOLDS = 5
"""80 : 20, as they test theirs."""
CONTEXT_GRID, TOKEN_GRID = 64, 16


class Interpolation:
    """scipy's interp1d(kind="linear", fill_value="extrapolate"): the outermost segments go on."""

    def __init__(self, x: FloatArray, y: FloatArray) -> None:
        self._x: list[float] = x.tolist()
        self._y: list[float] = y.tolist()

    def at(self, x: float) -> float:
        high = min(max(bisect_left(self._x, x), 1), len(self._x) - 1)
        low = high - 1
        slope = (self._y[high] - self._y[low]) / (self._x[high] - self._x[low])
        return self._y[low] + slope * (x - self._x[low])


@dataclass(frozen=True, slots=True)
class SplitwiseProfile:
    """One model on one kind of machine: sizes in tokens and sequences, times in ms."""

    prompt_tokens: FloatArray
    batch: FloatArray
    output_tokens: FloatArray
    prompt_ms: FloatArray
    token_ms: FloatArray

    @property
    def prompt_samples(self) -> Samples:
        """By the length of each prompt, over the tokens of all."""
        features = np.column_stack((self.prompt_tokens, self.prompt_tokens * self.batch))
        return Samples("prompt", features, self.prompt_ms, slope_power=0.0)

    @property
    def token_samples(self) -> Samples:
        """By batch, over the mean context: a time is that of all output tokens, so half of them lie
        before."""
        features = np.column_stack((self.batch, self.prompt_tokens + self.output_tokens / 2))
        return Samples("token", features, self.token_ms)

    @property
    def published_samples(self) -> tuple[Samples, Samples]:
        """As theirs sees them: over prompt size x batch size."""
        features = (self.prompt_tokens * self.batch)[:, None]
        return Samples("prompt", features, self.prompt_ms), Samples("token", features, self.token_ms)

    def held_out(self, regression: Regression = "linear") -> tuple[HeldOutError, ...]:
        """Of the corrected model."""
        both = (self.prompt_samples, self.token_samples)
        return held_out_errors(both, regression, SPLITWISE_FOLDS)

    def held_out_published(self) -> tuple[HeldOutError, ...]:
        """Of theirs."""
        return held_out_errors(self.published_samples, "linear", SPLITWISE_FOLDS)


def read_splitwise(path: Path, model: str, hardware: str, tensor_parallel: int) -> SplitwiseProfile:
    """Raises PerformanceFileError, also where nothing of this model, machine and parallelism is in it."""
    table = read_table(path, (*KEYS, *SIZES, *TIMES))
    chosen = table.select(model=model, hardware=hardware, tensor_parallel=tensor_parallel)
    profile = SplitwiseProfile(
        *(chosen.numbers(column, least=1) for column in SIZES),
        *(chosen.numbers(column, above=0) for column in TIMES),
    )
    _check_sizes(chosen, profile)
    return profile


class SplitwiseModel:
    """As published: prompts are computed whole, one iteration at a time, whatever their context."""

    stages = 1

    def __init__(self, profile: SplitwiseProfile) -> None:
        prompts, tokens = (
            medians(samples.features[:, 0], samples.values) for samples in profile.published_samples
        )
        self._prompt, self._token = Interpolation(*prompts), Interpolation(*tokens)

    def prompt_ms(self, tokens: float) -> float:
        return self._prompt.at(tokens)

    def token_ms(self, sequences: int) -> float:
        return self._token.at(sequences)

    def pass_s(self, shape: PassShape) -> float:
        if not shape.chunks:
            return MS * self._token.at(shape.sequences) if shape.sequences else 0.0
        share = SHARED_PASS if shape.sequences else 1.0
        return MS * share * self._prompt.at(shape.tokens)

    def steps_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        return MS * steps * self._token.at(sequences)


class CorrectedSplitwiseModel:
    """The same rows; a decode step by its batch and context, a prompt by its length beside all tokens.

    A pass of both is not in them: it takes what its prompts do, and what the decodes add to a step of one
    sequence without context.
    """

    stages = 1

    def __init__(self, profile: SplitwiseProfile, regression: Regression = "linear") -> None:
        self._prompt = fit(regression, profile.prompt_samples)
        self._token = fit(regression, profile.token_samples)
        self._steps = BatchCurves(self._step_s, CONTEXT_GRID)
        self._prompts = BatchCurves(self._prompt_s, TOKEN_GRID)
        self._least_step_s = self._steps.of(1).at(0)

    def pass_s(self, shape: PassShape) -> float:
        step_s = 0.0
        if shape.sequences:
            step_s = self._steps.of(shape.sequences).at(shape.context_tokens / shape.sequences)
        if not shape.chunks:
            return step_s
        tokens = pairs = 0
        for before, some in shape.chunks:
            tokens += some
            pairs += pairs_of(before, some)
        # As long as each of prompts of one length would be whose tokens saw as many others.
        length = _bucket(2 * pairs / tokens + 1)
        return self._prompts.of(length).at(tokens) + max(0.0, step_s - self._least_step_s)

    def steps_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        return self._steps.of(sequences).total(context_tokens / sequences, steps)

    def _step_s(self, sequences: int, context: FloatArray) -> FloatArray:
        return MS * self._token.predict(np.column_stack((np.full(len(context), float(sequences)), context)))

    def _prompt_s(self, length: int, tokens: FloatArray) -> FloatArray:
        return MS * self._prompt.predict(np.column_stack((np.full(len(tokens), float(length)), tokens)))


def _bucket(length: float) -> int:
    """Lengths are taken alike that differ by less than a sixteenth part: each has a table of its own."""
    step = max(TOKEN_GRID, 1 << max(0, int(length).bit_length() - 5))
    return max(1, round(length / step) * step)


def _check_sizes(table: Table, profile: SplitwiseProfile) -> None:
    if len(np.unique(profile.prompt_tokens * profile.batch)) < 2:
        rule = "needs two products with batch_size at least, to interpolate between"
        raise PerformanceFileError(table.path, "column prompt_size", rule)
