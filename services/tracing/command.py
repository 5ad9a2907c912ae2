"""The ``trace`` command: records a running mesh, writes the timeline, says where time went."""

import asyncio
import math
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from common.config import MeshConfig
from common.config_file import load_config
from common.errors import ConfigError
from services.launcher.state_directory import DEFAULT_STATE_DIRECTORY
from services.output_files import check_writable, write_whole
from services.printing import output_console

if TYPE_CHECKING:
    from services.tracing.collect import MeshTrace
    from services.tracing.layout import Layout


def trace(
    duration_s: Annotated[float, typer.Option(help="Seconds to record; Ctrl-C ends it earlier.")] = 5.0,
    output: Annotated[Path, typer.Option(help="The timeline, for ui.perfetto.dev.")] = Path("trace.json"),
    svg: Annotated[Path | None, typer.Option(help="Also draw some decode steps into this file.")] = None,
    svg_steps: Annotated[int, typer.Option(help="How many of them.", min=1)] = 3,
    state_dir: Annotated[Path, typer.Option(help="Trace the mesh that runs there.")] = (
        DEFAULT_STATE_DIRECTORY
    ),
    config: Annotated[Path | None, typer.Option(help="Trace the mesh with these settings (TOML).")] = None,
    nats: Annotated[str | None, typer.Option(help="Trace the mesh over this NATS …")] = None,
    redis: Annotated[str | None, typer.Option(help="… and this Redis.")] = None,
) -> None:
    """Record a timeline of a running mesh: steps, layers, exchanges, transfers, queues, requests."""
    from common.tracing import MAX_DURATION_S
    from services.tracing.file import chrome_trace
    from services.tracing.layout import lay_out
    from services.tracing.picture import draw_steps
    from services.tracing.staggering import staggering_lines
    from services.tracing.summary import summarize, summary_table

    if not 0 < duration_s <= MAX_DURATION_S or math.isnan(duration_s):
        raise ConfigError("--duration-s", duration_s, f"must be above 0 and at most {MAX_DURATION_S:g}")
    mesh = mesh_of(state_dir, config, nats, redis)
    check_writable("--output", output)
    if svg is not None:
        check_writable("--svg", svg)
    messages = Console(stderr=True)
    with messages.status(f"recording for {duration_s:g} s"):
        layout = lay_out(asyncio.run(_record(mesh, duration_s)))
    content = chrome_trace(layout)
    write_whole("--output", output, content)
    output_console().print(summary_table(summarize(layout)))
    for line in staggering_lines(layout):
        print(line)
    for warning in warnings(layout):
        messages.print(warning, style="yellow", markup=False, highlight=False)
    print(f"{output}: {len(content) / 1e6:.1f} MB, open it in https://ui.perfetto.dev")
    if svg is not None:
        write_whole("--svg", svg, draw_steps(layout, svg_steps))


def warnings(layout: "Layout") -> list[str]:
    """What the timeline does not show, a line each."""
    said = [f"no record of {each.service_id}: {each.reason}" for each in layout.silent]
    for each in layout.services:
        if each.lost:
            said.append(
                f"{each.service.service_id}: the oldest {each.lost} records are lost; trace for less time"
            )
        if each.texts_lost:
            said.append(
                f"{each.service.service_id}: {each.texts_lost} records are without their requests' ids"
            )
    return said


async def _record(mesh: MeshConfig, duration_s: float) -> "MeshTrace":
    """The first Ctrl-C ends the recording, a second one the command."""
    from services.tracing.collect import collect_trace

    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    return await collect_trace(mesh, duration_s, stop)


def mesh_of(state_dir: Path, config: Path | None, nats: str | None, redis: str | None) -> MeshConfig:
    """Raises ConfigError, MeshNotRunning."""
    if (nats is None) != (redis is None):
        missing, given = ("--redis", "--nats") if redis is None else ("--nats", "--redis")
        raise ConfigError(missing, None, f"is needed beside {given}")
    if nats is not None and redis is not None:
        return msgspec.structs.replace(load_config(config).mesh, nats_url=nats, redis_url=redis)
    if config is not None:
        return load_config(config).mesh
    from services.launcher.local import mesh_config

    return mesh_config(state_dir).mesh
