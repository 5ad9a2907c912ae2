"""What ``lamella top`` shows: ``/api/mesh`` and ``/api/latency`` of a gateway's private port, as tables."""

from datetime import datetime
from itertools import groupby

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from common.ids import counted_order
from common.latency import Distribution
from gateway.private.latency_view import ClassLatency, LatencyView
from gateway.private.mesh_view import ROLES, InstanceView, MeshView, ServiceView

KV_BAR_WIDTH = 6
UNKNOWN = "-"
BETWEEN = (0, 1, 0, 0)
"""Of columns, so that all fit into the 80 characters that terminals begin with."""
STATE_STYLES = {"ready": "green", "draining": "yellow", "no_workers": "red", "silent": "red"}


def screen(mesh: MeshView, latency: LatencyView) -> Group:
    """The mesh as one gateway sees it, and what that gateway's clients saw of it within the last minute."""
    parts: list[RenderableType] = [_head(mesh), "", _latency_table(latency), "", _instance_table(mesh)]
    if mesh.links:
        parts += ["", _link_table(mesh)]
    wanted = [each for each in mesh.plan.counts if each.desired != each.current] if mesh.plan else []
    parts += [
        Text(f"the scheduler wants {each.desired} {each.service}, not {each.current}: {each.reason}")
        for each in wanted
    ]
    return Group(*parts)


def _head(mesh: MeshView) -> Text:
    """Who looks, who else is there, and what cannot be known."""
    at = datetime.fromtimestamp(mesh.at_unix_s).strftime("%H:%M:%S")
    head = Text.assemble((mesh.model, "bold"), f", seen by {mesh.gateway} at {at}")
    for kind, services in groupby(mesh.services, key=lambda each: each.kind):
        names = ", ".join(_name_of(each, mesh) for each in services)
        head.append(f"\n{kind}: {names}")
    if not mesh.is_bus_connected:
        head.append("\nNATS does not answer: loads are old", "bold red")
    if not mesh.is_store_answering:
        head.append("\nRedis does not answer: members are old", "bold red")
    return head


def _name_of(service: ServiceView, mesh: MeshView) -> str:
    if service.state == "draining":
        return f"{service.id} (draining)"
    leads = mesh.leader is not None and mesh.leader.id == service.id
    return f"{service.id} (leads)" if leads else service.id


def _latency_table(latency: LatencyView) -> Table:
    """Of requests that ended, all and by class of service: how many were ``kept`` as promised, the tokens
    that they drew, and the median beside the tails. What goes to clients now is of open ones, too."""
    title = (
        f"ended in the last {latency.window_s:.0f} s; {latency.open_requests} requests open now,"
        f" {latency.tokens_per_s:.1f} output tokens/s now"
    )
    table = Table(box=None, padding=BETWEEN, title=title, title_justify="left")
    table.add_column("class", no_wrap=True)
    for column in ("ended", "kept", "kept/s", "output\ntokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("TTFT/ms", "p90", "p99", "TPOT/ms", "p90", "p99"):
        table.add_column(column, justify="right", no_wrap=True)
    _add_latency(table, latency.all)
    for each in latency.classes:
        if each.requests:
            _add_latency(table, each)
    return table


def _add_latency(table: Table, one: ClassLatency) -> None:
    table.add_row(
        one.service_class,
        str(one.requests),
        UNKNOWN if one.attainment is None else f"{one.attainment:.0%}",
        f"{one.goodput_requests_per_s:.2f}",
        f"{one.tokens_per_s:.1f}",
        *_percentiles(one.ttft_s),
        *_percentiles(one.tpot_s),
    )


def _percentiles(times: Distribution | None) -> tuple[str, str, str]:
    if times is None:
        return UNKNOWN, UNKNOWN, UNKNOWN
    return _milliseconds(times.p50_s), _milliseconds(times.p90_s), _milliseconds(times.p99_s)


def _instance_table(mesh: MeshView) -> Table:
    """In the order of a request's walk; at last who only holds KV for decode."""
    table = Table(box=None, padding=BETWEEN)
    for column in ("instance", "role", "state"):
        table.add_column(column, no_wrap=True)
    for column in ("queue", "run", "wait"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("KV", no_wrap=True)
    for column in ("", "prompt\ntokens/s", "step/ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in sorted(mesh.instances, key=lambda each: (ROLES.index(each.role), counted_order(each.id))):
        _add_instance(table, each)
    for worker in (each for each in mesh.services if each.kind == "attention"):
        load = (UNKNOWN, str(worker.running), UNKNOWN, *_kv(worker.kv_used_tokens, worker.kv_total_tokens))
        table.add_row(worker.id, worker.kind, _state(worker.state), *load)
    return table


def _state(state: str) -> Text:
    return Text(state, STATE_STYLES[state])


def _kv(used: int, total: int) -> tuple[RenderableType, str]:
    """How full it is, as a bar and in words."""
    return (ProgressBar(total, used, KV_BAR_WIDTH), f"{used / total:.0%}") if total else (UNKNOWN, "")


def _add_instance(table: Table, instance: InstanceView) -> None:
    prefill_speed, step_s = instance.prefill_tokens_per_s, instance.decode_step_s
    is_home = instance.home == instance.role
    table.add_row(
        instance.id,
        instance.role if is_home else f"{instance.home} → {instance.role}",
        _state(instance.state),
        f"{instance.queue_tokens:,}",
        str(instance.running),
        str(instance.waiting),
        *_kv(instance.kv_used_tokens, instance.kv_total_tokens),
        UNKNOWN if prefill_speed is None else f"{prefill_speed:,.0f}",
        UNKNOWN if step_s is None else _milliseconds(step_s),
    )


def _link_table(mesh: MeshView) -> Table:
    """The busiest first."""
    table = Table("KV", box=None, padding=BETWEEN)
    table.add_column("MB/s", justify="right")
    for each in sorted(mesh.links, key=lambda each: -each.bytes_per_s):
        table.add_row(f"{each.source} → {each.target}", f"{each.bytes_per_s / 1e6:,.2f}")
    return table


def _milliseconds(time_s: float) -> str:
    return f"{1e3 * time_s:.3g}" if time_s < 0.1 else f"{1e3 * time_s:.0f}"
