"""What the store says of a mesh: its members, who leads, what is planned. A store that is away says nothing,
which is logged: whoever looks is to go on."""

import logging
from collections.abc import Mapping
from urllib.parse import urlsplit

from common.errors import StoreError
from common.ids import counted_order
from common.messages import InstanceRecord, MemberRecord, ServiceRecord
from common.scaling import DesiredCounts
from common.store import Store
from services.launcher.children import Child
from services.launcher.control import LeaderStatus, ProcessStatus

log = logging.getLogger("lamella.supervisor")


async def read_records(store: Store) -> dict[str, MemberRecord]:
    """By id."""
    try:
        members = await store.members()
    except StoreError as exc:
        log.warning("members_unread", extra={"error": str(exc)})
        return {}
    return {
        record.instance_id if isinstance(record, InstanceRecord) else record.service_id: record
        for record in members
    }


async def read_leader(store: Store) -> LeaderStatus | None:
    try:
        leader = await store.leader()
    except StoreError as exc:
        log.warning("leader_unread", extra={"error": str(exc)})
        return None
    return None if leader is None else LeaderStatus(leader.service_id, leader.epoch)


async def read_plan(store: Store) -> DesiredCounts | None:
    try:
        return await store.read_plan()
    except StoreError as exc:
        log.warning("plan_unread", extra={"error": str(exc)})
        return None


def private_url_of(records: Mapping[str, MemberRecord]) -> str | None:
    """The first gateway's, where it is now: begun anew, it may have found its port taken."""
    services = [records[name] for name in sorted(records, key=counted_order)]
    urls = [each.private_url for each in services if isinstance(each, ServiceRecord)]
    return next(filter(None, urls), None)


def process_status(child: Child, shown: str, records: Mapping[str, MemberRecord]) -> ProcessStatus:
    record = records[child.service_id] if is_registered(child, records) else None
    return ProcessStatus(
        child.service_id,
        child.role,
        child.pid,
        shown,
        child.restarts,
        None if record is None else record.http_url,
        record.private_url if isinstance(record, ServiceRecord) else None,
    )


def keep_ports(child: Child, record: MemberRecord) -> None:
    """Of a gateway: where it is now it is found again after it has died, though it was free to choose."""
    if not isinstance(record, ServiceRecord) or record.kind != "gateway":
        return
    urls = {"LAMELLA_PORT": record.http_url, "LAMELLA_PRIVATE_PORT": record.private_url}
    ports = {variable: str(urlsplit(url).port) for variable, url in urls.items() if url is not None}
    child.environment = {**child.environment, **ports}


def home_of(child: Child, record: InstanceRecord | None) -> str:
    """The role that an instance goes back to, which may have been flipped since its process began, or any
    other process's own."""
    return child.role if record is None else record.home or record.role


def record_of(child: Child, records: Mapping[str, MemberRecord]) -> InstanceRecord | None:
    """Of an instance; not its former process's."""
    record = records.get(child.service_id)
    return record if isinstance(record, InstanceRecord) and record.pid == child.pid else None


def is_registered(child: Child, records: Mapping[str, MemberRecord]) -> bool:
    record = records.get(child.service_id)
    return record is not None and record.pid == child.pid
