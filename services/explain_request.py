"""The ``explain`` command: why a request went where it went."""

import asyncio
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from common.config import MeshConfig
from common.errors import LauncherError
from common.messages import ServiceRecord
from scheduler.decision_log import Choice, Decision
from services.members import members_of
from services.state_directory import DEFAULT_STATE_DIRECTORY
from services.trace import mesh_of

TIMEOUT_S = 5.0


def explain(
    request: Annotated[
        str | None, typer.Argument(help="The id of an answer, chatcmpl-… or cmpl-…; without: the newest.")
    ] = None,
    newest: Annotated[int, typer.Option(help="How many of the newest.", min=1, max=1000)] = 1,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Also how few instances the newest need, had they come at once."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    state_dir: Annotated[Path, typer.Option(help="Of the mesh that runs there.")] = DEFAULT_STATE_DIRECTORY,
    config: Annotated[Path | None, typer.Option(help="Of the mesh with these settings (TOML).")] = None,
) -> None:
    """Show where a request was placed: every candidate, its score, and what spoke against it."""
    mesh = mesh_of(state_dir, config, None, None)
    path = f"/decisions?newest={newest}" if request is None else f"/decisions/{request.split('-', 1)[-1]}"
    found = [decision for url in asyncio.run(_scheduler_urls(mesh)) for decision in _ask(url + path)]
    if not found:
        raise LauncherError(
            f"no scheduler remembers {request or 'any request'}: scheduler.decisions_kept bounds how many are"
        )
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    for decision in found:
        _print(decision)
    if exact:
        # The solver takes a second to import, which nobody else should wait for.
        from services.exactness import describe_exactness

        Console().print(describe_exactness(found), highlight=False)


async def _scheduler_urls(mesh: MeshConfig) -> list[str]:
    members = await members_of(mesh)
    return [each.http_url for each in members if isinstance(each, ServiceRecord) and each.kind == "scheduler"]


def _ask(url: str) -> list[Decision]:
    """None where that scheduler knows nothing, or is gone."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return msgspec.json.decode(response.read(), type=list[Decision])
    except (urllib.error.URLError, OSError):
        return []


def _print(decision: Decision) -> None:
    console = Console()
    drawn = "not over yet" if decision.output_tokens is None else f"{decision.output_tokens} drawn"
    console.print(
        f"request {decision.request_id}, attempt {decision.attempt}: {decision.prompt_tokens} prompt tokens,"
        f" {decision.predicted_tokens:.0f} predicted to be drawn, {drawn}",
        highlight=False,
    )
    for phase, choice in zip(("prefill", "decode"), decision.choices[-2:], strict=False):
        console.print(_table(phase if len(decision.choices) > 1 else "decode", choice))


def _table(phase: str, choice: Choice) -> Table:
    table = Table(title=f"{phase}: {choice.policy}", title_justify="left", caption=choice.reason)
    for column in ("instance", "score", ""):
        table.add_column(column)
    for each in sorted(choice.candidates, key=lambda each: (each.refusal is not None, each.score)):
        is_taken = each.instance_id == choice.taken
        said = "taken" if is_taken else ""
        reason = each.refusal or each.note or ""
        table.add_row(
            each.instance_id,
            f"{each.score:.6g}",
            ", ".join(filter(None, (said, reason))),
            style="bold" if is_taken else None,
        )
    return table
