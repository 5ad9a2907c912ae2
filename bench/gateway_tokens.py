"""How many tokens a second one gateway process carries from NATS to SSE, and how much later they arrive.

    python bench/gateway_tokens.py [--rates 10000,20000,40000] [--streams 256] [--instances 4] [--seconds 4]
                                   [--chat]

Real nats-server and Valkey, a real gateway process, real HTTP connections. In place of scheduler and
instances stands one process that answers submissions and publishes, for each of ``--instances`` whose steps
are spread evenly over time, one TokenBatch a step with a token for every stream it holds (64 each is the
default of ``instance.max_decode_batch``). A token's delay is from its batch's publish to its event's arrival
in the client.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import uvloop

from common.bus import Bus
from common.config import Config, GatewayConfig, MeshConfig, ModelConfig, ServiceConfig
from common.config_file import to_toml
from common.errors import ServiceError
from common.ids import GatewayId, InstanceId, RequestId, new_incarnation
from common.latency import percentiles
from common.messages import FinishReason, Placement, SampledToken, SubmitRequest, TokenBatch, TokenEvent
from common.model.tokens import Tokenizer
from common.subjects import Subjects
from services.launcher import embedded
from services.model_directory import model_directory

START_TIMEOUT_S = 60.0
PROMPT = [11, 12, 13, 14]
WORD = " the"
"""The one token that is streamed, so that the client counts tokens whether or not events were merged."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rates", default="10000,20000,40000,60000", help="tokens per second, all streams")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--publish", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.publish is not None:
        uvloop.run(publish(json.loads(options.publish.read_text())))
        return
    print(f"{'tokens/s':>9} {'carried/s':>9} {'gateway CPU us/token':>21} {'delay ms p50':>13} {'p99':>7}")
    with tempfile.TemporaryDirectory() as name, running_gateway(Path(name)) as gateway:
        for rate in (float(each) for each in options.rates.split(",")):
            result = run_once(gateway, rate, options)
            p50_s, p99_s = percentiles(result.delays_s, (50.0, 99.0))
            cpu_us = result.cpu_s / result.tokens * 1e6
            carried = result.tokens / result.elapsed_s
            print(f"{rate:>9.0f} {carried:>9.0f} {cpu_us:>21.2f} {p50_s * 1e3:>13.2f} {p99_s * 1e3:>7.2f}")


@dataclass(frozen=True, slots=True)
class Gateway:
    directory: Path
    config: Config
    process: subprocess.Popen[bytes]
    port: int


@dataclass(frozen=True, slots=True)
class Result:
    tokens: int
    elapsed_s: float
    cpu_s: float
    delays_s: list[float]


