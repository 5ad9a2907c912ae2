"""NATS, Redis and the ports: what a mesh here would connect to and listen on.

Servers that were named are asked over the same wires that services use. Where none was, `lamella up` brings
its own, and those are started once, in a directory that goes afterwards.
"""

import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common.config import TransferConfig
from common.errors import BusError, ConfigError, LauncherError, StoreError
from common.listening import SERVICE, bind
from common.subjects import Subjects
from services.doctor.findings import Finding, good, note, problem
from services.launcher import embedded

CONNECT_TIMEOUT_S = 3.0
LEAST_MESSAGE_BYTES = 1 << 20
"""The longest prompts as token ids: what the embedded server takes."""
CLOCK_TOLERANCE_S = 0.5
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def examine_embedded(
    subject: str, prepare: Callable[[Path], embedded.EmbeddedServer], option: str
) -> Finding:
    with tempfile.TemporaryDirectory(prefix="lamella-doctor-") as directory:
        started_s = time.monotonic()
        try:
            server = prepare(Path(directory))
            embedded.stop(embedded.start(server))
        except LauncherError as exc:
            return problem(subject, str(exc), f"run `make setup`, or name a server of yours with {option}")
        took_s = time.monotonic() - started_s
    binary = Path(server.command[0]).name
    return good(
        subject, f"none named; `lamella up` brings its own: {binary} started and ended in {took_s:.2f} s"
    )


async def examine_nats(url: str, namespace: str) -> Finding:
    from common.bus import Bus

    bus = Bus(url, name=f"doctor-{secrets.token_hex(3)}", subjects=Subjects(namespace))
    try:
        await bus.connect(CONNECT_TIMEOUT_S)
        started_s = time.monotonic()
        await bus.flush()
        took_s = time.monotonic() - started_s
    except BusError as exc:
        return problem(
            "NATS",
            str(exc),
            "start it, or correct --nats, NATS_URL or `[mesh] nats_url` (nats://USER:PASSWORD@HOST:PORT);"
            " without any of them `lamella up` brings its own",
        )
    finally:
        await bus.close()
    if bus.max_message_bytes < LEAST_MESSAGE_BYTES:
        return note(
            "NATS",
            f"takes messages of {bus.max_message_bytes} bytes",
            f"set its max_payload to {LEAST_MESSAGE_BYTES}: longer prompts would be turned away",
        )
    return good("NATS", f"answers within {took_s * 1e3:.1f} ms")


async def examine_redis(url: str, namespace: str) -> Finding:
    from common.store import Store

    store = Store(url, namespace)
    try:
        await store.connect()
        started_s = time.monotonic()
        server_time_s = await store.server_time_s()
        took_s = time.monotonic() - started_s
    except StoreError as exc:
        return problem(
            "Redis",
            str(exc),
            "start it, or correct --redis, REDIS_URL or `[mesh] redis_url` (redis://:PASSWORD@HOST:PORT/0);"
            " without any of them `lamella up` brings its own",
        )
    finally:
        await store.close()
    behind_s = server_time_s - time.time()
    if abs(behind_s) > CLOCK_TOLERANCE_S + took_s:
        return note(
            "Redis",
            f"its clock is {behind_s:+.1f} s from this machine's",
            "synchronise both (NTP): serving does not depend on it, but logs and traces do",
        )
    return good("Redis", f"answers within {took_s * 1e3:.1f} ms, and its clock is this machine's")


def examine_gateway_port(host: str, port: int) -> Finding:
    """Listens there for a moment, as the gateway would."""
    try:
        bind(host, port).close()
    except ConfigError as exc:
        advice = "`lamella up --port N` takes another (0: any); `ss -ltnp` says who has it"
        if exc.key == SERVICE.host:
            advice = "correct `[service] host` or LAMELLA_HOST; 0.0.0.0 is every address of this machine"
        return problem("gateway's port", str(exc), advice)
    return good("gateway's port", f"{host}:{port} is free")


def examine_transfer_ports(transfer: TransferConfig) -> Finding:
    words = EPHEMERAL_PORTS.read_text(encoding="ascii").split()
    return judge_transfer_ports(transfer, int(words[0]), int(words[1]))


def judge_transfer_ports(transfer: TransferConfig, first_ephemeral: int, last_ephemeral: int) -> Finding:
    """Mooncake takes any other port where its range touches the one that the kernel gives out."""
    subject, chosen = "transfer ports", f"{transfer.min_port}-{transfer.max_port}"
    if transfer.min_port <= last_ephemeral and first_ephemeral <= transfer.max_port:
        seen = f"{chosen} touches the kernel's own {first_ephemeral}-{last_ephemeral}"
        advice = "set `[transfer] min_port` and `max_port` to a range outside it, for Mooncake"
        return problem(subject, seen, advice) if transfer.path == "mooncake" else note(subject, seen, advice)
    return good(subject, f"{chosen} is left alone by the kernel ({first_ephemeral}-{last_ephemeral})")
