"""The local launcher with real processes and servers; the services are small ones without a model."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import msgspec
import pytest

from common.config import PredictorConfig
from common.config_file import load_config
from common.errors import ConfigError, LauncherError
from services.launcher import local
from services.launcher.control import AskStatus, MeshStatus, ask
from services.launcher.state_directory import (
    MAX_SOCKET_PATH_BYTES,
    StateDirectory,
    end_process,
    identify,
    is_alive,
    is_locked,
)
from services.launcher.wishes import RoleChange
from tests.services.launcher.small_mesh import (
    CONFIG,
    ONE_EACH,
    WAIT_S,
    identities,
    ids,
    members,
    plan,
    scale,
    until,
    wait_gone,
)

REPOSITORY = Path(__file__).resolve().parents[3]


def test_a_mesh_comes_up_is_seen_scaled_and_taken_down_without_leftovers(directory: Path) -> None:
    status = local.up_detached(directory, plan(), CONFIG)
    assert status.state == "ready"
    assert ids(status) == ONE_EACH
    assert [(each.id, each.role, each.state) for each in status.instances] == [
        ("prefill-0", "prefill", "ready"),
        ("decode-0", "decode", "ready"),
    ]
    with urllib.request.urlopen(f"{status.url}/health/ready", timeout=WAIT_S) as response:
        assert response.status == 200
    assert {process.role for process in status.processes} >= {"gateway", "scheduler", "prefill", "decode"}
    servers = {"nats", "redis"}
    assert {each.state for each in status.processes if each.role not in servers} == {"ready"}
    assert {each.state for each in status.processes if each.role in servers} == {"running"}

    grown = scale(directory, "prefill=2", "decode=+2")
    assert ids(grown) == ONE_EACH | {"prefill-1", "decode-1", "decode-2"}
    assert {each.state for each in grown.instances} == {"ready"}
    assert len(members(directory)) == 7
    assert grown.changes == [
        RoleChange("prefill", 1, 2, ("prefill-1",)),
        RoleChange("decode", 1, 3, ("decode-1", "decode-2")),
    ]
    names = [each.id for each in grown.instances]
    assert names == ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    shrunk = scale(directory, "prefill=1", "decode=-1")
    assert shrunk.changes[1] == RoleChange("decode", 3, 2, (), ("decode-2",))
    assert ids(shrunk) == ONE_EACH | {"decode-1"}
    assert len(members(directory)) == 5, "an instance that was scaled away took its record back"
    assert local.status(directory) == msgspec.structs.replace(shrunk, changes=[])

    processes = list(identities(directory).values())
    assert {each.service_id for each in processes} == ids(shrunk) | {"supervisor"}
    assert local.down(directory) == len(processes)
    assert not any(is_alive(process) for process in processes)
    assert {path.name for path in directory.iterdir()} == {"lamella-state", "logs", "lock"}
    with pytest.raises(local.MeshNotRunning, match=r"no mesh runs in .*lamella up"):
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

    until(is_back)


def test_a_gateway_that_dies_is_found_again_where_it_was(directory: Path) -> None:
    """Each at a port that it chose itself, the second as well."""
    local.up_detached(directory, plan(), CONFIG)
    urls = gateway_urls(scale(directory, "gateway=2"))
    before = [each for each in identities(directory).values() if each.role == "gateway"]
    for each in before:
        os.kill(each.pid, signal.SIGKILL)
    wait_gone(before)
    until(lambda: None not in gateway_urls(local.status(directory)).values())
    assert gateway_urls(local.status(directory)) == urls
    assert urls["gateway-0"] == local.status(directory).url


def gateway_urls(status: MeshStatus) -> dict[str, str | None]:
    """None while one is not registered."""
    return {each.id: each.url for each in status.processes if each.role == "gateway"}


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
        until(is_back)
        assert all(is_alive(each) for name, each in before.items() if name != "prefill-0")
        socket_file = (directory / "control.sock").rename(directory / "kept.sock")
        with pytest.raises(LauncherError, match=r"neither processes\.json nor control\.sock there says"):
            local.down(directory)
        assert (directory / "mesh.toml").exists()
        socket_file.rename(directory / "control.sock")
    finally:
        processes.rmdir()
        kept.rename(processes)


@pytest.mark.parametrize("damage", ["x", None], ids=["damaged", "gone"])
def test_a_mesh_whose_files_are_damaged_is_shown_and_ended_by_its_socket(
    directory: Path, damage: str | None
) -> None:
    local.up_detached(directory, plan(prefill=0, decode=0), CONFIG)
    processes = list(identities(directory).values())
    for name in ("mesh.toml", "processes.json"):
        file = directory / name
        file.unlink()
        if damage is not None:
            file.write_text(damage)
    assert ids(local.status(directory)) == ONE_EACH - {"prefill-0", "decode-0"}
    with pytest.raises(LauncherError, match=r"mesh\.toml, which the mesh there was started with, "):
        local.mesh_config(directory)
    scale(directory, "gateway=1")
    local.down(directory)
    assert not any(is_alive(each) for each in processes)


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

    until(is_ready_again)
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


def test_given_servers_are_used_and_ids_cannot_meet_those_of_other_machines(
    directory: Path, nats_url: str, redis_url: str, namespace: str
) -> None:
    config = msgspec.structs.replace(CONFIG, mesh=msgspec.structs.replace(CONFIG.mesh, namespace=namespace))
    status = local.up_detached(directory, plan(nats_url=nats_url, redis_url=redis_url), config)
    assert not ids(status) & {"nats", "redis"}
    assert all(len(each.id.split("-")) == 3 for each in status.processes)


def test_a_foreground_mesh_ends_at_ctrl_c_and_nothing_of_it_is_left(directory: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from common.config_file import load_config;"
        "from services.launcher import local; from services.launcher.launch_plan import LaunchPlan;"
        "plan = LaunchPlan(port=0, command=(sys.executable, '-m', 'tests.common.small_service'));"
        "local.up(Path(sys.argv[1]), plan, load_config(None), lambda s: print(s.url, flush=True),"
        " lambda count: print('ending', count, flush=True))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(directory)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("http://127.0.0.1:")
    processes = list(identities(directory).values())
    process.send_signal(signal.SIGINT)
    assert process.stdout.read() == "ending 0\n", "it says so at once"
    assert process.wait(WAIT_S) == 0
    process.stdout.close()
    assert not any(is_alive(each) for each in processes)


def test_a_start_that_is_interrupted_ends_what_it_began_even_where_ctrl_c_is_ignored(directory: Path) -> None:
    """As in what a shell starts in the background."""
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); from pathlib import Path;"
        "from common.config_file import load_config; from services.launcher import local;"
        "from services.launcher.launch_plan import LaunchPlan;"
        "plan = LaunchPlan(port=0, command=(sys.executable, '-c', 'import time; time.sleep(600)'));"
        "local.up_detached(Path(sys.argv[1]), plan, load_config(None))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(directory)], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True
    )
    until(lambda: "prefill-0" in identities(directory))
    processes = list(identities(directory).values())
    process.terminate()
    _, errors = process.communicate(timeout=WAIT_S)
    assert "KeyboardInterrupt" in errors
    assert not any(is_alive(each) for each in processes)


def test_who_was_started_to_outlive_a_terminal_is_not_ended_by_its_hanging_up() -> None:
    """As nohup starts it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with local.ended_by_any_signal():
            os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt), local.ended_by_any_signal():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
