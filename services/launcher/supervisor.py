"""What keeps a local mesh's processes: embedded servers, scheduler, gateway, instances, attention workers.

Order of start: servers, then services, so many at a time as the machine can start. Order of stop: who never
was ready, and gateways (their streams end), then scheduler and instances, servers last. The supervisor takes
part in nothing a request does; when it is killed, the kernel ends its children.
"""

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from common.config import Config
from common.config_file import to_toml
from common.errors import LauncherError
from common.ids import counted_order
from common.messages import InstanceRecord, MemberRecord
from common.scaling import ScaledRole
from common.store import Store
from services.launcher import control, embedded
from services.launcher.children import Child
from services.launcher.embedded import last_words
from services.launcher.launch_plan import (
    ROLES,
    SCALED_ROLES,
    STOP_GRACE_S,
    LaunchPlan,
    check_counts,
    child_environment,
)
from services.launcher.memory import available_memory_bytes, check_memory
from services.launcher.probes import until
from services.launcher.readiness import count_open_requests, wait_gateway, wait_known, wait_served
from services.launcher.records import (
    home_of,
    is_registered,
    keep_ports,
    private_url_of,
    process_status,
    read_leader,
    read_plan,
    read_records,
    record_of,
)
from services.launcher.state_directory import StateDirectory, identify, write_private
from services.launcher.wishes import (
    RoleChange,
    Wishes,
    check_phases,
    check_possible,
    check_wishes,
    wanted_counts,
)

log = logging.getLogger("lamella.supervisor")

MAX_FAILED_STARTS = 2
"""Of a new instance, before scaling up gives up on it."""
FEWEST_STARTS = 4
"""At a time, also on fewer cores: the usual mesh has four services, which find each other sooner."""
MOST_NAMED = 4
"""Of those that are waited for, in a message."""
UNREADY_GRACE_S = 2.0
"""Of a process that was never ready: it has no request."""
SERVER_GRACE_S = 5.0
SERVER_ROLES = ("nats", "redis")


