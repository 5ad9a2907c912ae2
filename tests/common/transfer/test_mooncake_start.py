"""Starting Mooncake: what it needs, what it is told, and what it says when it cannot."""

import asyncio
import importlib
import os
import socket
import subprocess
import sys

import msgspec
import pytest

from common.config import TransferConfig, TransferProtocol
from common.transfer import EngineStartError, TransferEndpoint
from common.transfer.mooncake import (
    INFINIBAND,
    MooncakeEngine,
    import_engine_module,
    set_environment,
)
from tests.common.transfer.peer_process import REPOSITORY
from tests.common.transfer.writing import LIMITS, sending_endpoint


def test_a_process_has_one_engine() -> None:
    async def scenario() -> None:
        async with sending_endpoint("mooncake"):
            second = TransferEndpoint(TransferConfig(path="mooncake"), LIMITS)
            with pytest.raises(EngineStartError, match="already"):
                await second.start()
            await second.close()

    asyncio.run(scenario())


def test_no_call_reaches_an_engine_that_is_not_running() -> None:
    engine = MooncakeEngine(TransferConfig(), "127.0.0.1", 2)
    with pytest.raises(EngineStartError, match="not running"):
        engine.probe("127.0.0.1:20000")
    with pytest.raises(EngineStartError, match="not running"):
        _ = engine.address


def test_a_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)

    async def scenario() -> None:
        endpoint = TransferEndpoint(TransferConfig(path="mooncake"), LIMITS)
        with pytest.raises(EngineStartError, match="install"):
            await endpoint.start()
        await endpoint.close()

    asyncio.run(scenario())


def test_a_build_that_links_cuda_s_runtime_has_it_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loader finds it where torch's wheels put it; torch itself does."""
    seen: list[str] = []
    engine = object()

    def import_module(name: str) -> object:
        seen.append(name)
        if name == "mooncake.engine" and "torch" not in seen:
            raise ImportError("libcudart.so.13: cannot open shared object file")
        return engine

    monkeypatch.setattr(importlib, "import_module", import_module)
    assert import_engine_module() is engine
    assert seen == ["mooncake.engine", "torch", "mooncake.engine"]


def test_what_torch_does_not_bring_is_named_and_not_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def import_module(name: str) -> object:
        seen.append(name)
        raise ImportError("libmlx5.so.1: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(EngineStartError, match=r"libmlx5\.so\.1.*ibverbs-providers"):
        import_engine_module()
    assert seen == ["mooncake.engine"]


def test_hardware_that_is_not_there_is_an_error_and_not_a_silent_tcp() -> None:
    async def scenario(protocol: TransferProtocol) -> None:
        endpoint = TransferEndpoint(TransferConfig(path="auto", protocol=protocol), LIMITS)
        with pytest.raises(EngineStartError, match=protocol):
            await endpoint.start()
        await endpoint.close()

    if any(INFINIBAND.glob("*")):
        pytest.skip("this machine has RDMA hardware")
    asyncio.run(scenario("rdma"))
    asyncio.run(scenario("nvlink"))


START_IN_RANGE = """
import asyncio, sys
from common.config import TransferConfig
from common.transfer import EngineStartError, TransferEndpoint

async def main():
    low, high = map(int, sys.argv[1:])
    endpoint = TransferEndpoint(TransferConfig(path="mooncake", min_port=low, max_port=high))
    try:
        await endpoint.start()
    except EngineStartError as exc:
        print(exc)
    await endpoint.close()

asyncio.run(main())
"""


def start_in_range(low: int, high: int) -> str:
    """The error of an endpoint started in a process of its own: Mooncake reads its ports once per process."""
    return subprocess.run(
        [sys.executable, "-c", START_IN_RANGE, str(low), str(high)],
        cwd=REPOSITORY,
        env={key: value for key, value in os.environ.items() if not key.startswith("MC_")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    ).stdout


def test_ports_that_are_all_taken_are_an_error_with_mooncakes_own_reason() -> None:
    for port in range(18_000, 19_000, 2):
        try:
            with (
                socket.create_server(("0.0.0.0", port)),
                socket.create_server(("0.0.0.0", port + 1)),
            ):
                error = start_in_range(port, port + 1)
            break
        except OSError:
            continue
    assert f"ports {port}-{port + 1}" in error
    assert "port" in error.split("): ")[1]


def test_a_port_range_that_mooncake_would_ignore_is_an_error() -> None:
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        low, high = map(int, file.read().split())
    assert "ip_local_port_range" in start_in_range(low, high)


def test_the_environment_is_complete_and_the_operators_settings_stay() -> None:
    environ = {"MC_LOG_DIR": "/var/log", "MC_TCP_PROTO": "1", "MC_LOG_LEVEL": "INFO"}
    set_environment(environ, TransferConfig(min_port=21_000, max_port=22_000), progress_timeout_s=3)
    assert "MC_LOG_DIR" not in environ
    assert "MC_TCP_PROTO" not in environ
    assert environ["MC_LOG_LEVEL"] == "INFO"
    assert environ["MC_FORCE_TCP"] == "1"
    assert (environ["MC_MIN_RPC_PORT"], environ["MC_MAX_RPC_PORT"]) == ("21000", "22000")
    assert int(environ["MC_TRANSFER_TIMEOUT"]) > int(environ["MC_TCP_PROGRESS_TIMEOUT_SEC"]) == 3


def test_nvlink_and_rdma_do_not_force_tcp() -> None:
    for protocol, has_nvlink in (("rdma", False), ("nvlink", True)):
        environ = {"MC_FORCE_TCP": "1"}
        config = msgspec.convert({"protocol": protocol}, TransferConfig)
        set_environment(environ, config, progress_timeout_s=3)
        assert "MC_FORCE_TCP" not in environ
        assert ("MC_INTRANODE_NVLINK" in environ) is has_nvlink
