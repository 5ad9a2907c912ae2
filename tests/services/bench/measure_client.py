"""How many stream events a second one core of the client takes; run by hand, not a test.

``python -m tests.services.bench.measure_client [STREAMS] [TOKENS]`` starts a server in a process of its own
that sends one event at a time to every stream in turn, as a decoding server does, and prints the rate. The
client's limit is its rate over its share of a core.
"""

import asyncio
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection

import uvloop

from services.bench.config import BenchConfig
from services.bench.lengths import FixedLength
from services.bench.run import run_bench

EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1750000000,"model":"words",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'
)
LAST = EVENT.replace(b'"finish_reason":null', b'"finish_reason":"length"')
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MODELS = b'{"data":[{"id":"words"}]}'


def frame(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class TokenServer(asyncio.Protocol):
    """Answers every POST with ``tokens`` events; ``streams`` is shared with the loop that writes them."""

    def __init__(self, tokens: int, streams: dict[asyncio.Transport, int]) -> None:
        self._tokens = tokens
        self._streams = streams
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.pop(self._transport, None)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        if not separator or len(body) < length:
            return
        self._buffer = b""
        if head.startswith(b"GET"):
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(MODELS), MODELS))
            return
        self._transport.write(HEAD)
        self._streams[self._transport] = self._tokens


async def serve(tokens: int, ready: Connection) -> None:
    streams: dict[asyncio.Transport, int] = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: TokenServer(tokens, streams), "127.0.0.1", 0)
    ready.send(server.sockets[0].getsockname()[1])
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":%d}}\n\n' % tokens
    end = frame(LAST) + frame(usage) + frame(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    event = frame(EVENT)
    while True:
        for transport, left in list(streams.items()):
            if left > 1:
                transport.write(event)
                streams[transport] = left - 1
            else:
                del streams[transport]
                transport.write(end)
        await asyncio.sleep(0)


def run_server(tokens: int, ready: Connection) -> None:
    uvloop.run(serve(tokens, ready))


def main() -> None:
    streams = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 500
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=run_server, args=(tokens, theirs), daemon=True)
    server.start()
    config = BenchConfig(
        f"http://127.0.0.1:{ours.recv()}",
        concurrency=streams,
        requests=streams * 4,
        prompt=FixedLength(8),
        output=FixedLength(tokens),
        warmup=1,
    )
    try:
        cpu_s, wall_s = time.process_time(), time.monotonic()
        result = uvloop.run(run_bench(config)).result
        cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
    finally:
        server.terminate()
        server.join()
    load = result.loads[0]
    print(f"{streams} streams: {load.output_tokens_per_s:,.0f} events/s, {load.served} served")
    print(
        f"client: {result.client_cpu_share:.0%} of a core, {cpu_s / load.output_tokens * 1e6:.1f} µs an event"
    )


if __name__ == "__main__":
    main()
