"""What is told before anything starts: taken ports, addresses of others, servers that are not there."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from common.config import ServiceConfig
from common.errors import ConfigError, LauncherError
from common.listening import port_of, reserve
from services.launcher import local, places
from services.launcher.launch_plan import LaunchPlan
from services.launcher.state_directory import ProcessIdentity, StateDirectory, identify
from tests.services.launcher.small_mesh import CONFIG, plan

REPOSITORY = Path(__file__).resolve().parents[3]


def test_a_port_that_another_program_has_is_told_of_before_anything_starts(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LauncherError, match=rf"--port = {port}: .*name another"):
            local.up_detached(directory, plan(port=port), CONFIG)
        with pytest.raises(ConfigError, match=rf"--port = {port}: .*name another"):
            local.up(directory, plan(port=port), CONFIG, print)
    assert not list(directory.glob("logs/*-0.log"))


def test_a_taken_port_is_told_of_before_a_model_is_made_ready(directory: Path, tmp_path: Path) -> None:
    """Which takes minutes the first time."""
    cache = tmp_path / "cache"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "services.cli", "up", "--port", str(port)]
        done = subprocess.run(
            [*command, "--state-dir", str(directory)],
            cwd=REPOSITORY,
            env=os.environ | {"LAMELLA_CACHE": str(cache)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 1
        assert f"--port = {port}: cannot be listened on" in done.stderr
        assert not cache.exists()
        state = StateDirectory(directory)
        state.create()
        gone = ProcessIdentity("gateway-0", "gateway", 1, start_ticks=1 << 40)
        state.write_processes([gone])
        with pytest.raises(ConfigError, match=f"--port = {port}: cannot be listened on"):
            local.check_early(directory, plan(port=port), CONFIG)
        left = subprocess.Popen(["sleep", "60"])
        try:
            there = identify("gateway-1", "gateway", left.pid)
            assert there is not None
            state.write_processes([gone, there])
            local.check_early(directory, plan(port=port), CONFIG)  # may be that one's, which ends first
        finally:
            left.kill()
            left.wait()


@pytest.mark.parametrize("option", ["nats", "redis"])
def test_a_server_that_is_not_there_is_told_of_before_a_model_is_made_ready(
    option: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        url = f"{option}://secret@127.0.0.1:{there.getsockname()[1]}"
        local.check_early(directory, plan(**{f"{option}_url": url}), CONFIG)
    monkeypatch.setattr(places, "WAIT_S", 0.0)
    with reserve("127.0.0.1") as kept:
        place = f"{option}://127.0.0.1:{port_of(kept)}"
        with pytest.raises(ConfigError, match=r"Connection refused$") as caught:
            local.check_early(directory, plan(**{f"{option}_url": place.replace("//", "//secret@")}), CONFIG)
    assert (caught.value.key, caught.value.value) == (f"--{option}", place)
    missing = tmp_path / "redis.sock"
    with pytest.raises(ConfigError, match=rf"--redis = 'unix://{missing}': .*: No such file"):
        local.check_early(directory, plan(redis_url=f"unix://{missing}"), CONFIG)


def test_a_server_that_comes_while_it_is_looked_for_is_waited_for(directory: Path) -> None:
    with reserve("127.0.0.1") as kept, socket.socket() as late:
        late.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        late.bind(("127.0.0.1", port_of(kept)))
        coming = threading.Timer(0.5, late.listen)
        coming.start()
        local.check_early(directory, plan(redis_url=f"redis://127.0.0.1:{port_of(kept)}"), CONFIG)
        coming.join()


@pytest.mark.parametrize("between", "/#?[]")
@pytest.mark.parametrize("first", ["qx", "78"])
def test_an_unencoded_password_is_not_repeated(first: str, between: str, directory: Path) -> None:
    url = f"redis://:{first}{between}12@127.0.0.1:1/0"
    with pytest.raises(ConfigError, match="has to be percent-encoded") as caught:
        local.check_early(directory, plan(redis_url=url), CONFIG)
    assert caught.value.key == "--redis"
    assert first not in str(caught.value)


def test_an_address_of_another_machine_is_told_of_before_anything_starts(directory: Path) -> None:
    config = msgspec.structs.replace(CONFIG, service=ServiceConfig(host="192.0.2.1"))
    with pytest.raises(
        ConfigError, match=r"service\.host = '192\.0\.2\.1': must be an address of this machine"
    ):
        local.up(directory, plan(port=8000), config, print)
    assert not list(directory.glob("logs/*-0.log"))


@pytest.mark.parametrize(
    ("option", "plan"),
    [
        ("--nats", LaunchPlan(port=0, nats_url="foo://me:secret@x")),
        ("--redis", LaunchPlan(port=0, redis_url="foo://:secret@x")),
    ],
)
def test_a_url_of_another_kind_is_refused_at_once(tmp_path: Path, option: str, plan: LaunchPlan) -> None:
    with pytest.raises(ConfigError, match=rf"{option} = 'foo://\.\.\.@x': must begin with"):
        local.up(tmp_path / "mesh", plan, CONFIG, lambda mesh: None)
