"""The ``bench`` command: options to a configuration, a progress bar while it runs, the report at the end.

Heavy imports wait until the command runs, so that ``lamella --help`` answers at once.
"""

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from common.errors import ConfigError, ServiceError
from services.commands.options import BURSTINESS
from services.launcher.state_directory import DEFAULT_STATE_DIRECTORY

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as ProgressBar

    from services.bench.config import BackgroundLoad, BenchConfig
    from services.bench.run import BenchRun
    from services.bench.run import Progress as RunProgress

REFRESH_S = 0.25
EXIT_NOTHING_SERVED = 1
EXIT_BAD_USE = 2
PLOT_SUFFIXES = (".png", ".svg", ".pdf")

LOAD, WORK, BACKGROUND, JUDGE, OUTPUT = "Load", "Requests", "Background load", "Judging", "Output"


def bench(
    url: Annotated[
        str | None, typer.Option(help="Server to measure, with or without /v1; else the local mesh.")
    ] = None,
    state_dir: Annotated[
        Path, typer.Option(help="The local mesh to measure, without --url.")
    ] = DEFAULT_STATE_DIRECTORY,
    model: Annotated[
        str | None, typer.Option(help="Model to ask for; else the first the server lists.")
    ] = None,
    endpoint: Annotated[
        str, typer.Option(help="completions | chat (chat needs --tokenizer).")
    ] = "completions",
    rate: Annotated[
        float | None, typer.Option(help="Open loop: requests per second.", rich_help_panel=LOAD)
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Closed loop: users that wait for their answer.", rich_help_panel=LOAD)
    ] = None,
    arrivals: Annotated[str, typer.Option(help="poisson | fixed.", rich_help_panel=LOAD)] = "poisson",
    burstiness: Annotated[float, typer.Option(help=BURSTINESS, rich_help_panel=LOAD)] = 1.0,
    requests: Annotated[
        int | None, typer.Option(help="How many (100, or the whole trace).", rich_help_panel=LOAD)
    ] = None,
    duration_s: Annotated[
        float | None, typer.Option(help="Send nothing new after so long.", rich_help_panel=LOAD)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Azure CSV, Mooncake JSONL or Vidur CSV, plain or .gz.", rich_help_panel=LOAD),
    ] = None,
    trace_scale: Annotated[
        float, typer.Option(help="Replay the trace's arrivals so many times as fast.", rich_help_panel=LOAD)
    ] = 1.0,
    warmup: Annotated[
        int, typer.Option(help="Requests sent before, not measured.", rich_help_panel=LOAD)
    ] = 0,
    max_in_flight: Annotated[
        int, typer.Option(help="Open loop: arrivals beyond it fail.", rich_help_panel=LOAD)
    ] = 4096,
    prompt_tokens: Annotated[
        str, typer.Option(help="N, LOW:HIGH or lognormal:MEDIAN:SIGMA:LOW:HIGH.", rich_help_panel=WORK)
    ] = "128",
    output_tokens: Annotated[str, typer.Option(help="Like --prompt-tokens.", rich_help_panel=WORK)] = "64",
    workload: Annotated[
        str | None,
        typer.Option(
            help="lpld | lphd | hpld | hphd | mixed: light or heavy prefill and decode; picks among a "
            "trace's rows.",
            rich_help_panel=WORK,
        ),
    ] = None,
    length_scale: Annotated[
        float,
        typer.Option(help="Multiply a workload's lengths, for another context.", rich_help_panel=WORK),
    ] = 1.0,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Directory with tokenizer.json: prompts are text, not token ids.", rich_help_panel=WORK
        ),
    ] = None,
    context_tokens: Annotated[
        int | None, typer.Option(help="Cut requests to it (what the server tells).", rich_help_panel=WORK)
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Same seed, same prompts and arrivals.", rich_help_panel=WORK)
    ] = 0,
    temperature: Annotated[float, typer.Option(rich_help_panel=WORK)] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for outputs of exact length.", rich_help_panel=WORK)
    ] = True,
    extra_body: Annotated[
        str | None, typer.Option(help="JSON object merged into every request.", rich_help_panel=WORK)
    ] = None,
    background_concurrency: Annotated[
        int | None,
        typer.Option(help="Streams that decode all the time, reported apart.", rich_help_panel=BACKGROUND),
    ] = None,
    background_prompt_tokens: Annotated[
        str, typer.Option(help="Like --prompt-tokens.", rich_help_panel=BACKGROUND)
    ] = "128",
    background_output_tokens: Annotated[
        str, typer.Option(help="Like --prompt-tokens.", rich_help_panel=BACKGROUND)
    ] = "512",
    slo: Annotated[
        str | None,
        typer.Option(help="Seconds: ttft=0.5,tpot=0.1; also tbt, e2e.", rich_help_panel=JUDGE),
    ] = None,
    stream_tokens_check: Annotated[
        bool,
        typer.Option(help="A response of another length than asked for has failed.", rich_help_panel=JUDGE),
    ] = True,
    request_timeout_s: Annotated[float, typer.Option(rich_help_panel=JUDGE)] = 600.0,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write configuration and figures.", rich_help_panel=OUTPUT)
    ] = None,
    json_requests: Annotated[
        bool, typer.Option("--json-requests", help="… and every request.", rich_help_panel=OUTPUT)
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the distributions (.png, .svg, .pdf).", rich_help_panel=OUTPUT)
    ] = None,
) -> None:
    """Measure any OpenAI-compatible server: latency percentiles, throughput, goodput.

    The key is read from OPENAI_API_KEY.

    Interference (p99 gap of four decoding streams while a long prompt arrives each second):
    lamella bench --rate 1 --arrivals fixed --requests 30 --prompt-tokens 1024 --output-tokens 1
    --background-concurrency 4
    """
    from rich.console import Console

    from services.bench.config import BenchConfig, parse_objectives
    from services.bench.lengths import parse_length
    from services.launcher.local import local_url

    console = Console(stderr=True)
    try:
        _check_outputs(json_path, plot)
        config = BenchConfig(
            model=model,
            endpoint=endpoint,
            rate_per_s=rate,
            concurrency=concurrency,
            arrivals=arrivals,
            burstiness=burstiness,
            requests=requests,
            duration_s=duration_s,
            prompt=parse_length("--prompt-tokens", prompt_tokens),
            output=parse_length("--output-tokens", output_tokens),
            workload=workload,
            length_scale=length_scale,
            trace=trace,
            trace_scale=trace_scale,
            background=_read_background(
                background_concurrency, background_prompt_tokens, background_output_tokens
            ),
            objectives=None if slo is None else parse_objectives(slo),
            seed=seed,
            warmup=warmup,
            context_tokens=context_tokens,
            tokenizer=tokenizer,
            ignores_eos=ignore_eos,
            checks_tokens=stream_tokens_check,
            temperature=temperature,
            extra_body=_read_extra_body(extra_body),
            request_timeout_s=request_timeout_s,
            most_in_flight=max_in_flight,
            url=url or local_url(state_dir),  # last: options that are wrong are wrong without a mesh too
        )
        run = _run(console, config)
    except ServiceError as exc:
        console.print("[bold red]error:[/]", end=" ")
        console.print(str(exc), highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(EXIT_BAD_USE) from exc
    _write(console, run, json_path, json_requests, plot)
    if run.result.loads[0].served == 0:
        raise typer.Exit(EXIT_NOTHING_SERVED)


def _check_outputs(json_path: Path | None, plot: Path | None) -> None:
    """A run of an hour must not end at a folder that is not there."""
    for path in (json_path, plot):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError("--json/--plot", str(path), "its folder must exist")
    if plot is not None and plot.suffix not in PLOT_SUFFIXES:
        raise ConfigError("--plot", str(plot), f"must end with {', '.join(PLOT_SUFFIXES)}")


def _read_background(
    concurrency: int | None, prompt_tokens: str, output_tokens: str
) -> "BackgroundLoad | None":
    from services.bench.config import BackgroundLoad
    from services.bench.lengths import parse_length

    if concurrency is None:
        return None
    return BackgroundLoad(
        concurrency,
        parse_length("--background-prompt-tokens", prompt_tokens),
        parse_length("--background-output-tokens", output_tokens),
    )


def _read_extra_body(text: str | None) -> tuple[tuple[str, object], ...]:
    if text is None:
        return ()
    try:
        fields = json.loads(text)
    except ValueError as exc:
        raise ConfigError("--extra-body", text, f"must be JSON: {exc}") from exc
    if not isinstance(fields, dict):
        raise ConfigError("--extra-body", text, "must be a JSON object")
    return tuple(fields.items())


def _run(console: "Console", config: "BenchConfig") -> "BenchRun":
    import uvloop

    return uvloop.run(_run_shown(console, config))


async def _run_shown(console: "Console", config: "BenchConfig") -> "BenchRun":
    """Run with a progress bar. The first Ctrl-C ends the run and reports it; a second one kills."""
    # Imported before the run: loading it while requests are due would make them late.
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    from services.bench.run import run_bench

    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
        console=console,
        # Its own refresh thread would take the lock that this loop needs; it is redrawn from here.
        auto_refresh=False,
        transient=True,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_once() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    loop.add_signal_handler(signal.SIGINT, stop_once)
    displays: set[asyncio.Task[None]] = set()
    api_key = os.environ.get("OPENAI_API_KEY")
    try:
        return await run_bench(
            config,
            api_key=api_key,
            stop=stop,
            on_start=lambda progress: displays.add(asyncio.create_task(_show(bar, progress))),
        )
    finally:
        for display in displays:
            display.cancel()
        await asyncio.gather(*displays, return_exceptions=True)
        loop.remove_signal_handler(signal.SIGINT)


async def _show(bar: "ProgressBar", progress: "RunProgress") -> None:
    """Redraw the progress bar until cancelled."""
    by_clock = progress.requests is None
    started_s = time.monotonic()
    with bar:
        task = bar.add_task(
            "measuring", total=progress.duration_s if by_clock else progress.requests, state=""
        )
        while True:
            record = progress.foreground
            bar.update(
                task,
                completed=time.monotonic() - started_s if by_clock else len(record.outcomes),
                state=f"{len(record.outcomes)} done, {record.in_flight} in flight, {record.failed} failed",
            )
            bar.refresh()
            await asyncio.sleep(REFRESH_S)


def _write(
    console: "Console", run: "BenchRun", json_path: Path | None, with_requests: bool, plot: Path | None
) -> None:
    from services.bench.report import print_report, write_json
    from services.printing import output_console

    print_report(output_console(), run.result)
    if json_path is not None:
        write_json(json_path, run, with_requests=with_requests)
        console.print(f"figures: {json_path}", highlight=False)
    if plot is not None:
        from services.bench.plot import write_plot

        write_plot(plot, run)
        console.print(f"picture: {plot}", highlight=False)
