"""The local launcher with real processes and servers; the services are small ones without a model."""

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from common.bus import Bus
from common.config import Config, MeshConfig, PredictorConfig
from common.config_file import load_config
from common.errors import ConfigError, InvalidRequest, LauncherError, NoResponder
from common.messages import Acknowledged, DrainWish, MemberRecord, ScaleWish
from common.store import Store
from common.subjects import Subjects
from services.launcher import control, local
from services.launcher.control import AskStatus, MeshStatus, ask
from services.launcher.launch_plan import LaunchPlan
from services.launcher.state_directory import (
    MAX_SOCKET_PATH_BYTES,
    ProcessIdentity,
    StateDirectory,
    end_process,
    identify,
    is_alive,
    is_locked,
)
from services.launcher.wishes import RoleChange, parse_wishes

REPOSITORY = Path(__file__).resolve().parents[3]
COMMAND = (sys.executable, "-m", "tests.common.small_service")
WAIT_S = 60.0
DRAIN_S = 5.0
CONFIG = Config(mesh=MeshConfig(drain_timeout_s=DRAIN_S, lease_s=1.0, heartbeat_s=0.2))
ONE_EACH = {"gateway-0", "scheduler-0", "prefill-0", "decode-0", "nats", "redis"}


def plan(**fields: object) -> LaunchPlan:
    return msgspec.structs.replace(LaunchPlan(port=0, command=COMMAND), **fields)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A state directory; whatever a test leaves running in it is ended."""
    yield tmp_path / "mesh"
    try:
        local.down(tmp_path / "mesh")
    except local.MeshNotRunning:
        return


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The state directory of one mesh for the tests that leave it as they found it."""
    directory = tmp_path_factory.mktemp("running") / "mesh"
    local.up_detached(directory, plan(), CONFIG)
    yield directory
    local.down(directory)


def identities(directory: Path) -> dict[str, ProcessIdentity]:
    return {each.service_id: each for each in StateDirectory(directory).read_processes()}


def wait_gone(processes: list[ProcessIdentity]) -> None:
    for process in processes:
        try:
            handle = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            if is_alive(process):
                ending = select.poll()
                ending.register(handle, select.POLLIN)
                assert ending.poll(1000 * WAIT_S), f"{process.service_id} still runs"
        finally:
            os.close(handle)


def members(directory: Path) -> list[MemberRecord]:
    config = load_config(directory / "mesh.toml", environment={})

    async def read() -> list[MemberRecord]:
        store = Store(config.mesh.redis_url, config.mesh.namespace)
        try:
            return await store.members()
        finally:
            await store.close()

    return asyncio.run(read())


def scale(directory: Path, *wishes: str, is_forced: bool = False) -> MeshStatus:
    return asyncio.run(local.scale(directory, parse_wishes(wishes), is_forced=is_forced))


def ids(status: MeshStatus) -> set[str]:
    return {process.id for process in status.processes}


def test_a_mesh_comes_up_is_seen_scaled_and_taken_down_without_leftovers(directory: Path) -> None:
    status = local.up_detached(directory, plan(), CONFIG)
    assert status.state == "ready"
    assert ids(status) == ONE_EACH
    assert {(each.id, each.role, each.state) for each in status.instances} == {
        ("prefill-0", "prefill", "ready"),
        ("decode-0", "decode", "ready"),
    }
    with urllib.request.urlopen(f"{status.url}/health/ready", timeout=WAIT_S) as response:
        assert response.status == 200
    assert {process.role for process in status.processes} >= {"gateway", "scheduler", "prefill", "decode"}

    grown = scale(directory, "prefill=2", "decode=+2")
    assert ids(grown) == ONE_EACH | {"prefill-1", "decode-1", "decode-2"}
    assert all(each.state == "ready" for each in grown.instances)
    assert len(members(directory)) == 7
    assert grown.changes == [
        RoleChange("prefill", 1, 2, ("prefill-1",)),
        RoleChange("decode", 1, 3, ("decode-1", "decode-2")),
    ]
    shrunk = scale(directory, "prefill=1", "decode=-1")
    assert shrunk.changes[1] == RoleChange("decode", 3, 2, (), ("decode-2",))
    assert ids(shrunk) == ONE_EACH | {"decode-1"}
    assert len(members(directory)) == 5, "an instance that was scaled away took its record back"
    assert local.status(directory) == msgspec.structs.replace(shrunk, changes=[])

    processes = list(identities(directory).values())
    assert {each.service_id for each in processes} == ids(shrunk) | {"supervisor"}
    local.down(directory)
    assert not any(is_alive(process) for process in processes)
    assert {path.name for path in directory.iterdir()} == {"lamella-state", "logs", "lock"}
    with pytest.raises(local.MeshNotRunning, match="no mesh runs in"):
        local.status(directory)
    with pytest.raises(local.MeshNotRunning):
        local.down(directory)
    for role in ("gateway-0", "scheduler-0", "decode-1"):
        assert "service_stopped" in (directory / "logs" / f"{role}.log").read_text()


