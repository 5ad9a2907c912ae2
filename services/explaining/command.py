"""The ``explain`` command: why a request went where it went."""

import asyncio
import urllib.parse
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer
from rich.table import Table

from common.config import MeshConfig
from common.errors import LauncherError
from common.messages import ServiceRecord
from scheduler.decision_log import Choice, Decision, Former
from scheduler.regret import RegretReport
from services.asking import NoAnswer, ask_service
from services.explaining.policies import add_up_regrets, print_regrets
from services.launcher.state_directory import DEFAULT_STATE_DIRECTORY
from services.members import members_of
from services.printing import output_console
from services.tracing.command import mesh_of

Answer = TypeVar("Answer")

TOLD_WAIT_S = 0.1
"""Less is the way to an instance."""


def explain(
    request: Annotated[
        str | None, typer.Argument(help="The id of an answer, chatcmpl-… or cmpl-…; without: the newest.")
    ] = None,
    newest: Annotated[int, typer.Option(help="How many of the newest.", min=1, max=1000)] = 1,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="Also how few instances each scheduler's newest need, had they come at once."
        ),
    ] = False,
    service_class: Annotated[str | None, typer.Option("--class", help="Of that class of service.")] = None,
    instance: Annotated[str | None, typer.Option(help="Those for which it was looked at.")] = None,
    policies: Annotated[
        bool, typer.Option("--policies", help="What every policy would have cost instead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    state_dir: Annotated[Path, typer.Option(help="Of the mesh that runs there.")] = DEFAULT_STATE_DIRECTORY,
    config: Annotated[Path | None, typer.Option(help="Of the mesh with these settings (TOML).")] = None,
) -> None:
    """Show where a request was placed: every candidate, its score, and what spoke against it."""
    mesh = mesh_of(state_dir, config, None, None)
    schedulers = asyncio.run(_schedulers(mesh))
    if policies:
        _explain_policies(schedulers.values(), as_json)
        return
    wanted = {"newest": newest, "class": service_class, "instance": instance}
    query = urllib.parse.urlencode({key: value for key, value in wanted.items() if value is not None})
    path = f"/decisions?{query}" if request is None else f"/decisions/{request.split('-', 1)[-1]}"
    found = [
        (scheduler, each)
        for scheduler, url in schedulers.items()
        for each in _ask(url + path, list[Decision]) or ()
    ]
    if request is None:
        found = sorted(found, key=lambda each: -each[1].at_s)[:newest]
    decisions = [decision for _, decision in found]
    if not decisions:
        what = _name_what_was_asked(request, service_class, instance)
        rule = "scheduler.decisions_kept bounds how many are, and one that began anew knows none of before"
        raise LauncherError(f"no scheduler remembers {what}: {rule}")
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(decisions)).decode())
        return
    for decision in decisions:
        _print(decision)
    if exact:
        # The solver takes a second to import, which nobody else should wait for.
        from services.explaining.exactness import describe_each

        made = {name: [each for scheduler, each in found if scheduler == name] for name in schedulers}
        for line in describe_each(made):
            output_console(has_markup=False).print(line, highlight=False, soft_wrap=True)


def _name_what_was_asked(request: str | None, service_class: str | None, instance: str | None) -> str:
    if request is not None:
        return request
    of_class = f" of class {service_class}" if service_class else ""
    looked_at = f" for which {instance} was looked at" if instance else ""
    return f"any request{of_class}{looked_at}"


async def _schedulers(mesh: MeshConfig) -> dict[str, str]:
    """Their URLs, by id."""
    members = await members_of(mesh)
    services = [each for each in members if isinstance(each, ServiceRecord)]
    return {each.service_id: each.http_url for each in services if each.kind == "scheduler"}


def _explain_policies(urls: Iterable[str], as_json: bool) -> None:
    reports = [each for url in urls if (each := _ask(f"{url}/regret", RegretReport)) is not None]
    if not reports:
        raise LauncherError("no scheduler answers")
    report = add_up_regrets(reports)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print_regrets(report)


def _ask(url: str, kind: type[Answer]) -> Answer | None:
    """None where that scheduler knows nothing, or is gone."""
    try:
        return ask_service(url, kind)
    except NoAnswer:
        return None


def _print(decision: Decision) -> None:
    console = output_console(has_markup=False)
    console.print(title_of(decision), highlight=False)
    if decision.waited_s >= TOLD_WAIT_S:
        console.print(wait_of(decision), highlight=False, soft_wrap=True)
    if decision.former:
        console.print(before_of(decision), highlight=False, soft_wrap=True)
    for choice in decision.choices:
        console.print(headline_of(decision, choice), highlight=False, soft_wrap=True)
        console.print(_table(choice))


def title_of(decision: Decision) -> str:
    """What was decided about. Of a stream that goes on elsewhere what it has drawn is computed again."""
    before = f" and {decision.drawn_tokens} drawn before" if decision.drawn_tokens else ""
    return (
        f"request {decision.request_id}, attempt {decision.attempt}:"
        f" {decision.prompt_tokens - decision.drawn_tokens} prompt tokens{before},"
        f" {decision.predicted_tokens:.0f} predicted to be drawn, {_outcome(decision)};"
        f" class {decision.service_class}"
    )


def _outcome(decision: Decision) -> str:
    if decision.output_tokens is not None:
        return f"{decision.output_tokens} drawn"
    if _is_refused(decision):
        return "refused"
    return "over before its own end" if decision.is_over else "not over yet"


def _is_refused(decision: Decision) -> bool:
    return any(decision.taken(choice.phase) is None for choice in decision.choices)


def wait_of(decision: Decision) -> str:
    """Of an attempt that found nobody at first, or waited for its turn."""
    return f"waited {decision.waited_s:.1f} s until it was {'refused' if _is_refused(decision) else 'placed'}"


def before_of(decision: Decision) -> str:
    """Where it was to be before."""
    return f"before: {', then '.join(_place_of(each, decision.attempt) for each in decision.former)}"


def _place_of(former: Former, attempt: int) -> str:
    """Of the same attempt it is told so: a late binding, a refusal or a move is no failure, nor is a decode
    instance by itself, where it turned out that nobody has kept the sequence's KV."""
    instances = " and ".join(dict.fromkeys(filter(None, (former.prefill, former.decode))))
    when = "of the same attempt" if former.attempt == attempt else f"attempt {former.attempt}"
    if former.prefill is None and former.attempt == attempt:
        when = f"asked whether its KV was kept, {when}"
    return f"{instances} ({when})"


def headline_of(decision: Decision, choice: Choice) -> str:
    """What is measured is of all that the request drew, also where it was before."""
    what, measured_s = ("TTFT", decision.ttft_s) if choice.phase == "prefill" else ("TPOT", decision.tpot_s)
    told = [f"{choice.phase}: {choice.policy}"]
    if choice.predicted_s is not None:
        told.append(f"{what} predicted {1e3 * choice.predicted_s:.1f} ms")
    if measured_s is not None:
        whose = " of the whole request" if decision.attempt or decision.former else ""
        told.append(f"{what}{whose} measured {1e3 * measured_s:.1f} ms")
    return ", ".join(told)


def _table(choice: Choice) -> Table:
    table = Table(caption=choice.reason)
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
    for barred in choice.barred:
        table.add_row(barred.instance_id, "", f"no candidate: {barred.reason}")
    return table
