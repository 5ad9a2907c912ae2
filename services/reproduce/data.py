"""The papers' public data, as files of one directory that the user names: none of them is in the package.

A performance model or a table that is missing is an error, naming it, unless its row calls it optional and
says what was left out. Of a trace that is missing the lengths can be drawn from a distribution that has the
paper's published means, and whoever does so says so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import ConfigError
from services.bench.lengths import LengthPair
from services.bench.traces import read_trace

SHAREGPT_TRACE = "vidur/processed_traces/sharegpt_val_10k_llama2.csv.gz"
CONVERSATION_TRACE = "azure2023/AzureLLMInferenceTrace_conv.csv.gz"
CODING_TRACE = "azure2023/AzureLLMInferenceTrace_code.csv.gz"
"""Traces of several papers' comparisons; others are named beside what reads them."""
UNKNOWN_SIGMA = 1.0
"""Of a lognormal of which a paper publishes the mean alone."""


class DataFiles:
    """Files are found by their path below the directory, or by their name in it, plain or gzipped."""

    def __init__(self, directory: Path | None) -> None:
        if directory is not None and not directory.is_dir():
            raise ConfigError("--data", str(directory), "is no directory")
        self.directory = directory

    def find(self, name: str) -> Path | None:
        if self.directory is None:
            return None
        plain = name.removesuffix(".gz")
        for each in (name, plain, f"{plain}.gz"):
            for path in (self.directory / each, self.directory / Path(each).name):
                if path.exists():
                    return path
        return None

    def require(self, name: str) -> Path:
        """Raises ConfigError."""
        found = self.find(name)
        if found is None:
            where = None if self.directory is None else str(self.directory)
            raise ConfigError("--data", where, f"must be a directory that has {name}")
        return found


@dataclass(frozen=True, slots=True)
class PublishedLength:
    """Of prompts or outputs, in tokens, as a paper prints them. ``median``: where it prints one."""

    mean: float
    median: float | None = None

    @property
    def sigma(self) -> float:
        """Of the lognormal with this mean and median."""
        if self.median is None:
            return UNKNOWN_SIGMA
        return math.sqrt(2 * math.log(self.mean / self.median))

    def draw(self, count: int, longest: int, generator: np.random.Generator) -> list[int]:
        """With the published mean: what is over ``longest`` is drawn again, and all are scaled to it."""
        drawn = np.exp(generator.normal(0.0, self.sigma, 8 * count))
        drawn = drawn / drawn.mean() * self.mean
        kept = drawn[drawn <= longest][:count]
        kept = kept * (self.mean / kept.mean())
        return [int(each) for each in np.clip(np.rint(kept), 1, longest)]


@dataclass(frozen=True, slots=True)
class PublishedLengths:
    """``longest``: of a prompt with its output."""

    source: str
    prompt: PublishedLength
    output: PublishedLength
    longest: int

    def draw(self, count: int, seed: int) -> list[LengthPair]:
        generator = np.random.default_rng(seed)
        prompts = self.prompt.draw(count, self.longest - 1, generator)
        outputs = self.output.draw(count, self.longest - 1, generator)
        pairs = zip(prompts, outputs, strict=True)
        return [LengthPair(prompt, min(output, self.longest - prompt)) for prompt, output in pairs]


@dataclass(frozen=True, slots=True)
class Lengths:
    """``described``: where they are from, a sentence."""

    pairs: tuple[LengthPair, ...]
    described: str

    @property
    def mean_prompt(self) -> float:
        return sum(each.prompt_tokens for each in self.pairs) / len(self.pairs)

    @property
    def mean_output(self) -> float:
        return sum(each.output_tokens for each in self.pairs) / len(self.pairs)


def lengths_of(
    files: DataFiles, name: str, published: PublishedLengths, count: int, seed: int = 0
) -> Lengths:
    """So many of the trace's requests, drawn without putting back while they last, or of the published
    distribution where there is no such file."""
    path = files.find(name)
    if path is None:
        pairs = tuple(published.draw(count, seed))
        kind = "lognormals with the means that the paper publishes"
        if published.prompt.median is None:
            kind += f" (their spread, sigma {UNKNOWN_SIGMA:g}, is assumed)"
        return described(pairs, f"{name} is not there: {kind}, {published.source}")
    requests = read_trace(path).requests
    order = np.random.default_rng(seed).permutation(len(requests))
    chosen = [requests[order[place % len(order)]] for place in range(count)]
    pairs = tuple(LengthPair(each.prompt_tokens, each.output_tokens) for each in chosen)
    return described(pairs, f"lengths drawn from {name}")


def described(pairs: Sequence[LengthPair], origin: str) -> Lengths:
    """``origin``: where they are from."""
    found = Lengths(tuple(pairs), origin)
    means = f"{found.mean_prompt:.1f} prompt and {found.mean_output:.1f} output tokens on average"
    return Lengths(found.pairs, f"{len(pairs):,} requests, {origin}; {means}.")
