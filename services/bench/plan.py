"""From a configuration to requests: lengths drawn or read from a trace, cut to the context, made into bodies.

Requests are made lazily, each just before it is due: all the prompts of a long trace do not fit into memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile

from common.errors import ConfigError
from services.bench.arrivals import POISSON_BURSTINESS, make_arrivals
from services.bench.client import BenchRequest
from services.bench.config import DEFAULT_REQUESTS, BackgroundLoad, BenchConfig
from services.bench.lengths import (
    WORKLOADS,
    LengthMix,
    LengthPair,
    describe_length,
    fit_context,
    is_of_workload,
)
from services.bench.prompts import BodyTemplate, PromptShape, PromptSource, encode_body
from services.bench.traces import Trace, TraceRequest, read_trace

FOREGROUND, BACKGROUND, WARMUP = "foreground", "background", "warmup"
CLASS_INDEX = {FOREGROUND: 0, BACKGROUND: 1, WARMUP: 2}
"""Part of what a prompt is drawn from: two classes never share a prompt."""


@dataclass(slots=True)
class Truncations:
    """How many requests were cut to the context."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """Makes a class's requests. ``template_tokens`` is what the server adds around a text prompt.

    Warm-up requests share no prefix with measured ones: they must not fill a prefix cache.
    """

    class_name: str
    prompts: PromptSource
    template: BodyTemplate
    context_tokens: int | None
    template_tokens: int = 0
    truncations: Truncations = field(default_factory=Truncations)

    def make(self, index: int, wanted: LengthPair, block_hashes: tuple[int, ...] = ()) -> BenchRequest:
        lengths = wanted if self.context_tokens is None else fit_context(wanted, self.context_tokens)
        if lengths != wanted:
            self.truncations.requests += 1
            self.truncations.prompt_tokens += wanted.prompt_tokens - lengths.prompt_tokens
            self.truncations.output_tokens += wanted.output_tokens - lengths.output_tokens
        # The server adds its template's tokens: the prompt that it sees is still as long as asked for.
        own_tokens = max(1, lengths.prompt_tokens - self.template_tokens)
        shared = () if self.class_name == WARMUP else block_hashes
        shape = PromptShape(CLASS_INDEX[self.class_name], index, own_tokens, shared)
        return BenchRequest(
            class_name=self.class_name,
            index=index,
            prompt_tokens=own_tokens + self.template_tokens,
            output_tokens=lengths.output_tokens,
            body=encode_body(self.template, self.prompts.make_prompt(shape), lengths.output_tokens),
        )


@dataclass(frozen=True, slots=True)
class ForegroundPlan:
    """``requests`` is how many there will be, None where only the clock ends the run."""

    trace: tuple[TraceRequest, ...] | None
    requests: int | None


def plan_foreground(config: BenchConfig) -> ForegroundPlan:
    """Read the trace, if any, and settle how many requests there are. TraceError, ConfigError."""
    if config.trace is None:
        wanted = config.requests
        return ForegroundPlan(
            None, DEFAULT_REQUESTS if wanted is None and config.duration_s is None else wanted
        )
    # A workload picks among the rows, so how many rows it takes is not known before.
    trace = read_trace(config.trace, config.requests if config.workload is None else None)
    rows = _select_rows(config, trace)
    if config.replays_trace and not trace.has_arrivals:
        raise ConfigError("--trace", str(config.trace), "has no arrival times: give --rate or --concurrency")
    if config.requests is not None and config.requests > len(rows):
        raise ConfigError("--requests", config.requests, f"the trace holds {len(rows)} such requests")
    return ForegroundPlan(rows, len(rows))


def _select_rows(config: BenchConfig, trace: Trace) -> tuple[TraceRequest, ...]:
    if config.workload is None:
        return trace.requests[: config.requests]
    chosen = (
        row
        for row in trace.requests
        if is_of_workload(LengthPair(row.prompt_tokens, row.output_tokens), config.workload or "mixed")
    )
    rows = tuple(islice(chosen, config.requests))
    if not rows:
        raise ConfigError("--workload", config.workload, f"no request of {config.trace} belongs to it")
    return rows


def make_foreground(config: BenchConfig, plan: ForegroundPlan, maker: RequestMaker) -> Iterator[BenchRequest]:
    if plan.trace is not None:
        for index, row in enumerate(plan.trace):
            yield maker.make(index, LengthPair(row.prompt_tokens, row.output_tokens), row.block_hashes)
        return
    mix = LengthMix(((1.0, config.prompt, config.output),))
    if config.workload is not None:
        mix = WORKLOADS[config.workload].scaled(config.length_scale)
    lengths = islice(mix.draw_all(config.seed), plan.requests)
    for index, pair in enumerate(lengths):
        yield maker.make(index, pair)


def make_arrivals_s(config: BenchConfig, plan: ForegroundPlan) -> Iterator[float]:
    """Seconds from the start: the trace's own times over ``trace_scale``, or an arrival process."""
    if config.rate_per_s is not None:
        arrivals = make_arrivals(config.arrivals, config.rate_per_s, config.seed, config.burstiness)
    elif plan.trace is not None:
        first_s = plan.trace[0].arrival_s or 0.0
        arrivals = (((row.arrival_s or 0.0) - first_s) / config.trace_scale for row in plan.trace)
    else:
        raise ConfigError("--rate", None, "an open loop needs a rate or a trace")
    end_s = config.duration_s
    return arrivals if end_s is None else takewhile(lambda due_s: due_s < end_s, arrivals)


def make_background(load: BackgroundLoad, seed: int, maker: RequestMaker) -> Iterator[BenchRequest]:
    """Endless."""
    mix = LengthMix(((1.0, load.prompt, load.output),))
    for index, pair in enumerate(mix.draw_all(seed)):
        yield maker.make(index, pair)


def make_warmup(config: BenchConfig, plan: ForegroundPlan, maker: RequestMaker) -> Iterator[BenchRequest]:
    """Like the foreground in lengths; ``maker`` is of the class WARMUP, so never in content."""
    return islice(make_foreground(config, plan, maker), config.warmup)


def describe_offer(config: BenchConfig, name: str) -> str:
    """How a load was offered, in words."""
    if name == BACKGROUND and config.background is not None:
        load = config.background
        lengths = f"{describe_length(load.prompt)} → {describe_length(load.output)} tokens"
        return f"{load.concurrency} streams, {lengths}"
    if config.trace is not None:
        lengths = f"lengths of {config.trace.name}"
    elif config.workload is not None:
        scale = "" if config.length_scale == 1.0 else f", lengths × {config.length_scale:g}"
        lengths = f"workload {config.workload}{scale}"
    else:
        lengths = f"{describe_length(config.prompt)} → {describe_length(config.output)} tokens"
    if config.concurrency is not None:
        return f"closed loop of {config.concurrency}, {lengths}"
    if config.rate_per_s is not None:
        bursts = "" if config.burstiness == POISSON_BURSTINESS else f", burstiness {config.burstiness:g}"
        process = config.arrivals if not bursts else "gamma"
        return f"{process} arrivals at {config.rate_per_s:g}/s{bursts}, {lengths}"
    return f"the trace's arrivals × {config.trace_scale:g}, {lengths}"
