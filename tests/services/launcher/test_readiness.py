"""What the launcher reads of services' metrics."""

import asyncio
from pathlib import Path

from common.ids import new_incarnation
from common.messages import ServiceRecord
from common.store import Store
from services.launcher.children import Child
from services.launcher.readiness import count_open_requests

METRICS = b"# TYPE lamella_open_requests gauge\nlamella_open_requests 2.0\nlamella_open_requests_max 9.0\n"
CHILDREN = [
    Child(f"gateway-{number}", "gateway", ("lamella",), {}, Path(f"gateway-{number}.log"))
    for number in range(2)
]


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + METRICS)
    writer.close()


def test_open_requests_are_those_of_every_gateway_that_is_registered(redis_url: str, namespace: str) -> None:
    async def count() -> tuple[int, int]:
        store = Store(redis_url, namespace)
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        record = ServiceRecord(
            service_id="gateway-0",
            incarnation=new_incarnation(),
            kind="gateway",
            host="127.0.0.1",
            pid=1,
            http_url=f"http://127.0.0.1:{port}",
        )
        await store.connect()
        before = await count_open_requests(store, CHILDREN)
        await store.join(record, lease_s=60.0)
        counted = await count_open_requests(store, CHILDREN)
        server.close()
        await store.close()
        return before, counted

    assert asyncio.run(count()) == (0, 2)
