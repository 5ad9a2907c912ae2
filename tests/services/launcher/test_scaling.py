"""More and fewer processes of a local mesh, and which end: as operators and schedulers wish."""

import asyncio
import contextlib
import urllib.request
from pathlib import Path

import pytest

from common.bus import Bus
from common.config_file import load_config
from common.errors import ConfigError, InvalidRequest, LauncherError, NoResponder
from common.messages import Acknowledged, DrainWish, ScaleWish
from common.scaling import ScaledRole
from common.subjects import Subjects
from services.connectors.local import LocalConnector
from services.launcher import control, local
from services.launcher.control import AskStatus
from services.launcher.state_directory import StateDirectory
from services.launcher.wishes import LastOfPhase, RoleCount, parse_wishes
from tests.services.launcher.small_mesh import CONFIG, ONE_EACH, WAIT_S, ids, plan, scale


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
    with pytest.raises(LastOfPhase, match="no instance would be left that does decode"):
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


def test_how_many_there_are_is_told_of_each_that_is_there(running: Path) -> None:
    standing = asyncio.run(LocalConnector(running).standing())
    roles: list[ScaledRole] = ["gateway", "scheduler", "prefill", "decode"]
    assert (standing.counts, standing.plan) == ([RoleCount(role, 1, 1) for role in roles], None)


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
        # Wishes have no force, so none is spoken of.
        with pytest.raises(InvalidRequest, match=r"without one no request is served$"):
            await wish(subjects.admin_drain(), DrainWish("decode-0"))
    finally:
        await bus.close()
