"""The process that keeps a local mesh: embedded servers, scheduler, gateway and instances.

Order of start: servers, then every service at once. Order of stop: gateway (its streams end), then scheduler
and instances, servers last. The supervisor takes part in nothing a request does; when it is killed, the
kernel ends its children.
"""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import uvloop

from common.cancellation import cancel_and_wait
from common.config import Config
from common.config_file import load_config, to_toml
from common.errors import ConfigError, LamellaError, LauncherError, StoreError
from common.logs import configure_logging
from common.messages import InstanceRecord, MemberRecord
from common.service import listen_to_signals
from common.store import Store
from services import control, embedded
from services.children import Child
from services.embedded import log_tail
from services.launch_plan import (
    ROLES,
    LaunchPlan,
    ScaledRole,
    check_counts,
    check_plan,
    child_environment,
    configured,
)
from services.probes import fetch, until
from services.state_directory import (
    StateDirectory,
    end_process,
    identify,
    locked,
    write_private,
)

log = logging.getLogger("lamella.supervisor")

OnReady = Callable[[control.MeshStatus], None]

FIRST_REQUEST = b'{"model": "default", "prompt": [1], "max_tokens": 2, "ignore_eos": true}'
MAX_ERROR_BODY = 300
FIRST_REQUEST_TIMEOUT_S = 60.0
MAX_FAILED_STARTS = 2
"""Of a new instance, before scaling up gives up on it."""
STOP_GRACE_S = 10.0
"""Beyond the drain, before a service is killed."""
SERVER_GRACE_S = 5.0
STORE_TRIES = 15
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
    _scaling: asyncio.Lock = field(default_factory=asyncio.Lock)
    _registered: set[int] = field(default_factory=set)

    async def launch(self) -> None:
        """Starts every service and returns when the mesh serves. Raises LauncherError, with a log's end."""
        for role, count in (("scheduler", 1), ("gateway", 1), ("attention", self.plan.attention)):
            self._add_services(role, count)
        self._add_services("prefill", self.plan.prefill)
        self._add_services("decode", self.plan.decode)
        await self._wait_registered(set(self.children) - set(SERVER_ROLES))
        await self._wait_known()
        await self._wait_gateway()
        await self._wait_served()
        self.has_launched = True

    async def carry_out(self, command: control.Command) -> control.MeshStatus:
        match command:
            case control.Scale(counts):
                await self.scale(counts)
        return await self.status()

    async def scale(self, counts: Mapping[ScaledRole, int]) -> None:
        """Returns when the new instances are ready and the surplus ones have drained."""
        check_counts(counts)
        self._check_attention(counts)
        async with self._scaling:
            if not self.has_launched or self.is_stopping:
                raise LauncherError("the mesh is not ready: it can be scaled once it is")
            started: set[str] = set()
            surplus: list[Child] = []
            for role, count in counts.items():
                present = self._instances(role)
                started |= self._add_services(role, max(0, count - len(present)))
                surplus += present[count:]
            try:
                await asyncio.gather(*(self._remove(child) for child in surplus))
                await self._wait_registered(started)
                await self._wait_known()
            except LauncherError:
                await asyncio.gather(*(self._remove(self.children[name]) for name in started))
                raise

    def _check_attention(self, counts: Mapping[ScaledRole, int]) -> None:
        """What attention workers allow. Instances that start from now on find the new number of them."""
        shares = self.config.attention.decode_instances
        if self.plan.attention and counts.get("decode", 0) > shares:
            raise LauncherError(
                f"decode = {counts['decode']}: the attention workers' memory is shared out among {shares}"
                " decode instances; start the mesh with more of them"
            )
        if "attention" not in counts:
            return
        if not self.plan.attention:
            raise LauncherError("this mesh was started without attention workers: `lamella up --attention N`")
        if self.config.instance.attention_partition == "heads":
            raise LauncherError(
                "each attention worker holds some KV heads of every sequence, so their number is fixed;"
                " `lamella up --partition requests` allows any number"
            )
        if counts["attention"] < 1:
            raise LauncherError("attention = 0: decode needs at least one attention worker")
        self.plan = msgspec.structs.replace(self.plan, attention=counts["attention"])
        instance = msgspec.structs.replace(self.config.instance, attention_workers=counts["attention"])
        self.config = msgspec.structs.replace(self.config, instance=instance)
        write_private(self.state.config_file, to_toml(self.config).encode())

    async def status(self) -> control.MeshStatus:
        records = {} if self.is_stopping else await self._records()
        instances = {
            str(record.instance_id): control.InstanceStatus(record.instance_id, record.role, "ready")
            for record in records.values()
            if isinstance(record, InstanceRecord)
        }
        for role in ROLES:
            for child in self._instances(role):
                shown: str = child.state
                if shown == "running":
                    # One that was there before is not starting: it hangs, or the store is away.
                    shown = "unregistered" if child.pid in self._registered else "starting"
                    if _is_registered(child, records):
                        shown = "ready"
                        self._registered.add(records[child.service_id].pid)
                instances[child.service_id] = control.InstanceStatus(child.service_id, role, shown)
        processes = [
            control.ProcessStatus(child.service_id, child.role, child.pid, child.state, child.restarts)
            for child in self.children.values()
        ]
        state: control.MeshState = "ready" if self.has_launched else "starting"
        if self.is_stopping:
            state = "stopping"
        return control.MeshStatus(state, self.url, list(instances.values()), processes)

    async def stop(self, grace_s: float) -> None:
        """Ends everything in order; each step takes at most the drain and ``grace_s``."""
        self.is_stopping = True
        drain_s = self.config.mesh.drain_timeout_s + grace_s
        services = [child for child in self.children.values() if child.role not in SERVER_ROLES]
        gateways = [child for child in services if child.role == "gateway"]
        await asyncio.gather(*(child.stop(drain_s) for child in gateways))
        await asyncio.gather(*(child.stop(drain_s) for child in services))
        await self.store.close()
        await asyncio.gather(*(self.children[name].stop(SERVER_GRACE_S) for name in self._servers()))

    def kill(self) -> None:
        """Ends everything at once."""
        self.is_stopping = True
        for child in self.children.values():
            child.kill()

    def add_server(self, server: embedded.EmbeddedServer) -> None:
        self._add(Child(server.name, server.name, server.command, {}, self.state.log_file(server.name)))

    def _servers(self) -> list[str]:
        return [name for name in SERVER_ROLES if name in self.children]

    def _instances(self, role: str) -> list[Child]:
        return [child for child in self.children.values() if child.role == role]

    def _add_services(self, role: str, count: int) -> set[str]:
        added = set()
        for _ in range(count):
            service_id = self._free_id(role)
            port = self.plan.port if role == "gateway" else 0
            command = (*self.plan.command, role, "--config", str(self.state.config_file))
            environment = child_environment(self.config, service_id, port)
            self._add(Child(service_id, role, command, environment, self.state.log_file(service_id)))
            added.add(service_id)
        return added

    def _free_id(self, role: str) -> str:
        """The lowest free number; on shared servers with a suffix, as other machines count there too."""
        number = 0
        while f"{role}-{number}{self.id_suffix}" in self.children:
            number += 1
        return f"{role}-{number}{self.id_suffix}"

    def _add(self, child: Child) -> None:
        self.children[child.service_id] = child
        self.tasks.create_task(child.keep(self._write_processes, lambda: self.has_launched))

    async def _remove(self, child: Child) -> None:
        await child.stop(self.config.mesh.drain_timeout_s + STOP_GRACE_S)
        del self.children[child.service_id]
        self._write_processes()

    def _write_processes(self) -> None:
        own = identify("supervisor", "supervisor", os.getpid())
        alive = [child.identity for child in self.children.values() if child.identity is not None]
        self.state.write_processes([each for each in (own, *alive) if each is not None])

    async def _records(self) -> dict[str, MemberRecord]:
        try:
            members = await self.store.members()
        except StoreError as exc:
            log.warning("members_unread", extra={"error": str(exc)})
            return {}
        return {
            record.instance_id if isinstance(record, InstanceRecord) else record.service_id: record
            for record in members
        }

    async def _wait_registered(self, service_ids: set[str]) -> None:
        """A service registers when it is ready to be used, so the store tells."""
        missing = set(service_ids)

        async def are_registered() -> bool:
            records = await self._records()
            for child in [self.children[service_id] for service_id in missing]:
                if _is_registered(child, records):
                    self._registered.add(records[child.service_id].pid)
                    missing.discard(child.service_id)
                elif child.restarts >= MAX_FAILED_STARTS:
                    raise LauncherError(f"{child.service_id} does not start:\n{log_tail(child.log_file)}")
            return not missing

        await until(are_registered, f"{', '.join(sorted(service_ids))} to register")

    async def _wait_known(self) -> None:
        """Returns when the scheduler has heard of every registered instance, so that it places on them."""
        records = await self._records()
        registered = sum(isinstance(record, InstanceRecord) for record in records.values())
        url = self._url_of("scheduler", records)

        async def are_known() -> bool:
            status, body = await fetch(f"{url}/metrics")
            known = re.search(rb"^lamella_instances (\S+)$", body, re.MULTILINE)
            return status == 200 and known is not None and float(known[1]) >= registered

        await until(are_known, f"the scheduler to know {registered} instances")

    async def _wait_gateway(self) -> None:
        """The gateway knows best whether it can serve."""
        url = self.url = self._url_of("gateway", await self._records())

        async def is_ready() -> bool:
            return (await fetch(f"{url}/health/ready"))[0] == 200

        await until(is_ready, f"{url}/health/ready")

    async def _wait_served(self) -> None:
        """Sends one small request through the whole mesh until nobody says that something is missing.

        The first user then finds every connection made, and no instance that was heard of but not from.
        """
        if self.url is None or not (self.plan.prefill and self.plan.decode):
            return
        url = f"{self.url}/v1/completions"

        async def is_served() -> bool:
            status, body = await fetch(url, FIRST_REQUEST, FIRST_REQUEST_TIMEOUT_S)
            if status not in (0, 200, 503):
                raise LauncherError(
                    f"{url} answered a first request with {status}: {body[:MAX_ERROR_BODY]!r}"
                )
            return status == 200

        await until(is_served, f"{url} to serve a first request")

    def _url_of(self, role: str, records: Mapping[str, MemberRecord]) -> str:
        for child in self._instances(role):
            if child.service_id in records:
                return records[child.service_id].http_url
        raise LauncherError(f"the {role}'s record is gone from the store")


