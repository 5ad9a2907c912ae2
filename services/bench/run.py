"""A whole benchmark run: find the model, warm up, start the background, offer the foreground, add it up."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from services.bench.client import Client, Outcome, ServedModel, find_model
from services.bench.config import BenchConfig, BenchError, check_config
from services.bench.connection import ConnectionPool
from services.bench.lengths import LengthPair
from services.bench.load import (
    LoadRecord,
    Offering,
    attempt_request,
    cut,
    cut_when,
    offer_closed_loop,
    offer_open_loop,
)
from services.bench.plan import (
    BACKGROUND,
    FOREGROUND,
    WARMUP,
    ForegroundPlan,
    RequestMaker,
    describe_offer,
    make_arrivals_s,
    make_background,
    make_foreground,
    make_warmup,
    plan_foreground,
)
from services.bench.prompts import ENDPOINTS, BodyTemplate, PromptSource, TextPrompts, TokenIdPrompts
from services.bench.summary import BenchResult, Samples, Window, load_window, summarize
from services.server_url import parse_url

MOST_WARMUP_STREAMS = 8


@dataclass(frozen=True, slots=True)
class Progress:
    """What a display may read while the run goes on. ``requests`` is None where only the clock ends it."""

    foreground: LoadRecord
    background: LoadRecord
    requests: int | None
    duration_s: float | None


@dataclass(frozen=True, slots=True)
class BenchRun:
    """The figures, with all that they were made of. ``samples`` is by the load's name."""

    result: BenchResult
    samples: dict[str, Samples]
    outcomes: tuple[Outcome, ...]
    started_s: float


@dataclass(frozen=True, slots=True)
class _Session:
    """What the stages of one run share."""

    config: BenchConfig
    plan: ForegroundPlan
    client: Client
    prompts: PromptSource
    template: BodyTemplate
    context_tokens: int | None
    template_tokens: int

    def maker(self, class_name: str) -> RequestMaker:
        return RequestMaker(
            class_name, self.prompts, self.template, self.context_tokens, self.template_tokens
        )

    def offering(self, record: LoadRecord) -> Offering:
        return Offering(self.client, record, self.config.checks_tokens)


async def run_bench(
    config: BenchConfig,
    *,
    api_key: str | None = None,
    stop: asyncio.Event | None = None,
    on_start: Callable[[Progress], None] | None = None,
) -> BenchRun:
    """Run ``config`` to its end, or until ``stop`` is set; what was measured by then is reported.

    ``on_start`` is called when the foreground begins. ConfigError, TraceError and BenchError before that;
    afterwards every failure is a request's own.
    """
    check_config(config)
    plan = plan_foreground(config)
    prompts = _make_prompts(config)
    pool = ConnectionPool(parse_url(config.url), config.connect_timeout_s)
    try:
        model = await find_model(pool, api_key, config.model, config.request_timeout_s)
        session = await _open_session(config, plan, prompts, model, pool, api_key)
        await _warm_up(session)
        return await _measure(session, stop or asyncio.Event(), on_start)
    finally:
        pool.close()


def _make_prompts(config: BenchConfig) -> PromptSource:
    if config.tokenizer is None:
        return TokenIdPrompts(config.seed)
    return TextPrompts(config.seed, config.tokenizer)


async def _open_session(
    config: BenchConfig,
    plan: ForegroundPlan,
    prompts: PromptSource,
    model: ServedModel,
    pool: ConnectionPool,
    api_key: str | None,
) -> _Session:
    session = _Session(
        config=config,
        plan=plan,
        client=Client(pool, ENDPOINTS[config.endpoint], api_key, config.request_timeout_s),
        prompts=prompts,
        template=BodyTemplate(
            config.endpoint, model.name, config.ignores_eos, config.temperature, config.extra_body
        ),
        context_tokens=config.context_tokens or model.context_tokens,
        template_tokens=0,
    )
    if config.tokenizer is None:
        return session
    return replace(session, template_tokens=await _measure_template(session))


