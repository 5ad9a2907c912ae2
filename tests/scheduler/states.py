"""A scheduler's state, and what it hears of."""

from common.config import SchedulerConfig
from common.ids import Incarnation
from common.messages import (
    InstanceRecord,
    LoadReport,
    MemberRecord,
    Role,
    ServiceRecord,
)
from scheduler import events
from scheduler.state import SchedulerState
from tests.instance_records import make_record
from tests.load_reports import make_report
from tests.requests import GATEWAY

LEASE_S = 3.0
ROLES: dict[str, Role] = {"p": "prefill", "d": "decode", "m": "mixed"}


def make_state(max_pending: int = 1000, max_requests: int = 100) -> SchedulerState:
    settings = SchedulerConfig(
        max_pending_prefill_tokens=max_pending, max_requests_per_decode=max_requests, decisions_kept=8
    )
    return SchedulerState(lease_s=LEASE_S, settings=settings)


def record_of(
    name: str, role: Role, incarnation: str = "i1", total_blocks: int = 64, largest_pool_blocks: int = 64
) -> InstanceRecord:
    largest = min(total_blocks, largest_pool_blocks)
    return make_record(name, role, incarnation, total_blocks=total_blocks, largest_pool_blocks=largest)


def gateway_record(name: str = GATEWAY) -> ServiceRecord:
    return ServiceRecord(
        service_id=name, incarnation=Incarnation("g"), kind="gateway", host="h", pid=1, http_url=""
    )


def report_of(
    name: str,
    role: Role,
    sequence: int = 1,
    *,
    pending: int = 0,
    incarnation: str = "i1",
    draining: bool = False,
    total_blocks: int = 64,
    largest_pool_blocks: int = 64,
) -> LoadReport:
    return make_report(
        name,
        role,
        total_blocks,
        incarnation,
        sequence=sequence,
        is_draining=draining,
        pending_prefill_tokens=pending,
        largest_pool_blocks=min(total_blocks, largest_pool_blocks),
        prefill_tokens_per_s=100.0,
    )


def handle(
    state: SchedulerState, event: events.SchedulerStateEvent, now: float = 0.0
) -> list[events.SchedulerCommand]:
    commands = state.handle(event, now)
    state.check()
    return commands


def ready(state: SchedulerState, **pending: int) -> None:
    """Makes members p0, p1, …, d0, … and m0, … (mixed) known and heard of, with that many pending tokens."""
    records: list[MemberRecord] = [gateway_record()]
    for name in pending:
        records.append(record_of(name, ROLES[name[0]]))
    handle(state, events.MembersRead(tuple(records)))
    for name, tokens in pending.items():
        handle(state, events.LoadReported(report_of(name, ROLES[name[0]], pending=tokens)))
