"""A client that behaves badly on purpose: leaves, stalls, reads nothing."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

READ_TIMEOUT_S = 15.0


@dataclass(slots=True)
class RawClient:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def post(self, path: str, body: dict[str, object]) -> None:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        await self.send(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)

    async def send(self, content: bytes) -> None:
        self.writer.write(content)
        await self.writer.drain()

    async def read_until(self, mark: bytes) -> bytes:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await self.reader.readuntil(mark)

    async def read_to_end(self) -> bytes:
        """Everything until the server closes; a reset counts as the end."""
        chunks: list[bytes] = []
        async with asyncio.timeout(READ_TIMEOUT_S):
            try:
                while chunk := await self.reader.read(65_536):
                    chunks.append(chunk)
            except ConnectionResetError:
                chunks.append(b"<reset>")
        return b"".join(chunks)

    async def leave(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


@asynccontextmanager
async def raw_client(port: int, receive_bytes: int | None = None) -> AsyncIterator[RawClient]:
    """``receive_bytes``: a small receive buffer, and a reader that takes nothing before it is asked."""
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=receive_bytes or 1 << 20)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.close()
