"""Who is there: instances by their reports, gateways by the store, and whose bookings go with them.

Records under leases in the store say *what* an instance is, its load reports say *that* it lives. A silent
instance is gone after ``lease_s`` whatever the store says, and one whose process is seen to end at once. A
gateway sends no reports: only the store says that it has left.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from common.ids import GatewayId, InstanceId
from common.messages import (
    InstanceLife,
    InstanceRecord,
    KVLinkFailed,
    KVLinkWorks,
    LoadReport,
    MemberRecord,
    ServiceRecord,
)
from scheduler.bookings import Bookings
from scheduler.events import AnnounceGatewayGone, AnnounceInstanceGone, ReadMembers, SchedulerCommand
from scheduler.kv_links import KVLinks
from scheduler.learned_times import LearnedTimes
from scheduler.overdue import find_overdue
from scheduler.policy.grouping import Groups
from scheduler.views import InstanceView, Standing

STALE_AFTER_S = 5.0
"""A hand-over is in nobody's report for a moment. A booking of so long ago, on instances that both report no
work at all, is of a request whose end was never heard."""
SEEN_AFTER_S = 0.02
"""From a process's end until a scheduler looks whether it was one: until NATS has seen it, too, mostly."""
LOOK_S = 0.5
"""Between two looks at a booking of so long ago that still stands: instances report every change."""