@dataclass(slots=True)
class Supervisor:
    """``children`` is every process, by service id, in the order of their start."""

    state: StateDirectory
    plan: LaunchPlan
    config: Config
    store: Store
    tasks: asyncio.TaskGroup
    id_suffix: str
    children: dict[str, Child] = field(default_factory=dict)
    has_launched: bool = False
    is_stopping: bool = False
    url: str | None = None
    _starts: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(starts_at_a_time()))
    _scaling: asyncio.Lock = field(default_factory=asyncio.Lock)
    _leaving: set[str] = field(default_factory=set)
    _registered: set[int] = field(default_factory=set)

    async def launch(self) -> None:
        """Starts every service and returns when the mesh serves. Raises LauncherError, with a log's end."""
        predictors = int(self.config.predictor.kind != "none")
        for role, count in (
            ("scheduler", self.plan.schedulers),
            ("gateway", 1),
            ("predictor", predictors),
            ("attention", self.plan.attention),
        ):
            self._add_services(role, count)
        self._add_services("prefill", self.plan.prefill)
        self._add_services("decode", self.plan.decode)
        self._add_services("mixed", self.plan.mixed)
        await self._wait_registered(set(self.children) - set(SERVER_ROLES))
        await wait_known(self.store, self._instances("scheduler"))
        self.url = await wait_gateway(self.store, self._instances("gateway"))
        plan = self.plan
        if plan.mixed or (plan.prefill and plan.decode):
            await wait_served(self.store, self.url, self.config.gateway)
        self.has_launched = True

    async def carry_out(self, command: control.Command) -> control.MeshStatus:
        match command:
            case control.Scale(wishes, is_forced):
                changes = await self.scale(wishes, is_forced=is_forced)
                return msgspec.structs.replace(await self.status(), changes=changes)
            case control.Drain(service_id, is_forced):
                await self.drain(service_id, is_forced=is_forced)
        return await self.status()

    async def scale(self, wishes: Wishes, *, is_forced: bool = False) -> list[RoleChange]:
        """By home role: whose role a policy has changed for a while is there nevertheless. Returns when new
        processes are ready and surplus ones have drained."""
        check_wishes(wishes)
        async with self._scaling:
            self._check_ready()
            records = await read_records(self.store)
            present = {role: self._present(role, records) for role in wishes}
            counts = wanted_counts(wishes, {role: len(present[role]) for role in wishes})
            check_possible(counts, self.plan, self.config)
            more = {role: count - len(present[role]) for role, count in counts.items()}
            warning = check_memory(more, self.config, available_memory_bytes())
            surplus = [child for role, count in counts.items() for child in present[role][count:]]
            if not is_forced:
                added = [role for role, count in counts.items() if count > len(present[role])]
                self._check_phases(records, added, surplus)
            if warning is not None:
                log.warning("memory_may_not_do", extra={"why": warning})
            if "attention" in counts:
                self._configure_attention(counts["attention"])
            changes = []
            # Instances wait for all attention workers: their turn comes first.
            for role, count in sorted(counts.items(), key=lambda item: item[0] != "attention"):
                ended = tuple(child.service_id for child in present[role][count:])
                started = self._add_services(role, max(0, count - len(present[role])))
                changes.append(RoleChange(role, len(present[role]), count, tuple(sorted(started)), ended))
            await self._settle(changes)
            return changes

    async def drain(self, service_id: str, *, is_forced: bool = False) -> None:
        """Returns when the process has finished what it had and ended; none is started in its place. Does not
        wait for a scaling: one that never becomes ready is ended so."""
        self._check_ready()
        records = await read_records(self.store)
        child = self.children.get(service_id)
        if child is None or child.role in SERVER_ROLES or child.state == "stopping":
            raise LauncherError(f"no process {service_id} runs here that could be drained")
        home = home_of(child, record_of(child, records))
        role = next(each for each in SCALED_ROLES if each == home)
        left = {role: sum(each is not child for each in self._present(role, records))}
        check_counts(left)
        check_possible(left, self.plan, self.config)
        if not is_forced:
            self._check_phases(records, [], [child])
        if role == "attention":
            self._configure_attention(left[role])
        await self._remove(child)

    def _check_phases(
        self, records: Mapping[str, MemberRecord], added: list[ScaledRole], removed: list[Child]
    ) -> None:
        """By the roles that instances have now, those of other machines among them."""
        roles = {name: each.role for name, each in records.items() if isinstance(each, InstanceRecord)}
        for role in ROLES:
            # Who is being restarted has no record for a while.
            roles = {child.service_id: role for child in self._instances(role)} | roles
        gone = self._leaving | {child.service_id for child in removed}
        gone |= {child.service_id for child in self.children.values() if child.state == "stopping"}
        left = [role for name, role in roles.items() if name not in gone]
        check_phases(roles.values(), [*left, *(role for role in ROLES if role in added)])

    def _check_ready(self) -> None:
        if not self.has_launched or self.is_stopping:
            raise LauncherError("the mesh is not ready: it can be scaled once it is")

    async def _settle(self, changes: list[RoleChange]) -> None:
        """Who was started becomes ready, and then who is to end drains: there are never fewer than there were
        or are to be. If somebody does not become ready, nothing has changed."""
        started = {name for change in changes for name in change.started}
        ended = {name for change in changes for name in change.ended}
        self._leaving |= ended
        try:
            await self._wait_registered(started)
            await wait_known(self.store, self._instances("scheduler"))
            await self._remove_all(ended)
        except LauncherError:
            await self._remove_all(started)
            raise
        finally:
            self._leaving -= ended

    def _present(self, role: ScaledRole, records: Mapping[str, MemberRecord]) -> list[Child]:
        """Those that are to stay, as far as anybody knows."""
        return [
            child
            for child in self.children.values()
            if child.state != "stopping"
            and child.service_id not in self._leaving
            and home_of(child, record_of(child, records)) == role
        ]

    def _configure_attention(self, workers: int) -> None:
        """Instances that start from now on find the new number of them."""
        self.plan = msgspec.structs.replace(self.plan, attention=workers)
        instance = msgspec.structs.replace(self.config.instance, attention_workers=workers)
        self.config = msgspec.structs.replace(self.config, instance=instance)
        write_private(self.state.config_file, to_toml(self.config).encode())

    async def status(self) -> control.MeshStatus:
        records = {} if self.is_stopping else await read_records(self.store)
        instances = {
            str(record.instance_id): control.InstanceStatus(
                record.instance_id, record.role, "ready", record.home
            )
            for record in records.values()
            if isinstance(record, InstanceRecord)
        }
        for role in ROLES:
            for child in self._instances(role):
                shown = self._shown(child, records)
                record = record_of(child, records)
                role_now, home = role if record is None else record.role, role
                if child.service_id in instances:
                    home = instances[child.service_id].home or role
                instances[child.service_id] = control.InstanceStatus(child.service_id, role_now, shown, home)
        processes = [
            process_status(child, self._shown(child, records), records) for child in self.children.values()
        ]
        state: control.MeshState = "ready" if self.has_launched else "starting"
        if self.is_stopping:
            state = "stopping"
        leader = None if self.is_stopping else await read_leader(self.store)
        is_planned = self.config.scaling.policy != "off" and not self.is_stopping
        plan = await read_plan(self.store) if is_planned else None
        return control.MeshStatus(
            state,
            self.url,
            # The store names them in any order.
            sorted(instances.values(), key=lambda each: (ROLES.index(each.role), counted_order(each.id))),
            processes,
            leader=leader,
            plan=plan,
            private_url=private_url_of(records),
            admin_key_file=str(self.config.gateway.admin_key_file),
        )

    def _shown(self, child: Child, records: Mapping[str, MemberRecord]) -> str:
        """Its state, as far as the store knows: a server that only runs is in no store."""
        if child.state != "running" or child.role in SERVER_ROLES:
            return child.state
        if is_registered(child, records):
            self._registered.add(records[child.service_id].pid)
            return "ready"
        # One that was there before is not starting: it hangs, or the store is away.
        return "unregistered" if child.pid in self._registered else "starting"

    async def count_open_requests(self) -> int:
        return await count_open_requests(self.store, self._instances("gateway"))

    def begin_stop(self) -> None:
        """Nothing is started any more, and who was never ready is told to end: what has requests needs the
        machine now."""
        self.is_stopping = True
        for child in self.children.values():
            if child.role not in SERVER_ROLES:
                child.retire()
                if not child.settled.is_set():
                    child.ask_to_end()

    async def stop(self, grace_s: float) -> None:
        """Ends everything in order; each step takes at most the drain and ``grace_s``."""
        self.begin_stop()
        drain_s = self.config.mesh.drain_timeout_s + grace_s
        services = [child for child in self.children.values() if child.role not in SERVER_ROLES]
        unready = [child for child in services if not child.settled.is_set()]
        gateways = [child for child in services if child.role == "gateway" and child.settled.is_set()]
        await asyncio.gather(
            *(child.stop(UNREADY_GRACE_S) for child in unready), *(child.stop(drain_s) for child in gateways)
        )
        await asyncio.gather(*(child.stop(drain_s) for child in services))
        await self.store.close()
        await asyncio.gather(*(self.children[name].stop(SERVER_GRACE_S) for name in self._servers()))

    def kill(self) -> None:
        """Ends everything at once."""
        self.is_stopping = True
        for child in self.children.values():
            child.kill()

    def add_server(self, server: embedded.EmbeddedServer) -> None:
        child = Child(server.name, server.name, server.command, {}, self.state.log_file(server.name))
        # All wait for it, and it for nobody.
        child.settled.set()
        self.keep(child)

    def _servers(self) -> list[str]:
        return [name for name in SERVER_ROLES if name in self.children]

    def _instances(self, role: str) -> list[Child]:
        return [child for child in self.children.values() if child.role == role]

    def _add_services(self, role: str, count: int) -> set[str]:
        added = set()
        for _ in range(count):
            service_id = self._free_id(role)
            # Gateways beside the first, which has the port, choose free ones.
            port = self.plan.port if service_id.startswith("gateway-0") else 0
            command = (*self.plan.command, role, "--config", str(self.state.config_file))
            environment = child_environment(self.config, service_id, port)
            self.keep(Child(service_id, role, command, environment, self.state.log_file(service_id)))
            added.add(service_id)
        return added

    def _free_id(self, role: str) -> str:
        """The lowest free number; on shared servers with a suffix, as other machines count there too."""
        number = 0
        while f"{role}-{number}{self.id_suffix}" in self.children:
            number += 1
        return f"{role}-{number}{self.id_suffix}"

    def keep(self, child: Child) -> None:
        """From its turn on until it is stopped."""
        self.children[child.service_id] = child
        self.tasks.create_task(child.keep(self._write_processes, lambda: self.has_launched))
        self.tasks.create_task(self._let_start(child))

    async def _let_start(self, child: Child) -> None:
        """In the order in which they were added: nobody is ready only after one that comes later."""
        async with self._starts:
            child.turn.set()
            await child.settled.wait()

    async def _remove_all(self, service_ids: Iterable[str]) -> None:
        """Of those that have not been drained meanwhile."""
        children = [self.children[name] for name in service_ids if name in self.children]
        await asyncio.gather(*(self._remove(child) for child in children))

    async def _remove(self, child: Child) -> None:
        drain_s = self.config.mesh.drain_timeout_s + STOP_GRACE_S
        await child.stop(drain_s if child.settled.is_set() else UNREADY_GRACE_S)
        # Two may have waited for its end, and its name may be another's by now.
        if self.children.get(child.service_id) is child:
            del self.children[child.service_id]
        self._write_processes()

    def _write_processes(self) -> None:
        own = identify("supervisor", "supervisor", os.getpid())
        alive = [child.identity for child in self.children.values() if child.identity is not None]
        try:
            self.state.write_processes([each for each in (own, *alive) if each is not None])
        except LauncherError as exc:
            # A full disk ends no mesh: the list is for cleaning up after a supervisor that was killed.
            log.warning("processes_unwritten", extra={"error": str(exc)})

    async def _wait_registered(self, service_ids: set[str]) -> None:
        """A service registers when it is ready to be used, so the store tells."""
        missing = set(service_ids)

        async def has_one_come() -> bool:
            before = len(missing)
            records = await read_records(self.store)
            for service_id in sorted(missing):
                child = self.children.get(service_id)
                if child is None or child.state == "stopping":
                    raise LauncherError(f"{service_id} was drained before it was ready")
                if is_registered(child, records):
                    self._registered.add(records[child.service_id].pid)
                    child.settled.set()
                    keep_ports(child, records[child.service_id])
                    missing.discard(child.service_id)
                elif child.restarts >= MAX_FAILED_STARTS:
                    raise LauncherError(f"{child.service_id} does not start:\n{last_words(child.log_file)}")
            return len(missing) < before

        while missing:
            await until(has_one_come, f"{_some_of(missing)} to register")


def starts_at_a_time() -> int:
    """As many as there are cores: more would be ready no sooner, and take the machine from what serves."""
    return max(FEWEST_STARTS, len(os.sched_getaffinity(0)))


def _some_of(names: set[str]) -> str:
    told, others = sorted(names)[:MOST_NAMED], len(names) - MOST_NAMED
    return ", ".join(told) + (f" and {others} others" if others > 0 else "")
