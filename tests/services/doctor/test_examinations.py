"""The doctor's own looks at real servers, ports, memory and libraries."""

import socket
from pathlib import Path

import pytest

from common.config import Config, InstanceConfig, MeshConfig
from services.doctor.child import ask_child
from services.doctor.collector import examine_collector, is_installed
from services.doctor.examination import planned
from services.doctor.machine import examine_shared_memory
from services.doctor.servers import examine_embedded, examine_gateway_port, examine_nats, examine_redis
from services.launcher import embedded
from tests.otlp_receiver import otlp_receiver


@pytest.mark.anyio
async def test_servers_that_answer_are_good(nats_url: str, redis_url: str, namespace: str) -> None:
    nats, redis = await examine_nats(nats_url, namespace), await examine_redis(redis_url, namespace)
    assert (nats.verdict, redis.verdict) == ("good", "good"), (nats, redis)


@pytest.mark.anyio
async def test_a_wrong_password_is_named_and_never_told(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    nats = await examine_nats(nats_url.replace("nats://", "nats://wr0ng"), namespace)
    redis = await examine_redis(redis_url.replace("redis://:", "redis://:wr0ng"), namespace)
    for found in (nats, redis):
        assert found.verdict == "problem", found
        assert found.advice is not None
        assert "wr0ng" not in found.seen
    assert "authorization" in nats.seen.lower()
    assert "password" in redis.seen


def test_servers_of_its_own_are_started_once_and_end(tmp_path: Path) -> None:
    made: list[embedded.EmbeddedServer] = []

    def prepare(directory: Path) -> embedded.EmbeddedServer:
        made.append(embedded.prepare_redis(directory))
        return made[0]

    found = examine_embedded("Redis", prepare, "--redis")
    assert found.verdict == "good", found
    assert not embedded.is_answering(made[0])
    assert not made[0].log_file.parent.exists()


def test_a_collector_that_takes_no_traces_is_worth_a_note() -> None:
    with otlp_receiver() as receiver:
        found = examine_collector(receiver.url.replace("://", "://somebody:s3cret@"))
        assert found.verdict == "good", found
        assert receiver.bodies == [b""]
    found = examine_collector(receiver.url.replace("://", "://somebody:s3cret@"))
    assert (found.verdict, "s3cret" in found.seen) == ("note", False)
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in (found.advice or "")


def test_a_library_is_looked_for_without_being_loaded() -> None:
    assert is_installed("common.spans")
    assert not is_installed("no_such_package.exporter.http")


def test_a_taken_port_is_a_problem_and_a_free_one_is_left_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = examine_gateway_port("127.0.0.1", port)
    assert found.verdict == "problem"
    assert "lamella up --port" in (found.advice or "")
    assert examine_gateway_port("127.0.0.1", port).verdict == "good"
    assert examine_gateway_port("127.0.0.1", port).verdict == "good", "it was given back"


def test_an_address_of_another_machine_is_a_problem_that_no_other_port_solves() -> None:
    found = examine_gateway_port("192.0.2.1", 8000)
    assert (found.verdict, "service.host = '192.0.2.1'" in found.seen) == ("problem", True)
    assert "[service] host" in (found.advice or "")


def test_memory_is_shared_with_another_process_as_instances_do() -> None:
    found = examine_shared_memory(Config(instance=InstanceConfig(kv_bytes=1 << 20)))
    assert found.verdict == "good", found
    too_much = examine_shared_memory(Config(instance=InstanceConfig(kv_bytes=1 << 62)))
    assert too_much.verdict == "problem"
    assert "kv_bytes" in (too_much.advice or "")


def test_why_a_child_could_not_look_is_its_answer() -> None:
    answer = ask_child("memory", "1", '{"name": "x", "base": 0, "nbytes": 4096}')
    assert not answer.is_good
    assert answer.text == "region 'x' of process 1 is not shared memory"


def test_settings_and_environment_name_servers_and_what_nobody_set_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("NATS_URL", "REDIS_URL"):
        monkeypatch.delenv(variable, raising=False)
    nowhere = tmp_path / "none"
    plan = planned(None, nowhere, None, None, 8000)
    assert (plan.nats_url, plan.redis_url, plan.port) == (None, None, 8000)
    file = tmp_path / "mesh.toml"
    file.write_text(f'[mesh]\nnats_url = "{MeshConfig().nats_url}"\n')
    plan = planned(file, nowhere, None, None, 8000)
    assert (plan.nats_url, plan.redis_url) == (MeshConfig().nats_url, None)
    monkeypatch.setenv("NATS_URL", "nats://environment:4222")
    assert planned(file, nowhere, None, None, 8000).nats_url == "nats://environment:4222"
    assert planned(file, nowhere, "nats://option:4222", None, 8000).nats_url == "nats://option:4222"
    assert planned(file, nowhere, None, "redis://option", 8000).redis_url == "redis://option"
