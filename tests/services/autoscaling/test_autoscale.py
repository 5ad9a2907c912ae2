"""`lamella autoscale` as an operator runs it, with a real relay over a real NATS.

Programs stand for `docker` and `kubectl`, and record what they are told; tests/compose has a real engine.
"""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from common.bus import Bus
from common.config import Config, MeshConfig, RolesConfig, ScalingConfig
from common.config_file import to_toml
from common.errors import InvalidRequest, NoResponder
from common.messages import Acknowledged, DrainWish, ScaleWish
from common.scaling import DesiredCounts, ServiceCount
from common.subjects import Subjects
from services.launcher import embedded, local
from services.launcher.state_directory import StateDirectory, locked
from tests.common.buses import connected
from tests.services.connectors.programs import pretend_docker, pretend_kubectl
from tests.services.launcher.small_mesh import CONFIG, plan

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 60.0
SETTINGS = Config(scaling=ScalingConfig(policy="dry_run", window_s=0.2))
UP = "compose up --detach --wait --no-recreate --no-deps --wait-timeout 300"


@dataclass(slots=True)
class Autoscaling:
    """``said``: lines of its standard error. ``program_log``: what `docker` or `kubectl` was told."""

    process: Process
    bus: Bus
    subjects: Subjects
    program_log: Path
    said: list[str] = field(default_factory=list)
    plans: int = 0

    async def listen(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.said.append(line.decode().strip())

    def has_said(self, words: str) -> bool:
        return any(words in line for line in self.said)

    async def wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.02)

    async def plan_until(self, condition: Callable[[], bool], epoch: int = 1, **desired: int) -> None:
        """As the leading scheduler does at every window's end; it sees one of each."""
        async with asyncio.timeout(WAIT_S):
            while True:
                if condition():
                    return
                self.plans += 1
                counts = tuple(
                    ServiceCount(service, 1, desired.get(service, 1), f"many {service}s")
                    for service in ("gateway", "prefill", "decode")
                )
                self.bus.publish(self.subjects.scaling(), DesiredCounts(counts, epoch, float(self.plans)))
                await asyncio.sleep(0.3)

    async def wish(self, subject: str, wish: ScaleWish | DrainWish) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                # It listens soon after it has begun.
                with contextlib.suppress(NoResponder):
                    await self.bus.call(subject, wish, Acknowledged, WAIT_S)
                    return
                await asyncio.sleep(0.1)

    def told(self, words: str) -> list[str]:
        """Commands that have these words in them."""
        lines = self.program_log.read_text().splitlines() if self.program_log.exists() else []
        return [line.removeprefix("--namespace lamella ") for line in lines if words in line]


@asynccontextmanager
async def autoscaling(
    target: str, program_log: Path, nats_url: str, namespace: str, *options: str
) -> AsyncIterator[Autoscaling]:
    """Begun, and told to end by Ctrl-C afterwards."""
    command = (sys.executable, "-m", "services.cli", "autoscale", "--target", target, *options)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    async with connected(nats_url, namespace) as bus:
        process = await asyncio.create_subprocess_exec(*command, stderr=PIPE, env=environment)
        scaling = Autoscaling(process, bus, Subjects(namespace), program_log)
        listening = asyncio.create_task(scaling.listen())
        try:
            await scaling.wait(lambda: scaling.has_said("following: ") or process.returncode is not None)
            yield scaling
            process.send_signal(signal.SIGINT)
            async with asyncio.timeout(WAIT_S):
                assert await process.wait() == 0, scaling.said
                # The relay has the same standard error.
                await listening
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            listening.cancel()


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nats_url: str, namespace: str) -> Path:
    """What the mesh's containers are configured by."""
    return configure(SETTINGS, tmp_path, monkeypatch, nats_url, namespace)


def configure(
    config: Config, directory: Path, monkeypatch: pytest.MonkeyPatch, nats_url: str, namespace: str
) -> Path:
    file = directory / "settings.toml"
    mesh = MeshConfig(nats_url=nats_url, namespace=namespace)
    file.write_text(to_toml(msgspec.structs.replace(config, mesh=mesh)))
    monkeypatch.setenv("RELAY_SETTINGS", str(file))
    return file


