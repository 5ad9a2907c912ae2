"""A real service process over real servers: readiness, metrics, lease, drain, second signal, failure."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.bus import Bus
from common.messages import MemberRecord, ServiceRecord
from common.store import Store
from common.subjects import Subjects
from services.launcher import embedded
from tests.common.small_service import Fail, Sleepy, Wake, Woken

REPOSITORY = Path(__file__).resolve().parents[2]
WAIT_S = 30.0


class Process:
    """A running small service and its log."""

    def __init__(self, environment: dict[str, str], log_file: Path) -> None:
        self.log_file = log_file
        with log_file.open("wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "tests.common.small_service"],
                env={**os.environ, **environment},
                cwd=REPOSITORY,
                stderr=log,
            )

    def events(self) -> list[dict[str, object]]:
        lines = self.log_file.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def wait_event(self, name: str) -> dict[str, object]:
        def found() -> list[dict[str, object]]:
            return [event for event in self.events() if event["event"] == name]

        self.wait(found)
        return found()[0]

    def wait(self, condition: Callable[[], object]) -> None:
        """Until ``condition`` holds; the process's end is the clock."""
        for _ in range(round(WAIT_S / 0.02)):
            if condition():
                return
            try:
                self.popen.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
            if condition():
                return
            raise AssertionError(f"the service ended: {self.log_file.read_text()}")
        raise AssertionError(f"waited {WAIT_S} s: {self.log_file.read_text()}")

    def stop(self) -> int:
        self.popen.terminate()
        return self.popen.wait(WAIT_S)


@contextmanager
def small_service(tmp_path: Path, **environment: str) -> Iterator[Process]:
    process = Process(environment, tmp_path / "service.log")
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.wait()


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def members(url: str, namespace: str) -> list[MemberRecord]:
    async def read() -> list[MemberRecord]:
        store = Store(url, namespace)
        try:
            return await store.members()
        finally:
            await store.close()

    return asyncio.run(read())


@pytest.fixture
def environment(nats_url: str, redis_url: str, namespace: str) -> dict[str, str]:
    return {
        "NATS_URL": nats_url,
        "REDIS_URL": redis_url,
        "LAMELLA_NAMESPACE": namespace,
        "LAMELLA_SERVICE_ID": "small",
    }


def test_a_service_becomes_ready_registers_its_real_port_and_leaves(
    tmp_path: Path, environment: dict[str, str], redis_url: str, namespace: str
) -> None:
    with small_service(tmp_path, **environment) as process:
        url = str(process.wait_event("service_ready")["url"])
        assert get(f"{url}/health/live")[0] == 200
        assert get(f"{url}/health/ready") == (200, '{"status":"ready"}')
        status, metrics = get(f"{url}/metrics")
        assert status == 200
        for name in ("lamella_build_info", "lamella_bus_reconnects_total", "process_cpu_seconds_total"):
            assert name in metrics
        [record] = members(redis_url, namespace)
        assert record.http_url == url
        assert process.stop() == 0
        assert members(redis_url, namespace) == []
        assert "closed" in process.log_file.read_text()


def test_a_drain_waits_for_the_work_at_hand_and_is_not_ready_meanwhile(
    tmp_path: Path, environment: dict[str, str], nats_url: str, redis_url: str, namespace: str
) -> None:

    async def wait_draining() -> None:
        """Whoever looks at the mesh sees it within a heartbeat. Over one connection: to make new ones in turn
        kept a busy machine from answering in time."""
        store = Store(redis_url, namespace)
        try:
            while True:
                [record] = await store.members()
                assert isinstance(record, ServiceRecord)
                if record.is_draining:
                    return
                await asyncio.sleep(0.02)
        finally:
            await store.close()

    with small_service(tmp_path, **environment) as process:
        url = str(process.wait_event("service_ready")["url"])

        async def work() -> None:
            bus = Bus(nats_url, name="client", subjects=Subjects(namespace))
            await bus.connect()
            call = asyncio.create_task(bus.call(f"{namespace}.sleep", Sleepy(), Woken, WAIT_S))
            await bus.flush()
            await bus.flush()
            process.popen.send_signal(signal.SIGTERM)
            await asyncio.to_thread(process.wait_event, "service_draining")
            status, reasons = await asyncio.to_thread(get, f"{url}/health/ready")
            assert status == 503
            assert "draining" in reasons
            await wait_draining()
            bus.publish(f"{namespace}.wake", Wake())
            assert isinstance(await call, Woken)
            await bus.close()

        asyncio.run(work())
        assert process.popen.wait(WAIT_S) == 0