def _is_registered(child: Child, records: Mapping[str, MemberRecord]) -> bool:
    record = records.get(child.service_id)
    return record is not None and record.pid == child.pid


async def supervise(state: StateDirectory, plan: LaunchPlan, config: Config, on_ready: OnReady) -> None:
    """Runs a mesh until SIGTERM or SIGINT; a second one kills it. Raises LauncherError, ConfigError."""
    check_plan(plan, config)
    state.create()
    with locked(state):
        for process in state.read_processes():
            end_process(process, grace_s=1.0)
        state.remove_files()
        try:
            await _supervise_locked(state, plan, config, on_ready)
        except BaseExceptionGroup as group:
            raise _first_reason(group) from group
        finally:
            state.remove_files()


async def _supervise_locked(
    state: StateDirectory, plan: LaunchPlan, config: Config, on_ready: OnReady
) -> None:
    _check_url("--nats", plan.nats_url, ("nats", "tls"))
    _check_url("--redis", plan.redis_url, ("redis", "rediss", "unix"))
    servers: list[embedded.EmbeddedServer] = []
    nats_url, redis_url = plan.nats_url, plan.redis_url
    if nats_url is None:
        servers.append(embedded.prepare_nats(state.path))
        nats_url = servers[-1].url
    if redis_url is None:
        servers.append(embedded.prepare_redis(state.path))
        redis_url = servers[-1].url
    mesh = msgspec.structs.replace(config.mesh, nats_url=nats_url, redis_url=redis_url)
    config = configured(msgspec.structs.replace(config, mesh=mesh), plan)
    write_private(state.config_file, to_toml(config).encode())
    stop, abort = listen_to_signals()
    async with asyncio.TaskGroup() as tasks:
        supervisor = Supervisor(
            state=state,
            plan=plan,
            config=config,
            store=Store(mesh.redis_url, mesh.namespace),
            tasks=tasks,
            # Other machines may count their instances in the same store.
            id_suffix="" if len(servers) == len(SERVER_ROLES) else f"-{secrets.token_hex(2)}",
        )
        killer = tasks.create_task(_kill_when(abort, supervisor))
        launch = tasks.create_task(_launch(supervisor, servers, on_ready))
        async with control.control_server(state.control_socket, supervisor.carry_out):
            try:
                await stop.wait()
            finally:
                await cancel_and_wait(launch)
                await supervisor.stop(STOP_GRACE_S)
                killer.cancel()


