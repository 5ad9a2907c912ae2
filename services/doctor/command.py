"""The ``doctor`` command: whether a mesh would run here, and what to do where it would not.

It changes nothing. With a mesh running in the state directory, or servers named, it asks those.
"""

from typing import Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from services.commands.options import ConfigOption, StateOption, messages
from services.doctor.findings import Finding
from services.launcher.state_directory import DEFAULT_STATE_DIRECTORY
from services.printing import output_console

MARKS = {
    "good": "[green]good[/green]",
    "note": "[yellow]note[/yellow]",
    "problem": "[bold red]PROBLEM[/bold red]",
}


def doctor(
    config: ConfigOption = None,
    state_dir: StateOption = DEFAULT_STATE_DIRECTORY,
    nats: Annotated[str | None, typer.Option(help="The one to use, by URL; default: the mesh's own.")] = None,
    redis: Annotated[str | None, typer.Option(help="Likewise.")] = None,
    port: Annotated[int, typer.Option(help="The gateway's port.", min=0, max=65_535)] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Check this machine and say what to do; exit status 1 where something would not work."""
    # Only here: it brings what services run on, which no other command should wait for.
    from services.doctor.examination import examine, planned

    plan = planned(config, state_dir, nats, redis, port)
    findings: list[Finding] = []
    with messages.status("examining") as status:
        for finding in examine(plan):
            findings.append(finding)
            status.update(f"examining: {finding.subject}")
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(findings)).decode())
    else:
        print_findings(findings)
    raise typer.Exit(any(finding.verdict == "problem" for finding in findings))


def print_findings(findings: list[Finding]) -> None:
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        table.add_row(MARKS[finding.verdict], finding.subject, escape(finding.seen))
        if finding.advice is not None:
            table.add_row("", "", f"[bold]→[/bold] {escape(finding.advice)}")
    console = output_console()
    console.print(table, highlight=False)
    problems = sum(finding.verdict == "problem" for finding in findings)
    if problems:
        console.print(f"\n{problems} of {len(findings)} would keep lamella from working", style="bold red")
    else:
        console.print("\nnothing here keeps lamella from working", style="bold green")