def test_a_second_signal_cuts_the_drain_short(
    tmp_path: Path, environment: dict[str, str], nats_url: str, namespace: str
) -> None:
    with small_service(tmp_path, **environment) as process:
        process.wait_event("service_ready")

        async def work() -> None:
            bus = Bus(nats_url, name="client", subjects=Subjects(namespace))
            await bus.connect()
            call = asyncio.create_task(bus.call(f"{namespace}.sleep", Sleepy(), Woken, 3600))
            await bus.flush()
            await bus.flush()
            process.popen.send_signal(signal.SIGTERM)
            await asyncio.to_thread(process.wait_event, "service_draining")
            process.popen.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.popen.wait, WAIT_S) == 0
            call.cancel()
            await bus.close()

        asyncio.run(work())


def test_a_task_that_fails_ends_the_process_with_its_reason(
    tmp_path: Path, environment: dict[str, str], nats_url: str, redis_url: str, namespace: str
) -> None:
    async def work() -> None:
        bus = Bus(nats_url, name="client", subjects=Subjects(namespace))
        await bus.connect()
        bus.publish(f"{namespace}.fail", Fail())
        await bus.close()

    with small_service(tmp_path, **environment) as process:
        process.wait_event("service_ready")
        asyncio.run(work())
        assert process.popen.wait(WAIT_S) == 1
        assert "the thread died" in str(process.wait_event("service_failed")["error"])
        assert members(redis_url, namespace) == []


def test_a_store_that_is_away_at_the_start_delays_readiness_only(
    tmp_path: Path, environment: dict[str, str], namespace: str
) -> None:
    server = embedded.prepare_redis(tmp_path)
    with small_service(tmp_path, **{**environment, "REDIS_URL": server.url}) as process:
        url = str(process.wait_event("service_ready")["url"])
        status, reasons = get(f"{url}/health/ready")
        assert (status, json.loads(reasons)["reasons"]) == (503, {"store": "not registered"})
        popen = embedded.start(server)
        try:
            process.wait(lambda: get(f"{url}/health/ready")[0] == 200)
            assert len(members(server.url, namespace)) == 1
        finally:
            embedded.stop(popen)
        assert process.stop() == 0


def test_a_newer_incarnation_ends_the_older_one(
    tmp_path: Path, environment: dict[str, str], redis_url: str, namespace: str
) -> None:
    with small_service(tmp_path, **environment) as older:
        older.wait_event("service_ready")
        directory = tmp_path / "newer"
        directory.mkdir()
        with small_service(directory, **environment) as newer:
            newer.wait_event("service_ready")
            assert older.popen.wait(WAIT_S) == 1
            assert "newer incarnation" in str(older.wait_event("service_failed")["error"])
            [record] = members(redis_url, namespace)
            assert record.pid == newer.popen.pid


def test_a_bus_that_is_not_there_fails_the_start_by_name(tmp_path: Path, environment: dict[str, str]) -> None:
    address = environment["NATS_URL"].rpartition("@")[2]
    with small_service(tmp_path, **{**environment, "NATS_URL": f"nats://wrong@{address}"}) as process:
        assert process.popen.wait(WAIT_S) == 1
        assert address in str(process.wait_event("service_failed")["error"])
