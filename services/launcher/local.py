"""A mesh on this machine: what ``lamella up``, ``down``, ``status`` and ``scale`` do.

``up`` supervises in the foreground; ``up_detached`` leaves a supervisor behind. The others talk to it.
Several meshes live beside each other, one a state directory.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import uvloop

from common.config import Config, MeshConfig
from common.config_file import load_config, to_toml
from common.errors import ConfigError, LauncherError
from common.signals import heeded
from services.launcher import control
from services.launcher.control import AskStatus, Drain, MeshStatus, Refused, Scale
from services.launcher.embedded import STOP_TIMEOUT_S
from services.launcher.launch_plan import STOP_GRACE_S, LaunchPlan, check_plan
from services.launcher.places import check_listening, check_places
from services.launcher.probes import READY_TIMEOUT_S
from services.launcher.state_directory import (
    ProcessIdentity,
    StateDirectory,
    already_runs,
    end_process,
    identify,
    is_alive,
    is_locked,
    write_private,
)
from services.launcher.wishes import Wishes, check_wishes

if TYPE_CHECKING:
    from services.launcher.supervise import OnReady, OnStop

STATUS_TIMEOUT_S = 10.0
MARGIN_S = 10.0


class MeshNotRunning(LauncherError):
    """No supervisor lives in that state directory."""


def up(
    directory: Path,
    plan: LaunchPlan,
    config: Config,
    on_ready: "OnReady",
    on_stop: "OnStop | None" = None,
) -> None:
    """Runs the mesh in the foreground until Ctrl-C or SIGTERM; everything has ended when it returns.

    Raises ConfigError and LauncherError (a mesh already runs there; a service did not start, with its log).
    """
    # Only here: the other commands do without its wires, whose import takes as long as all that they do.
    from services.launcher.supervise import supervise

    uvloop.run(supervise(_state(directory), plan, config, on_ready, on_stop))


def check_free(directory: Path) -> None:
    """Raises LauncherError where a mesh runs."""
    state = _state(directory)
    if is_locked(state):
        raise already_runs(state)


def check_early(directory: Path, plan: LaunchPlan, config: Config) -> None:
    """Before what takes minutes the first time. Raises as ``check_free``, ``check_places`` and
    ``check_listening``. What a killed mesh has left may have the port: that ends when the next one starts."""
    check_free(directory)
    if not any(is_alive(each) for each in _state(directory).read_processes()):
        check_places(plan, config)
    check_listening(plan)


def up_detached(directory: Path, plan: LaunchPlan, config: Config) -> MeshStatus:
    """Starts the mesh, returns when it serves, and leaves it running. Raises as ``up``."""
    check_plan(plan, config)
    check_free(directory)
    state = _state(directory)
    state.create()
    write_private(state.plan_file, msgspec.json.encode(plan))
    write_private(state.config_file, to_toml(config).encode())
    root = str(Path(__file__).resolve().parents[2])
    with _open_log(state) as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "services.launcher.supervise", str(state.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": _with_root(root)},
        )
    assert supervisor.stdout is not None
    try:
        with ended_by_any_signal():
            line = supervisor.stdout.readline()
    except KeyboardInterrupt:
        # SIGINT is ignored by what a shell starts in the background, and so by all that this starts.
        supervisor.terminate()
        supervisor.wait()
        state.remove_files()
        raise
    finally:
        supervisor.stdout.close()
    if not line:
        log_file = state.log_file("supervisor")
        raise LauncherError(f"the supervisor ended with {supervisor.wait()}, see {log_file}")
    answer: control.Answer = msgspec.json.decode(line, type=control.Answer)
    if isinstance(answer, Refused):
        supervisor.wait()
        raise LauncherError(answer.message)
    return answer


def _open_log(state: StateDirectory) -> BinaryIO:
    """The supervisor's. Raises LauncherError."""
    file = state.log_file("supervisor")
    try:
        return file.open("wb")
    except OSError as exc:
        raise LauncherError(f"{file} cannot be written: {exc.strerror}") from exc