@pytest.mark.anyio
@pytest.mark.usefixtures("settings")
async def test_under_compose_plans_are_carried_out_but_for_the_gateway_that_has_the_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nats_url: str, namespace: str
) -> None:
    log = pretend_docker(tmp_path, monkeypatch)
    async with autoscaling("compose", log, nats_url, namespace) as scaling:
        assert scaling.told(" exec ") == [
            "compose exec -T scheduler lamella relay --wishes --config /etc/lamella/compose.toml"
        ]
        await scaling.plan_until(lambda: bool(scaling.told(" up ")), gateway=2, decode=3)
        await scaling.wait(lambda: scaling.has_said("scaled: "))
    assert set(scaling.told(" up ")) == {f"{UP} --scale decode=3 decode"}
    assert scaling.has_said('scaling: role="decode", current=1, desired=3, reason="many decodes"')
    assert scaling.has_said("decode: 2 → 3 (lamella-decode-3 ready)")


@pytest.mark.anyio
@pytest.mark.usefixtures("settings")
async def test_on_kubernetes_gateways_follow_the_load_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nats_url: str, namespace: str
) -> None:
    log = pretend_kubectl(tmp_path, monkeypatch)
    async with autoscaling("kubernetes", log, nats_url, namespace) as scaling:
        assert scaling.told(" exec ") == [
            "exec --stdin deployment/scheduler -- lamella relay --wishes --config /etc/lamella/lamella.toml"
        ]
        await scaling.plan_until(lambda: scaling.has_said("gateway: 1 → 2 "), gateway=2)
    assert scaling.told(" scale ")[0] == "scale deployment/gateway --replicas=2"


@pytest.mark.anyio
@pytest.mark.usefixtures("settings")
async def test_operators_wishes_are_taken_up_or_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nats_url: str, namespace: str
) -> None:
    log = pretend_docker(tmp_path, monkeypatch)
    async with autoscaling("compose", log, nats_url, namespace) as scaling:
        subjects = scaling.subjects
        await scaling.wish(subjects.admin_scale(), ScaleWish("prefill", 2))
        await scaling.wait(lambda: scaling.has_said("prefill: 1 → 2 (lamella-prefill-2 ready)"))
        await scaling.wish(subjects.admin_drain(), DrainWish("lamella-decode-2"))
        await scaling.wait(lambda: scaling.has_said('drained: id="lamella-decode-2"'))
        with pytest.raises(InvalidRequest, match="gateway = 0: must be at least 1"):
            await scaling.wish(subjects.admin_scale(), ScaleWish("gateway", 0))
        with pytest.raises(InvalidRequest, match="no container of this project is nobody"):
            await scaling.wish(subjects.admin_drain(), DrainWish("nobody"))
    assert scaling.told(" up ") == [f"{UP} --scale prefill=2 prefill"]
    assert scaling.told("stop ") == ["stop lamella-decode-2"]


@pytest.mark.anyio
@pytest.mark.usefixtures("settings")
async def test_a_dry_run_says_each_change_once_with_its_reason_and_hears_no_wishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nats_url: str, namespace: str
) -> None:
    log = pretend_docker(tmp_path, monkeypatch)
    would = 'would_scale: role="decode", current=1, desired=3, reason="many decodes"'
    async with autoscaling("compose", log, nats_url, namespace, "--dry-run") as scaling:
        await scaling.plan_until(lambda: scaling.has_said(would), decode=3)
        await scaling.plan_until(lambda: scaling.has_said('role="prefill"'), decode=3, prefill=2)
        wish = ScaleWish("decode", 2)
        with pytest.raises(NoResponder):
            await scaling.bus.call(scaling.subjects.admin_scale(), wish, Acknowledged, WAIT_S)
    assert scaling.said.count(would) == 1
    assert scaling.told(" up ") == []


@pytest.mark.anyio
@pytest.mark.usefixtures("settings")
async def test_a_relay_that_ends_with_its_container_is_started_again_and_follows_a_new_life_s_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nats_url: str, namespace: str
) -> None:
    log = pretend_docker(tmp_path, monkeypatch)
    async with autoscaling("compose", log, nats_url, namespace) as scaling:
        await scaling.plan_until(lambda: scaling.has_said("decode: 2 → 3"), epoch=7, decode=3)
        for pid in children(scaling.process.pid):
            os.kill(pid, signal.SIGKILL)
        await scaling.wait(lambda: scaling.has_said("relay_ended: "))
        await scaling.wait(lambda: len(scaling.told(" exec ")) == 2)
        # The mesh itself may be another one, whose leaders begin to count anew.
        await scaling.plan_until(lambda: scaling.has_said("prefill: 1 → 2"), epoch=1, prefill=2)