@dataclass(slots=True)
class Membership:
    """``gateways`` maps to the time since which the store lacks the gateway's record; None: it is there.
    ``are_sequences_asked``: as ``InstanceView`` has it. ``ended``: lives that were seen to end, whose records
    the store has nevertheless for the rest of their leases. ``attention_seen_s``: when the store had
    attention workers, which keep the KV of instances that die."""

    lease_s: float
    instances: dict[InstanceId, InstanceView]
    bookings: Bookings
    groups: Groups
    links: KVLinks
    standing: Standing = field(default_factory=Standing)
    gateways: dict[GatewayId, float | None] = field(default_factory=dict)
    learned: LearnedTimes = field(default_factory=LearnedTimes)
    are_sequences_asked: bool = True
    ended: set[InstanceLife] = field(default_factory=set)
    attention_seen_s: float = float("-inf")

    def read(self, records: tuple[MemberRecord, ...], now: float) -> list[SchedulerCommand]:
        commands: list[SchedulerCommand] = []
        present: set[GatewayId] = set()
        if self.ended:
            self.ended &= {each.life for each in records if isinstance(each, InstanceRecord)}
        for record in records:
            match record:
                case ServiceRecord(kind="gateway"):
                    present.add(GatewayId(record.service_id))
                case ServiceRecord(kind="attention"):
                    self.attention_seen_s = now
                case InstanceRecord() if record.life not in self.ended:
                    view = self.instances.get(record.instance_id)
                    if view is None:
                        self._add(record, now)
                    elif view.record.incarnation == record.incarnation:
                        view.take_record(record)
                        self.groups.forget()
                    else:
                        commands.append(self._remove(view))
                        self._add(record, now)
                case _:
                    continue
        return commands + self._notice_absent_gateways(present, now)

    def has_attention(self, now: float) -> bool:
        """A store that was emptied, or was away, gives them a lease to re-assert themselves."""
        return now - self.attention_seen_s <= self.lease_s

    def tell_departed(self, lives: Iterable[InstanceLife]) -> list[SchedulerCommand]:
        """Of those who are not heard. They died while no scheduler lived that knew them."""
        commands: list[SchedulerCommand] = []
        for life in lives:
            view = self.instances.get(life.instance_id)
            if view is None or view.record.incarnation != life.incarnation:
                gone = AnnounceInstanceGone(life.instance_id, life.incarnation, is_former=True)
                commands.append(gone)
        return commands

    def end(self, life: InstanceLife) -> list[SchedulerCommand]:
        """Its process is no more. Should it report again it was not, and is a member as before."""
        view = self.instances.get(life.instance_id)
        if view is None or view.record.incarnation != life.incarnation:
            return []
        self.ended.add(life)
        return [self._remove(view)]

    def take_report(self, report: LoadReport, now: float) -> list[SchedulerCommand]:
        view = self.instances.get(report.instance_id)
        if view is None or view.record.incarnation != report.incarnation:
            self.ended.discard(InstanceLife(report.instance_id, report.incarnation))
            return [ReadMembers()]
        if view.report is not None and report.sequence <= view.report.sequence:
            return []
        if report.role != view.role:
            self.groups.forget()
        view.take_report(report, now)
        if now >= view.next_look_s and view.is_idle:
            self._forget_stale(view, now)
        return []

    def notice_silence(self, now: float) -> list[SchedulerCommand]:
        commands: list[SchedulerCommand] = []
        for view in list(self.instances.values()):
            if now - view.last_heard_s > self.lease_s:
                commands.append(self._remove(view))
        reported_s = now - max(STALE_AFTER_S, self.lease_s)
        self.links.forget_old(now)
        for request_id in find_overdue(self.bookings.requests, self.instances.values(), reported_s):
            self.bookings.drop(request_id)
        return commands

    def suspect(self, instance_id: InstanceId) -> None:
        """It did not answer: it is avoided until it is heard of."""
        if view := self.instances.get(instance_id):
            view.suspect()

    def hear_of_link(self, word: KVLinkFailed | KVLinkWorks, now: float) -> None:
        """Of instances that are gone nothing is kept."""
        if isinstance(word, KVLinkWorks):
            self.links.work(word.sender, word.receiver, now)
        elif word.sender in self.instances and word.receiver in self.instances:
            self.links.fail(word.sender, word.receiver, now)

    def excuse(self, now: float) -> None:
        """Nobody could be heard while the bus was away."""
        for view in self.instances.values():
            view.last_heard_s = now

    def _add(self, record: InstanceRecord, now: float) -> None:
        view = InstanceView(
            record,
            now,
            are_sequences_asked=self.are_sequences_asked,
            standing=self.standing,
            learned=self.learned.of(record.kind),
        )
        self.instances[record.instance_id] = view
        self.standing.changes += 1
        self.groups.forget()
        self.bookings.count_known(view)

    def _notice_absent_gateways(self, present: set[GatewayId], now: float) -> list[SchedulerCommand]:
        """A gateway is gone once successful reads have lacked it for a whole lease: a store that was
        emptied, or was away, gives it that long to re-assert itself. One that is only known by another
        scheduler's word of its requests may have gone before the first read."""
        for gateway_id in present:
            self.gateways[gateway_id] = None
        commands: list[SchedulerCommand] = []
        booked = {placed.gateway_id for placed in self.bookings.requests.values()}
        for gateway_id in (self.gateways.keys() | booked) - present:
            absent_since_s = self.gateways.get(gateway_id)
            if absent_since_s is None:
                self.gateways[gateway_id] = now
            elif now - absent_since_s > self.lease_s:
                commands.append(self._remove_gateway(gateway_id))
        return commands

    def _forget_stale(self, view: InstanceView, now: float) -> None:
        view.next_look_s = now + STALE_AFTER_S
        for request_id in list(view.placed):
            placed = self.bookings.requests[request_id]
            if placed.acknowledged_s is None:
                continue
            if now - placed.acknowledged_s <= STALE_AFTER_S:
                view.next_look_s = min(view.next_look_s, placed.acknowledged_s + STALE_AFTER_S)
                continue
            view.next_look_s = min(view.next_look_s, now + LOOK_S)
            decodes = self.instances.get(placed.placement.decode_instance)
            if decodes is not None and not decodes.is_idle:
                continue
            prefills = self.instances.get(placed.placement.prefill_instance)
            if prefills is None or prefills.is_idle:
                self.bookings.drop(request_id)

    def _remove(self, view: InstanceView) -> AnnounceInstanceGone:
        for request_id in list(view.placed):
            placed = self.bookings.requests[request_id]
            if placed.acknowledged_s is None:
                self.bookings.void(request_id)
            else:
                self.bookings.drop(request_id)
        del self.instances[view.instance_id]
        self.links.forget(view.instance_id)
        self.standing.changes += 1
        self.groups.forget()
        return AnnounceInstanceGone(view.instance_id, view.record.incarnation, view.is_leaving)

    def _remove_gateway(self, gateway_id: GatewayId) -> AnnounceGatewayGone:
        del self.gateways[gateway_id]
        for request_id, placed in list(self.bookings.requests.items()):
            if placed.gateway_id == gateway_id:
                self.bookings.drop(request_id)
        return AnnounceGatewayGone(gateway_id)