@contextmanager
def ended_by_any_signal() -> Iterator[None]:
    """SIGTERM and SIGHUP end what is being waited for as Ctrl-C does, instead of leaving it behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in heeded(signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def down(directory: Path) -> int:
    """Ends the mesh: its supervisor is asked and drains; what is left is killed by its recorded identity.
    Returns how many processes there were.

    Also cleans up after a supervisor that was killed. Raises MeshNotRunning when there is nothing to end.
    """
    state = _state(directory)
    processes = [process for process in state.read_processes() if is_alive(process)]
    if not processes and not is_locked(state):
        state.remove_files()
        raise MeshNotRunning(f"no mesh runs in {state.path}")
    if all(process.role != "supervisor" for process in processes):
        processes += _supervisor_by_socket(state)
    # The gateway drains first, then the others; then the servers end.
    grace_s = 2 * (_drain_timeout_s(state) + STOP_GRACE_S) + STOP_TIMEOUT_S + MARGIN_S
    if not processes:
        raise LauncherError(
            f"a mesh runs in {state.path}, and neither {state.processes_file.name} nor"
            f" {state.control_socket.name} there says which processes are its: end its supervisor"
            " (`services.launcher.supervise`, or `lamella up`) yourself"
        )
    for process in processes:
        if process.role == "supervisor":
            end_process(process, grace_s)
    with ThreadPoolExecutor(len(processes)) as waiting:
        list(waiting.map(lambda process: end_process(process, STOP_GRACE_S), processes))
    state.remove_files()
    return len(processes)


def status(directory: Path) -> MeshStatus:
    """The mesh as its supervisor sees it. Raises MeshNotRunning."""
    return control.ask(_running(directory).control_socket, AskStatus(), STATUS_TIMEOUT_S)


async def ask_status(directory: Path) -> MeshStatus:
    """``status`` for who has a loop."""
    return await control.send(_running(directory).control_socket, AskStatus(), STATUS_TIMEOUT_S)


async def scale(directory: Path, wishes: Wishes, *, is_forced: bool = False) -> MeshStatus:
    """Makes each named role as many processes; returns when they are ready and the surplus has drained.

    Raises MeshNotRunning, ConfigError for a count out of range, LauncherError when one does not start or
    the last of a phase would end and ``is_forced`` does not want that.
    """
    check_wishes(wishes)
    state = _running(directory)
    # So long each may take, one after another.
    started = max(1, sum(abs(wish.number) for wish in wishes.values()))
    timeout_s = started * READY_TIMEOUT_S + _drain_timeout_s(state) + STOP_GRACE_S + MARGIN_S
    return await control.send(state.control_socket, Scale(dict(wishes), is_forced), timeout_s)


async def drain(directory: Path, service_id: str, *, is_forced: bool = False) -> MeshStatus:
    """Ends one process once it has finished what it had, and starts none for it. Raises as ``scale``."""
    state = _running(directory)
    timeout_s = _drain_timeout_s(state) + STOP_GRACE_S + MARGIN_S
    return await control.send(state.control_socket, Drain(service_id, is_forced), timeout_s)


def local_url(directory: Path) -> str:
    """Where the mesh's gateway answers. Raises MeshNotRunning, LauncherError."""
    url = status(directory).url
    if url is None:
        raise LauncherError(f"the mesh in {directory} has no gateway yet")
    return url


def mesh_config(directory: Path) -> Config:
    """The settings of the mesh that runs there. Raises MeshNotRunning; LauncherError where their file has
    been damaged meanwhile, which the mesh needs only for processes that start."""
    file = settings_file(directory)
    try:
        return load_config(file)
    except ConfigError as exc:
        if exc.value != str(file):
            raise
        raise LauncherError(f"{file}, which the mesh there was started with, {exc.rule}") from exc


def settings_file(directory: Path) -> Path:
    """Of the mesh that runs there. Raises MeshNotRunning."""
    return _running(directory).config_file


def _drain_timeout_s(state: StateDirectory) -> float:
    """As the mesh itself was configured; its file may be gone where only processes are left, or damaged."""
    path = state.config_file if state.config_file.is_file() else None
    try:
        return load_config(path, environment={}).mesh.drain_timeout_s
    except ConfigError:
        return MeshConfig().drain_timeout_s


def _supervisor_by_socket(state: StateDirectory) -> list[ProcessIdentity]:
    """Where the list of processes is damaged or gone; nothing where nobody answers."""
    pid = control.listening_pid(state.control_socket)
    supervisor = None if pid is None else identify("supervisor", "supervisor", pid)
    return [] if supervisor is None else [supervisor]


def _state(directory: Path) -> StateDirectory:
    path = directory.expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise ConfigError("--state-dir", str(directory), "must be a directory")
    return StateDirectory(path)


def _running(directory: Path) -> StateDirectory:
    state = _state(directory)
    if not is_locked(state):
        hint = "`lamella up` starts one, and --state-dir says where else one runs"
        raise MeshNotRunning(f"no mesh runs in {state.path}: {hint}")
    return state


def _with_root(root: str) -> str:
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