@pytest.mark.anyio
async def test_a_relay_that_loses_nats_makes_way_for_one_with_the_settings_there_are_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: str
) -> None:
    log = pretend_docker(tmp_path, monkeypatch)
    directories = [tmp_path / name for name in ("first", "second")]
    for directory in directories:
        directory.mkdir()
    servers = [embedded.prepare_nats(directory) for directory in directories]
    processes = [embedded.start(server) for server in servers]
    try:
        configure(SETTINGS, tmp_path, monkeypatch, servers[0].url, namespace)
        async with (
            connected(servers[1].url, namespace, "other") as bus,
            autoscaling("compose", log, servers[0].url, namespace) as scaling,
        ):
            configure(SETTINGS, tmp_path, monkeypatch, servers[1].url, namespace)
            embedded.stop(processes[0])
            await scaling.wait(lambda: scaling.has_said("relay_ended: "))
            scaling.bus = bus
            await scaling.plan_until(lambda: scaling.has_said("decode: 2 → 3"), decode=3)
    finally:
        for process in processes:
            embedded.stop(process)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def small_mesh(directory: Path) -> tuple[str, str]:
    """NATS and namespace of a mesh of this machine: real processes, without a model."""
    local.up_detached(directory, plan(), msgspec.structs.replace(SETTINGS, mesh=CONFIG.mesh))
    settings = local.mesh_config(directory).mesh
    return settings.nats_url, settings.namespace


def test_a_mesh_of_this_machine_follows_too_and_a_wish_is_left_to_its_launcher(tmp_path: Path) -> None:
    directory = tmp_path / "mesh"

    async def follow(nats_url: str, namespace: str) -> None:
        options = ("--state-dir", str(directory))
        async with autoscaling("local", tmp_path / "log", nats_url, namespace, *options) as scaling:
            await scaling.plan_until(lambda: scaling.has_said("decode: 1 → 2 (decode-1 ready)"), decode=2)
            await scaling.wish(scaling.subjects.admin_scale(), ScaleWish("decode", 1))
        assert not scaling.has_said("scale_wished")

    try:
        asyncio.run(follow(*small_mesh(directory)))
        assert "scale_wished" in StateDirectory(directory).log_file("supervisor").read_text()
    finally:
        local.down(directory)


@pytest.mark.anyio
async def test_where_no_scheduler_runs_it_ends_at_once_with_what_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RELAY_SETTINGS", raising=False)
    pretend_docker(tmp_path, monkeypatch)
    said = await refused("compose")
    assert "no container of the service is running" in said
    assert "`lamella relay` ended with 1" in said


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        (Config(), ("--dry-run",), "nothing is planned"),
        (Config(roles=RolesConfig(policy="overflow")), (), "[roles] policy = 'overflow' changes the counts"),
    ],
)
async def test_where_nobody_plans_or_somebody_else_changes_the_counts_it_says_so(
    config: Config,
    options: tuple[str, ...],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nats_url: str,
    namespace: str,
) -> None:
    configure(config, tmp_path, monkeypatch, nats_url, namespace)
    pretend_docker(tmp_path, monkeypatch)
    assert reason in await refused("compose", *options)


@pytest.mark.anyio
async def test_a_mesh_that_follows_its_plans_by_itself_is_left_alone(
    tmp_path: Path, nats_url: str, namespace: str
) -> None:
    state = StateDirectory(tmp_path / "mesh")
    state.create()
    mesh = MeshConfig(nats_url=nats_url, namespace=namespace)
    state.config_file.write_text(to_toml(Config(mesh=mesh, scaling=ScalingConfig(policy="on"))))
    options = ("--state-dir", str(state.path))
    assert "no mesh runs in" in await refused("local", *options)
    with locked(state):
        assert "this mesh follows its plans already" in await refused("local", *options)


async def refused(target: str, *options: str) -> str:
    """What it said before it ended with status 1."""
    command = (sys.executable, "-m", "services.cli", "autoscale", "--target", target, *options)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(*command, stderr=PIPE, env=environment)
    async with asyncio.timeout(WAIT_S):
        _, said = await process.communicate()
    assert process.returncode == 1, said
    return said.decode()
