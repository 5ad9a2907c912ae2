"""The process that keeps a local mesh, from its lock on the state directory to the last process's end.

In the foreground under ``lamella serve``, or detached: ``python -m services.launcher.supervise DIRECTORY``.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import uvloop

from common.cancellation import cancel_and_wait
from common.config import Config
from common.config_file import load_config, to_toml
from common.errors import LamellaError, LauncherError, StoreError, first_reason
from common.logs import configure_logging
from common.scaling import ScaledService
from common.signals import listen_to_signals
from common.store import Store
from services.launcher import control, embedded
from services.launcher.autoscale import FOLLOWING_LOAD, follow_plans
from services.launcher.launch_plan import STOP_GRACE_S, LaunchPlan, check_plan, configured
from services.launcher.places import check_places
from services.launcher.probes import until
from services.launcher.state_directory import StateDirectory, end_process, locked, write_private
from services.launcher.supervisor import SERVER_ROLES, Supervisor
from services.launcher.wishes import CountWish

log = logging.getLogger("lamella.supervisor")

OnReady = Callable[[control.MeshStatus], None]
OnStop = Callable[[int], None]
"""Told how many requests are open when the mesh begins to end."""

STORE_TRIES = 15


async def supervise(
    state: StateDirectory,
    plan: LaunchPlan,
    config: Config,
    on_ready: OnReady,
    on_stop: OnStop | None = None,
) -> None:
    """Runs a mesh until SIGTERM or SIGINT; a second one kills it. Raises LauncherError, ConfigError."""
    check_plan(plan, config)
    state.create()
    with locked(state):
        for process in state.read_processes():
            end_process(process, grace_s=1.0)
        state.remove_files()
        state.make_socket_directory()
        try:
            await _supervise_locked(state, plan, config, on_ready, on_stop)
        except BaseExceptionGroup as group:
            raise first_reason(group) from group
        finally:
            state.remove_files()


async def _supervise_locked(
    state: StateDirectory, plan: LaunchPlan, config: Config, on_ready: OnReady, on_stop: OnStop | None
) -> None:
    check_places(plan, config)
    with _own_servers(plan, state) as servers:
        urls = {server.name: server.url for server in servers}
        mesh = msgspec.structs.replace(
            config.mesh,
            nats_url=urls["nats"] if plan.nats_url is None else plan.nats_url,
            redis_url=urls["redis"] if plan.redis_url is None else plan.redis_url,
        )
        config = configured(msgspec.structs.replace(config, mesh=mesh), plan)
        await _supervise_servers(servers, state, plan, config, on_ready, on_stop)


@contextlib.contextmanager
def _own_servers(plan: LaunchPlan, state: StateDirectory) -> Iterator[list[embedded.EmbeddedServer]]:
    """Those that the plan names none of; their ports are kept, so that one that dies is back at its own."""
    with contextlib.ExitStack() as reserved:
        servers = []
        if plan.nats_url is None:
            servers.append(embedded.prepare_nats(state.path))
            reserved.enter_context(servers[-1].reservation)
        if plan.redis_url is None:
            servers.append(embedded.prepare_redis(state.path))
            reserved.enter_context(servers[-1].reservation)
        yield servers


async def _supervise_servers(
    servers: list[embedded.EmbeddedServer],
    state: StateDirectory,
    plan: LaunchPlan,
    config: Config,
    on_ready: OnReady,
    on_stop: OnStop | None,
) -> None:
    config = _with_admin_key(config, state)
    write_private(state.config_file, to_toml(config).encode())
    stop, abort = listen_to_signals()
    async with asyncio.TaskGroup() as tasks:
        supervisor = Supervisor(
            state=state,
            plan=plan,
            config=config,
            store=Store(config.mesh.redis_url, config.mesh.namespace),
            tasks=tasks,
            # Other machines may count their instances in the same store.
            id_suffix="" if len(servers) == len(SERVER_ROLES) else f"-{secrets.token_hex(2)}",
        )
        killer = tasks.create_task(_kill_when(abort, supervisor))
        launch = tasks.create_task(_launch(supervisor, servers, on_ready))
        async with control.control_server(state.control_socket, supervisor.carry_out):
            try:
                await stop.wait()
                if on_stop is not None:
                    tasks.create_task(_tell_of_stop(supervisor, on_stop))
            finally:
                supervisor.begin_stop()
                await cancel_and_wait(launch)
                await supervisor.stop(STOP_GRACE_S)
                killer.cancel()


def _with_admin_key(config: Config, state: StateDirectory) -> Config:
    """Whoever may read the state directory may change the mesh: the key is made where none was given."""
    if config.gateway.admin_key_file is not None:
        return config
    write_private(state.admin_key_file, secrets.token_urlsafe(32).encode() + b"\n")
    gateway = msgspec.structs.replace(config.gateway, admin_key_file=state.admin_key_file)
    return msgspec.structs.replace(config, gateway=gateway)


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
    # Only now: the launch is over before the bus's library is needed.
    from services.launcher.wish_calls import answer_wishes

    name = f"launcher{supervisor.id_suffix}"
    async with asyncio.TaskGroup() as serving:
        serving.create_task(_autoscale(supervisor))
        serving.create_task(answer_wishes(supervisor.config.mesh, name, supervisor.scale, supervisor.drain))


async def _autoscale(supervisor: Supervisor) -> None:
    """Follows the scheduler's plans, where it makes any, by the way of `lamella scale`."""
    scaling = supervisor.config.scaling
    if scaling.policy == "off":
        return

    async def scale(counts: Mapping[ScaledService, int]) -> None:
        await supervisor.scale({service: CountWish(count) for service, count in counts.items()})

    await follow_plans(
        supervisor.store.read_plan,
        scale,
        FOLLOWING_LOAD,
        scaling.window_s,
        is_dry_run=scaling.policy == "dry_run",
    )


async def _tell_of_stop(supervisor: Supervisor, on_stop: OnStop) -> None:
    on_stop(await supervisor.count_open_requests())


async def _kill_when(abort: asyncio.Event, supervisor: Supervisor) -> None:
    await abort.wait()
    supervisor.kill()


def main() -> int:
    """The detached supervisor: ``python -m services.launcher.supervise DIRECTORY``, with plan and settings.

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