def test_a_second_mesh_in_the_same_directory_is_refused_and_in_another_is_not(
    running: Path, directory: Path
) -> None:
    with pytest.raises(LauncherError, match="already runs in"):
        local.up_detached(running, plan(), CONFIG)
    with pytest.raises(LauncherError, match="already runs in"):
        local.up(running, plan(), CONFIG, print)
    other = local.up_detached(directory, plan(prefill=0, decode=0), CONFIG)
    assert ids(other) == ONE_EACH - {"prefill-0", "decode-0"}
    assert ids(local.status(running)) == ONE_EACH


def test_a_length_predictor_runs_beside_the_scheduler_where_one_is_configured(directory: Path) -> None:
    config = msgspec.structs.replace(CONFIG, predictor=PredictorConfig(kind="history"))
    assert ids(local.up_detached(directory, plan(), config)) == ONE_EACH | {"predictor-0"}


def test_a_process_that_dies_is_started_again(running: Path) -> None:
    before = identities(running)["prefill-0"]
    os.kill(before.pid, signal.SIGKILL)
    wait_gone([before])

    def is_back() -> bool:
        status = local.status(running)
        prefill = next(each for each in status.processes if each.id == "prefill-0")
        instance = next(each for each in status.instances if each.id == "prefill-0")
        return prefill.restarts == 1 and prefill.pid not in (None, before.pid) and instance.state == "ready"

    _until(is_back)


def test_a_disk_that_takes_nothing_ends_no_mesh(directory: Path) -> None:
    """A service that died on a full disk took all others with it."""
    local.up_detached(directory, plan(), CONFIG)
    before = identities(directory)
    processes, logs = directory / "processes.json", directory / "logs"
    kept = processes.rename(directory / "kept.json")
    processes.mkdir()
    logs.rename(directory / "earlier-logs")

    def is_back() -> bool:
        status = local.status(directory)
        states = [each.state for each in status.instances]
        return any(each.restarts for each in status.processes) and states == ["ready", "ready"]

    try:
        os.kill(before["prefill-0"].pid, signal.SIGKILL)
        _until(is_back)
        assert all(is_alive(each) for name, each in before.items() if name != "prefill-0")
        with pytest.raises(LauncherError, match=r"processes\.json there does not say which processes"):
            local.down(directory)
        assert (directory / "mesh.toml").exists()
    finally:
        processes.rmdir()
        kept.rename(processes)


def test_a_nats_server_that_dies_is_started_again_at_its_address(running: Path) -> None:
    services = {name: each for name, each in identities(running).items() if name not in ("nats", "redis")}
    nats = identities(running)["nats"]
    os.kill(nats.pid, signal.SIGKILL)
    wait_gone([nats])
    url = local.status(running).url
    assert url is not None

    def is_ready_again() -> bool:
        metrics = urllib.request.urlopen(f"{url}/metrics", timeout=WAIT_S).read().decode()
        return "lamella_bus_reconnects_total 1.0" in metrics

    _until(is_ready_again)
    now = identities(running)
    assert all(now[name] == each for name, each in services.items()), "no service had to start again"


def test_when_the_supervisor_is_killed_its_children_end_and_the_next_start_is_clean(directory: Path) -> None:
    local.up_detached(directory, plan(), CONFIG)
    processes = identities(directory)
    os.kill(processes["supervisor"].pid, signal.SIGKILL)
    wait_gone(list(processes.values()))
    with pytest.raises(local.MeshNotRunning):
        local.status(directory)
    again = local.up_detached(directory, plan(), CONFIG)
    assert ids(again) == ONE_EACH


