"""What is said to docker compose, and what is made of its answers."""

import asyncio
from pathlib import Path

import pytest

from common.errors import ConfigError, LauncherError
from services.connectors.compose import ComposeConnector
from services.connectors.connector import Connector, Standing
from services.connectors.local import LocalConnector
from services.connectors.programs import ProgramFailed, output_of
from services.connectors.targets import Target, connector_of
from services.launcher.local import MeshNotRunning
from services.launcher.state_directory import StateDirectory, locked
from services.launcher.wishes import LastOfPhase, RoleChange, RoleCount, parse_wishes
from tests.services.connectors.programs import pretend_docker

UP = "compose up --detach --wait --no-recreate --no-deps --wait-timeout 300"


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return pretend_docker(tmp_path, monkeypatch)


def apply(*wishes: str) -> list[RoleChange]:
    return asyncio.run(ComposeConnector().apply(parse_wishes(wishes)))


def found(target: Target, state_dir: Path) -> Connector:
    return asyncio.run(connector_of(target, state_dir, "lamella"))


def scalings(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if line.startswith("compose up")]


def test_counts_and_changes_become_one_command_that_touches_nothing_else(docker: Path) -> None:
    assert apply("prefill=2", "decode=-1") == [
        RoleChange("prefill", 1, 2, ("lamella-prefill-2",)),
        RoleChange("decode", 2, 1, (), ("lamella-decode-2",)),
    ]
    assert scalings(docker) == [f"{UP} --scale prefill=2 --scale decode=1 prefill decode"]


def test_a_container_that_has_ended_is_none(docker: Path) -> None:
    assert apply("decode=+1") == [RoleChange("decode", 2, 3, ("lamella-decode-3",))]


def test_where_new_containers_do_not_become_healthy_there_are_as_many_as_before(docker: Path) -> None:
    with pytest.raises(ProgramFailed, match="ended with 1: container lamella-decode-4 is unhealthy"):
        apply("decode=4", "prefill=2")
    assert [line.partition("--scale ")[2] for line in scalings(docker)] == [
        "decode=4 --scale prefill=2 decode prefill",
        "decode=2 --scale prefill=1 decode prefill",
    ]


def test_the_last_container_of_a_phase_ends_only_by_force_or_beside_others_that_do_it(docker: Path) -> None:
    with pytest.raises(LastOfPhase, match="no instance would be left that does prefill"):
        apply("prefill=0", "decode=3")
    with pytest.raises(LauncherError, match="no instance would be left that does prefill"):
        asyncio.run(ComposeConnector().drain("lamella-prefill-1"))
    assert scalings(docker) == []
    apply("prefill=0", "decode=0", "mixed=1")
    assert asyncio.run(ComposeConnector(is_forced=True).apply(parse_wishes(["mixed=0"])))[0].after == 0


def test_a_service_on_a_gpu_does_what_its_role_does(docker: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text('{"prefill-gpu": 1, "decode": 1, "mixed": 1}')
    assert apply("mixed=0") == [RoleChange("mixed", 1, 0, (), ("lamella-mixed-1",))]
    assert len(scalings(docker)) == 1


def test_a_role_on_gpus_is_not_given_containers_on_cpus(docker: Path, tmp_path: Path) -> None:
    """A plan of three where two have GPUs means one more of these."""
    (tmp_path / "state").write_text('{"prefill": 1, "decode": 1, "decode-gpu": 2}')
    with pytest.raises(LauncherError, match=r"decode computes on a GPU here \(lamella-decode-gpu-1\)"):
        apply("prefill=2", "decode=3")
    assert scalings(docker) == []


@pytest.mark.parametrize("name", ["lamella-decode-gpu-1", "decode-0f8a7a8a0d5c"])
def test_a_container_on_a_gpu_is_drained_unless_it_is_the_last(
    docker: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "state").write_text('{"prefill": 1, "decode-gpu": 1}')
    with pytest.raises(LauncherError, match="no instance would be left that does decode"):
        asyncio.run(ComposeConnector().drain(name))
    (tmp_path / "state").write_text('{"prefill": 1, "decode-gpu": 1, "mixed": 1}')
    asyncio.run(ComposeConnector().drain(name))
    assert docker.read_text().splitlines()[-2:] == ["stop lamella-decode-gpu-1", "rm lamella-decode-gpu-1"]


@pytest.mark.parametrize(
    ("wish", "said"), [("decode=-3", "must be 0..64"), ("gateway=0", "nobody else takes requests")]
)
def test_a_count_that_cannot_be_is_refused_and_nothing_is_done(docker: Path, wish: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        apply(wish)
    assert scalings(docker) == []


@pytest.mark.parametrize("name", ["lamella-decode-2", "decode-0f8a7a8a0d5c"])
def test_one_container_is_drained_by_its_own_name_or_its_service_s(docker: Path, name: str) -> None:
    asyncio.run(ComposeConnector().drain(name))
    ended = "lamella-decode-2" if name == "lamella-decode-2" else "lamella-decode-1"
    assert docker.read_text().splitlines()[1:] == [f"stop {ended}", f"rm {ended}"]


@pytest.mark.parametrize("name", ["lamella-decode-9", "lamella-nats-1", "nobody"])
def test_what_is_no_container_of_the_mesh_cannot_be_drained(docker: Path, name: str) -> None:
    with pytest.raises(LauncherError, match=f"no container of this project is {name}"):
        asyncio.run(ComposeConnector().drain(name))
    assert len(docker.read_text().splitlines()) == 1


def test_how_many_there_are_is_told_with_those_on_gpus_and_nothing_is_changed(
    docker: Path, tmp_path: Path
) -> None:
    (tmp_path / "state").write_text('{"nats": 1, "gateway": 1, "prefill": 1, "prefill-gpu": 1, "decode": 4}')
    assert asyncio.run(ComposeConnector().standing()) == Standing(
        [RoleCount("gateway", 1, 1), RoleCount("prefill", 2, 2), RoleCount("decode", 3, 4)]
    )
    assert docker.read_text().splitlines() == ["compose ps --all --format json"]


@pytest.mark.usefixtures("docker")
def test_where_no_container_of_the_mesh_runs_nothing_is_counted(tmp_path: Path) -> None:
    (tmp_path / "state").write_text('{"nats": 1}')
    with pytest.raises(LauncherError, match="no container of the mesh runs in this directory"):
        asyncio.run(ComposeConnector().standing())


@pytest.mark.usefixtures("docker")
def test_what_runs_here_is_found_and_a_mesh_of_this_machine_comes_first(tmp_path: Path) -> None:
    directory = tmp_path / "mesh"
    assert found("auto", directory) == ComposeConnector()
    state = StateDirectory(directory)
    state.create()
    with locked(state):
        assert found("auto", directory) == LocalConnector(directory)
        assert found("compose", directory) == ComposeConnector()


def test_where_nothing_runs_both_places_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MeshNotRunning, match=r"no mesh runs in .*/mesh, and none under docker compose"):
        found("auto", tmp_path / "mesh")


def test_a_program_that_is_not_there_hangs_or_fails_says_so() -> None:
    for command, timeout_s, said in (
        (("no-such-program",), 5.0, "no-such-program cannot be run here"),
        (("sleep", "60"), 0.1, "sleep 60: not done after 0.1 s"),
        (("sh", "-c", "echo the reason >&2; exit 3"), 5.0, "ended with 3: the reason"),
    ):
        with pytest.raises(ProgramFailed, match=said):
            asyncio.run(output_of(*command, timeout_s=timeout_s))