@contextmanager
def running_gateway(directory: Path) -> Iterator[Gateway]:
    """nats-server, Valkey and one gateway on a free port; all stopped at the end."""
    servers = []
    for name, prepare in (("nats", embedded.prepare_nats), ("redis", embedded.prepare_redis)):
        folder = directory / name
        folder.mkdir()
        servers.append(prepare(folder))
    processes = [embedded.start(server) for server in servers]
    config = Config(
        mesh=MeshConfig(namespace="bench", nats_url=servers[0].url, redis_url=servers[1].url),
        service=ServiceConfig(service_id="gateway-0", port=free_port()),
        model=ModelConfig(directory=model_directory(ModelConfig())),
        gateway=GatewayConfig(max_open_requests=4096),
    )
    path = directory / "gateway.toml"
    path.write_text(to_toml(config))
    command = [sys.executable, "-m", "services.cli", "serve", "gateway", "--config", str(path)]
    with (directory / "gateway.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment())
    try:
        wait_ready(config.service.port, directory / "gateway.log")
        yield Gateway(directory, config, process, config.service.port)
    finally:
        process.terminate()
        process.wait()
        for each in processes:
            embedded.stop(each)


def run_once(gateway: Gateway, rate: float, options: argparse.Namespace) -> Result:
    streams: int = options.streams
    instances: int = options.instances
    steps = max(1, round(rate / streams * options.seconds))
    plan = gateway.directory / "plan.json"
    times = gateway.directory / "times.json"
    ready = gateway.directory / "ready"
    ready.unlink(missing_ok=True)
    plan.write_text(
        json.dumps(
            {
                "nats_url": gateway.config.mesh.nats_url,
                "model": str(gateway.config.model.directory),
                "streams": streams,
                "instances": instances,
                "steps": steps,
                "step_s": streams / rate,
                "times": str(times),
                "ready": str(ready),
            }
        )
    )
    command = [sys.executable, __file__, "--publish", str(plan)]
    with subprocess.Popen(command, env=environment()) as publisher:
        wait_until(ready.exists, "the publisher")
        arrivals, cpu_s = uvloop.run(read_streams(gateway, streams, steps, chat=options.chat))
        publisher.wait()
    published: list[list[float]] = json.loads(times.read_text())
    delays_s = [
        arrived_s - sent_s
        for index, stream in enumerate(arrivals)
        for arrived_s, sent_s in zip(stream, published[index % instances], strict=True)
    ]
    elapsed_s = max(each[-1] for each in arrivals) - min(each[0] for each in published)
    return Result(streams * steps, elapsed_s, cpu_s, delays_s)


# the client

COUNTED = WORD.encode()
END = b"data: [DONE]"
TAIL_BYTES = len(END) - 1


@dataclass(slots=True)
class StreamClient(asyncio.Protocol):
    """One connection and one streamed request; notes when each token's event came."""

    request: bytes
    begun: asyncio.Future[None]
    over: asyncio.Future[None]
    arrivals_s: list[float] = field(default_factory=list)
    _tail: bytes = b""
    _tail_words: int = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        cast(asyncio.Transport, transport).write(self.request)

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        data = self._tail + data
        self._tail = data[-TAIL_BYTES:]
        # A word that is whole in the tail was counted when it came.
        self.arrivals_s.extend([now_s] * (data.count(COUNTED) - self._tail_words))
        self._tail_words = self._tail.count(COUNTED)
        if self.arrivals_s and not self.begun.done():
            self.begun.set_result(None)
        if END in data and not self.over.done():
            self.over.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_exception(exc or ConnectionError(f"closed: {self._tail[-300:]!r}"))


def _same(client: StreamClient) -> StreamClient:
    return client


async def read_streams(
    gateway: Gateway, streams: int, steps: int, *, chat: bool
) -> tuple[list[list[float]], float]:
    """Arrival times of every stream's tokens, and the gateway's CPU seconds from the first to the last."""
    loop = asyncio.get_running_loop()
    content: dict[str, object] = (
        {"messages": [{"role": "user", "content": "Hello"}]} if chat else {"prompt": PROMPT}
    )
    path = "/v1/chat/completions" if chat else "/v1/completions"
    clients = []
    for index in range(streams):
        # The seed tells the publisher which stream a request is.
        body = json.dumps(
            {
                "model": "default",
                "stream": True,
                "max_tokens": steps,
                "ignore_eos": True,
                "seed": index,
                **content,
            }
        )
        headers = f"host: bench\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        request = f"POST {path} HTTP/1.1\r\n{headers}{body}".encode()
        client = StreamClient(request, loop.create_future(), loop.create_future())
        await loop.create_connection(partial(_same, client), "127.0.0.1", gateway.port)
        clients.append(client)
    await clients[0].begun
    started_s = cpu_seconds(gateway.process.pid)
    await asyncio.gather(*(client.over for client in clients))
    cpu_s = cpu_seconds(gateway.process.pid) - started_s
    return [client.arrivals_s for client in clients], cpu_s


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# the publisher: scheduler and decode instance in one


async def publish(plan: dict[str, object]) -> None:
    """Places every request on itself; when all are there, one batch a step and instance until the end."""
    subjects = Subjects("bench")
    bus = Bus(str(plan["nats_url"]), name="publisher", subjects=subjects)
    await bus.connect()
    streams, steps, step_s = int(str(plan["streams"])), int(str(plan["steps"])), float(str(plan["step_s"]))
    instances = [InstanceId(f"decode-{number}") for number in range(int(str(plan["instances"])))]
    incarnation = new_incarnation()
    placed: dict[int, tuple[RequestId, GatewayId]] = {}
    complete = asyncio.Event()

    async def place(message: SubmitRequest) -> Placement:
        index = message.request.sampling.seed
        placed[index] = (message.request.request_id, message.request.gateway_id)
        if len(placed) == streams:
            complete.set()
        instance = instances[index % len(instances)]
        return Placement(instance, incarnation, instance, incarnation)

    await bus.serve(subjects.submit(), SubmitRequest, place)
    token = SampledToken(Tokenizer(Path(str(plan["model"]))).encode(WORD)[0])
    Path(str(plan["ready"])).touch()
    await complete.wait()
    # The gateway has the last placement, too, before tokens come.
    await bus.flush()
    subject = subjects.gateway_events(placed[0][1])
    times: list[list[float]] = [[] for _ in instances]
    due_s = time.monotonic() + 0.2
    for step in range(steps):
        reason: FinishReason | None = "length" if step == steps - 1 else None
        for number, instance in enumerate(instances):
            held = [placed[index][0] for index in range(number, streams, len(instances))]
            batch = TokenBatch(instance, tuple(TokenEvent(each, 0, step, token, reason) for each in held))
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            times[number].append(time.monotonic())
            bus.publish(subject, batch)
            due_s += step_s / len(instances)
    await bus.flush()
    Path(str(plan["times"])).write_text(json.dumps(times))
    await bus.close()


# processes


def environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[1])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_ready(port: int, log: Path) -> None:
    def is_ready() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        wait_until(is_ready, "the gateway")
    except ServiceError as exc:
        raise ServiceError(f"{exc}: {log.read_text()[-2000:]}") from exc


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise ServiceError(f"{what} was not ready within {START_TIMEOUT_S} s")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
