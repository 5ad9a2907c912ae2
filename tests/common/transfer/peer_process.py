"""A process that receives: started, asked, stopped and killed by the tests of common.transfer.

Run as a module it starts an endpoint with one shared buffer called ``kv``, prints its PeerInfo, and answers
each line on stdin (``digest``: what its memory holds).
"""

import asyncio
import hashlib
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from common.config import TransferConfig, TransferPath
from common.transfer import PeerInfo, SharedBuffer, TransferEndpoint, decode_peer_info, encode_peer_info

REPOSITORY = Path(__file__).parents[3]


class PeerProcess:
    """One receiver. Killed, if it still lives, when the ``with`` block ends."""

    def __init__(self, path: TransferPath, kv_bytes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.common.transfer.peer_process", path, str(kv_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        self.info: PeerInfo = decode_peer_info(bytes.fromhex(self._read_line()))

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def digest(self) -> str:
        """SHA-256 of the receiver's memory, as the receiver sees it."""
        assert self.process.stdin is not None
        self.process.stdin.write("digest\n")
        self.process.stdin.flush()
        return self._read_line()

    def _read_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, f"the peer process ended with {self.process.poll()}"
        return line


async def receive(path: TransferPath, kv_bytes: int) -> None:
    endpoint = TransferEndpoint(TransferConfig(path=path))
    await endpoint.start()
    buffer = SharedBuffer(kv_bytes)
    endpoint.register("kv", buffer)
    print(encode_peer_info(endpoint.peer_info()).hex(), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(hashlib.sha256(buffer.memory).hexdigest(), flush=True)
    await endpoint.close()


if __name__ == "__main__":
    wanted: TransferPath = "mooncake" if sys.argv[1] == "mooncake" else "shared_memory"
    if sys.argv[1] == "auto":
        wanted = "auto"
    asyncio.run(receive(wanted, int(sys.argv[2])))