def test_down_ends_what_a_killed_supervisor_left(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "STOP_GRACE_S", 0.5)
    local.up_detached(directory, plan(), CONFIG)
    processes = identities(directory)
    for process in processes.values():
        os.kill(process.pid, signal.SIGSTOP)
    os.kill(processes["supervisor"].pid, signal.SIGKILL)
    wait_gone([processes["supervisor"]])
    for name in ("nats", "redis"):
        os.kill(processes[name].pid, signal.SIGCONT)
    local.down(directory)
    assert not any(is_alive(process) for process in processes.values())


def test_a_role_that_cannot_start_fails_the_launch_with_its_log(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKEN_ROLE", "decode")
    with pytest.raises(LauncherError, match=r"decode-0 ended with 3:\nthis role is broken"):
        local.up_detached(directory, plan(), CONFIG)
    assert not is_locked(StateDirectory(directory))
    assert identities(directory) == {}
    with pytest.raises(LauncherError, match="this role is broken"):
        local.up(directory, plan(), CONFIG, print)


def test_a_new_instance_that_cannot_start_fails_the_scaling_and_leaves_the_mesh(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKEN_ROLE", "decode")
    local.up_detached(directory, plan(prefill=2, decode=0), CONFIG)
    with pytest.raises(LauncherError, match=r"(?s)decode-0 does not start:.*this role is broken"):
        scale(directory, "decode=1", "prefill=1")
    assert ids(local.status(directory)) == ONE_EACH - {"decode-0"} | {"prefill-1"}, "none was ended for it"


def test_the_last_instance_of_a_phase_ends_only_by_force(running: Path) -> None:
    """As it is flipped: every request would be refused from then on."""
    with pytest.raises(LauncherError, match=r"no instance would be left that does decode.*--force"):
        scale(running, "decode=0", "prefill=2")
    assert ids(local.status(running)) == ONE_EACH
    assert ids(scale(running, "decode=0", is_forced=True)) == ONE_EACH - {"decode-0"}
    # Nobody loses what is missing already.
    assert ids(scale(running, "decode=0")) == ONE_EACH - {"decode-0"}
    assert ids(scale(running, "decode=1")) == ONE_EACH


def test_counts_out_of_range_are_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"prefill = -1: must be 0\.\.64"):
        local.up_detached(directory, plan(prefill=-1), CONFIG)
    with pytest.raises(ConfigError, match="decode = 65"):
        scale(directory, "decode=65")


def test_two_operators_who_each_want_one_more_get_two_more(running: Path) -> None:
    async def both() -> None:
        wish = parse_wishes(["decode=+1"])
        await asyncio.gather(local.scale(running, wish), local.scale(running, wish))

    asyncio.run(both())
    assert ids(local.status(running)) == ONE_EACH | {"decode-1", "decode-2"}
    scale(running, "decode=1")


def test_more_gateways_take_free_ports_and_the_first_and_its_port_stay(running: Path) -> None:
    url = local.status(running).url
    grown = scale(running, "gateway=2")
    urls = {each.id: each.url for each in grown.processes if each.role == "gateway"}
    assert urls["gateway-0"] == url
    with urllib.request.urlopen(f"{urls['gateway-1']}/health/ready", timeout=WAIT_S) as response:
        assert response.status == 200
    with pytest.raises(LauncherError, match="gateway = 0: must be at least 1: nobody else takes requests"):
        scale(running, "gateway=-2")
    assert ids(scale(running, "gateway=1")) == ONE_EACH


def test_a_process_that_is_drained_is_not_started_again(running: Path) -> None:
    scale(running, "decode=2")
    asyncio.run(local.drain(running, "decode-0"))
    assert ids(local.status(running)) == ONE_EACH - {"decode-0"} | {"decode-1"}
    for name, said in (("decode-0", "no process decode-0"), ("nats", "no process nats")):
        with pytest.raises(LauncherError, match=f"{said} runs here that could be drained"):
            asyncio.run(local.drain(running, name))
    with pytest.raises(LauncherError, match="no instance would be left that does decode"):
        asyncio.run(local.drain(running, "decode-1"))
    with pytest.raises(LauncherError, match="scheduler = 0: must be at least 1"):
        asyncio.run(local.drain(running, "scheduler-0"))
    scale(running, "decode=2")
    asyncio.run(local.drain(running, "decode-1"))
    assert ids(local.status(running)) == ONE_EACH


def test_one_that_is_drained_before_it_is_ready_fails_who_waits_for_it(running: Path) -> None:
    async def both() -> None:
        scaling = asyncio.create_task(local.scale(running, parse_wishes(["decode=2"])))
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(LauncherError):
                    await local.drain(running, "decode-1")
                    break
                await asyncio.sleep(0)
        with pytest.raises(LauncherError, match="decode-1 was drained before it was ready"):
            await scaling

    asyncio.run(both())
    assert ids(local.status(running)) == ONE_EACH


def test_who_is_to_end_once_others_are_ready_is_not_counted_on_meanwhile(running: Path) -> None:
    scale(running, "decode=2")

    async def both() -> None:
        scaling = asyncio.create_task(local.scale(running, parse_wishes(["prefill=2", "decode=1"])))
        socket_file = StateDirectory(running).control_socket
        async with asyncio.timeout(WAIT_S):
            while True:
                if "prefill-1" in ids(await control.send(socket_file, AskStatus(), WAIT_S)):
                    break
                await asyncio.sleep(0)
        with pytest.raises(LauncherError, match="no instance would be left that does decode"):
            await local.drain(running, "decode-0")
        await scaling

    asyncio.run(both())
    assert ids(local.status(running)) == ONE_EACH | {"prefill-1"}
    scale(running, "prefill=1")


def test_wishes_over_the_bus_are_taken_up_or_refused_with_the_reason(running: Path) -> None:
    asyncio.run(wish_over_the_bus(running))
    assert ids(local.status(running)) == ONE_EACH


async def wish_over_the_bus(running: Path) -> None:
    mesh = load_config(running / "mesh.toml", environment={}).mesh
    subjects = Subjects(mesh.namespace)
    bus = Bus(mesh.nats_url, name="operator", subjects=subjects)
    await bus.connect(WAIT_S)

    async def wait_decode(names: set[str]) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                status = await control.send(StateDirectory(running).control_socket, AskStatus(), WAIT_S)
                if {each.id for each in status.instances if each.role == "decode"} == names and all(
                    each.state == "ready" for each in status.instances
                ):
                    return
                await asyncio.sleep(0.1)

    async def wish(subject: str, message: ScaleWish | DrainWish) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                # It begins to listen when the mesh is ready, which the command line hears at once.
                with contextlib.suppress(NoResponder):
                    await bus.call(subject, message, Acknowledged, WAIT_S)
                    return
                await asyncio.sleep(0.1)

    try:
        await wish(subjects.admin_scale(), ScaleWish("decode", 2))
        await wait_decode({"decode-0", "decode-1"})
        await wish(subjects.admin_drain(), DrainWish("decode-1"))
        await wait_decode({"decode-0"})
        with pytest.raises(InvalidRequest, match="gateway = 0: must be at least 1"):
            await wish(subjects.admin_scale(), ScaleWish("gateway", 0))
        with pytest.raises(InvalidRequest, match="no process nobody"):
            await wish(subjects.admin_drain(), DrainWish("nobody"))
    finally:
        await bus.close()


def test_given_servers_are_used_and_ids_cannot_meet_those_of_other_machines(
    directory: Path, nats_url: str, redis_url: str, namespace: str
) -> None:
    config = msgspec.structs.replace(CONFIG, mesh=msgspec.structs.replace(CONFIG.mesh, namespace=namespace))
    status = local.up_detached(directory, plan(nats_url=nats_url, redis_url=redis_url), config)
    assert not ids(status) & {"nats", "redis"}
    assert all(len(each.id.split("-")) == 3 for each in status.processes)


def test_a_foreground_mesh_ends_at_ctrl_c_and_nothing_of_it_is_left(directory: Path) -> None:
    program = (
        "import signal, sys; from pathlib import Path; from common.config_file import load_config;"
        "from services.launcher import local; from services.launcher.launch_plan import LaunchPlan;"
        # In the background of a script SIGINT is ignored, and every child inherits that.
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        "plan = LaunchPlan(port=0, command=(sys.executable, '-m', 'tests.common.small_service'));"
        "local.up(Path(sys.argv[1]), plan, load_config(None), lambda s: print(s.url, flush=True))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(directory)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("http://127.0.0.1:")
    processes = list(identities(directory).values())
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 0
    process.stdout.close()
    assert not any(is_alive(each) for each in processes)


def test_the_state_is_private_and_holds_no_password_for_others(running: Path) -> None:
    assert running.stat().st_mode & 0o077 == 0
    for name in ("mesh.toml", "nats.conf", "redis.conf", "processes.json", "plan.json"):
        file = running / name
        assert not file.exists() or file.stat().st_mode & 0o077 == 0, name
    password = load_config(running / "mesh.toml", environment={}).mesh.nats_url.split("@")[0].split("/")[-1]
    assert len(password) == 32
    for process in identities(running).values():
        assert password.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    for log in (running / "logs").iterdir():
        assert password not in log.read_text()


def test_a_garbled_command_is_refused_and_the_mesh_goes_on(running: Path) -> None:
    path = StateDirectory(running).control_socket
    for line in (b"\n", b"{}\n", b"\xff\xfe\n", b'{"type":"scale","wishes":{"nats":{"number":3}}}\n'):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(WAIT_S)
            connection.connect(str(path))
            connection.sendall(line)
            answer = json.loads(connection.makefile().readline())
            assert answer["type"] == "refused"
            assert "not a command" in answer["message"]
    assert ask(path, AskStatus(), WAIT_S).state == "ready"


def test_a_directory_too_deep_for_a_socket_uses_a_short_private_path(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d" * 40] * 4)
    state = StateDirectory(deep)
    state.create()
    state.remove_files()
    state.make_socket_directory()
    assert len(os.fsencode(state.control_socket)) <= MAX_SOCKET_PATH_BYTES
    assert state.control_socket.parent.stat().st_mode & 0o777 == 0o700
    state.remove_files()
    assert not state.control_socket.parent.exists()


def test_a_pid_that_belongs_to_another_process_now_is_not_ended() -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        identity = identify("x", "prefill", other.pid)
        assert identity is not None
        end_process(msgspec.structs.replace(identity, start_ticks=identity.start_ticks - 1), grace_s=0.1)
        assert other.poll() is None
        end_process(identity, grace_s=WAIT_S)
        assert other.wait(WAIT_S) == -signal.SIGTERM
        end_process(identity, grace_s=WAIT_S)
    finally:
        other.kill()
        other.wait()
        assert other.stdin is not None
        other.stdin.close()


def _until(condition: object) -> None:
    """Other processes cannot tell this one: it asks again, paced by a wait that is never met."""
    assert callable(condition)
    reader, writer = os.pipe()
    try:
        for _ in range(round(WAIT_S / 0.05)):
            if condition():
                return
            select.select([reader], [], [], 0.05)
    finally:
        os.close(reader)
        os.close(writer)
    raise AssertionError(f"waited {WAIT_S} s")


def test_a_directory_that_holds_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    other = tmp_path / "mine"
    other.mkdir(mode=0o755)
    (other / "mesh.toml").write_text("mine")
    with pytest.raises(local.MeshNotRunning):
        local.down(other)
    with pytest.raises(LauncherError, match="holds files and is no state directory"):
        StateDirectory(other).create()
    assert [path.name for path in other.iterdir()] == ["mesh.toml"]
    assert (other / "mesh.toml").read_text() == "mine"
    assert other.stat().st_mode & 0o777 == 0o755


def test_a_file_is_no_state_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="--state-dir"):
        local.down(file)


@pytest.mark.parametrize(
    ("option", "plan"), [("--nats", LaunchPlan(nats_url="foo")), ("--redis", LaunchPlan(redis_url="foo"))]
)
def test_a_url_of_another_kind_is_refused_at_once(tmp_path: Path, option: str, plan: LaunchPlan) -> None:
    with pytest.raises(ConfigError, match=f"{option} = 'foo': must begin with"):
        local.up(tmp_path / "mesh", plan, CONFIG, lambda mesh: None)