def _check_url(option: str, url: str | None, schemes: tuple[str, ...]) -> None:
    if url is not None and urlsplit(url).scheme not in schemes:
        raise ConfigError(option, url, f"must begin with {' or '.join(f'{each}://' for each in schemes)}")


async def _wait_store(store: Store) -> None:
    """A server that was given must be there; one of our own is known to answer."""
    for remaining in reversed(range(STORE_TRIES)):
        try:
            await store.connect()
        except StoreError as exc:
            if remaining == 0:
                raise LauncherError(str(exc)) from exc
            await asyncio.sleep(1.0)
        else:
            return


async def _launch(supervisor: Supervisor, servers: list[embedded.EmbeddedServer], on_ready: OnReady) -> None:
    for server in servers:
        supervisor.add_server(server)
    for server in servers:

        async def answers(server: embedded.EmbeddedServer = server) -> bool:
            return embedded.is_answering(server)

        await until(answers, f"{server.name} on port {server.port}")
    await _wait_store(supervisor.store)
    await supervisor.launch()
    log.info("mesh_ready", extra={"url": supervisor.url})
    on_ready(await supervisor.status())


async def _kill_when(abort: asyncio.Event, supervisor: Supervisor) -> None:
    await abort.wait()
    supervisor.kill()


def _first_reason(group: BaseExceptionGroup) -> BaseException:
    """The error that says what happened, rather than what followed from it."""
    reasons, others = group.split(LamellaError)
    error: BaseException = reasons or others or group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def main() -> int:
    """The detached supervisor: ``python -m services.supervisor DIRECTORY``, with plan and settings in it.

    One line on standard output says how it went: a MeshStatus when ready, else a Refused.
    """
    state = StateDirectory(Path(sys.argv[1]))
    configure_logging("supervisor")
    plan = msgspec.json.decode(state.plan_file.read_bytes(), type=LaunchPlan)
    config = load_config(state.config_file, environment={})

    def tell(answer: control.Answer) -> None:
        with contextlib.suppress(BrokenPipeError):  # whoever waited has been killed
            sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
            sys.stdout.flush()
        # Whoever waited may go away now; nothing else is ever written here.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    try:
        uvloop.run(supervise(state, plan, config, tell))
    except LamellaError as exc:
        log.error("mesh_failed", extra={"error": str(exc)})
        tell(control.Refused(str(exc)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