async def _measure_template(session: _Session) -> int:
    """How many tokens the server puts around a text prompt (chat template, bos), asked with one request."""
    probe = session.maker(WARMUP).make(0, LengthPair(prompt_tokens=16, output_tokens=1))
    outcome = await attempt_request(
        replace(session.offering(LoadRecord()), checks_tokens=False), probe, time.monotonic()
    )
    if outcome.failure is not None:
        raise BenchError(f"a first request failed ({outcome.failure.kind}): {outcome.failure.message}")
    if outcome.usage is None:
        return 0
    return max(0, outcome.usage.prompt_tokens - probe.prompt_tokens)


async def _warm_up(session: _Session) -> None:
    """Send the warm-up requests; what becomes of them is not recorded."""
    requests = make_warmup(session.config, session.plan, session.maker(WARMUP))
    streams = min(session.config.warmup, session.config.concurrency or 1, MOST_WARMUP_STREAMS)
    if streams > 0:
        await offer_closed_loop(session.offering(LoadRecord()), requests, streams)


async def _measure(
    session: _Session, stop: asyncio.Event, on_start: Callable[[Progress], None] | None
) -> BenchRun:
    foreground, background = LoadRecord(), LoadRecord()
    started_at, started_s, started_cpu_s = datetime.now(UTC), time.monotonic(), time.process_time()
    makers = {name: session.maker(name) for name in (FOREGROUND, BACKGROUND)}
    streams = await _start_background(session, makers[BACKGROUND], background, stop)
    if on_start is not None:
        on_start(Progress(foreground, background, session.plan.requests, session.config.duration_s))
    try:
        offer = asyncio.create_task(_offer_foreground(session, makers[FOREGROUND], foreground))
        await cut_when(stop, offer)
    finally:
        if streams is not None:
            await cut(streams)
    cpu_share = (time.process_time() - started_cpu_s) / (time.monotonic() - started_s)
    window = load_window(foreground.outcomes) or Window(started_s, time.monotonic())
    records = (
        {FOREGROUND: foreground} if streams is None else {FOREGROUND: foreground, BACKGROUND: background}
    )
    summaries = {
        name: summarize(
            name,
            describe_offer(session.config, name),
            record.outcomes,
            window,
            session.config.objectives,
            makers[name].truncations,
        )
        for name, record in records.items()
    }
    return BenchRun(
        result=BenchResult(
            started_at=started_at,
            config=session.config,
            model=session.template.model,
            loads=tuple(load for load, _ in summaries.values()),
            client_cpu_share=cpu_share,
            is_interrupted=stop.is_set(),
        ),
        samples={name: samples for name, (_, samples) in summaries.items()},
        outcomes=(*foreground.outcomes, *background.outcomes),
        started_s=started_s,
    )


async def _offer_foreground(session: _Session, maker: RequestMaker, record: LoadRecord) -> None:
    config = session.config
    requests = make_foreground(config, session.plan, maker)
    if config.concurrency is not None:
        await offer_closed_loop(session.offering(record), requests, config.concurrency, config.duration_s)
    else:
        arrivals_s = make_arrivals_s(config, session.plan)
        await offer_open_loop(session.offering(record), requests, arrivals_s, config.most_in_flight)


async def _start_background(
    session: _Session, maker: RequestMaker, record: LoadRecord, stop: asyncio.Event
) -> "asyncio.Task[None] | None":
    """Start the background streams and wait until all of them decode: interference is with decoding."""
    load = session.config.background
    if load is None:
        return None
    is_streaming = asyncio.Event()
    requests = make_background(load, session.config.seed + 1, maker)
    streams = asyncio.create_task(
        offer_closed_loop(session.offering(record), requests, load.concurrency, on_streaming=is_streaming.set)
    )
    waits = [asyncio.create_task(event.wait()) for event in (is_streaming, stop)]
    try:
        await asyncio.wait([streams, *waits], return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await cut(streams)
        raise
    finally:
        for wait in waits:
            wait.cancel()
    if streams.done():
        # Endless by construction: it ends only by a defect, which is raised here.
        streams.result()
    return streams
