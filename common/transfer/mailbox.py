"""The small region that every endpoint registers first: it begins with the incarnation's nonce.

Whoever opens a link reads those bytes before anything else, and so knows that port and address belong to the
process that was announced and not to one that was given the port later.
"""

import secrets

from common.transfer.buffers import SharedBuffer
from common.transfer.interface import PeerUnreachable

MAILBOX = "mailbox"
NONCE_BYTES = 16
MAILBOX_BYTES = 4096


class Mailbox:
    """16 bytes of nonce, then slots of 16 bytes in which first contacts read the nonces of others."""

    def __init__(self) -> None:
        self.buffer = SharedBuffer(MAILBOX_BYTES, MAILBOX)
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.buffer.memory[:NONCE_BYTES] = nonce
        self.incarnation = nonce.hex()
        self._free_slots = list(range(1, MAILBOX_BYTES // NONCE_BYTES))

    def reserve(self) -> int:
        """A slot nobody else reads into. Raises PeerUnreachable when every slot hangs in a first contact."""
        if not self._free_slots:
            raise PeerUnreachable("too many first contacts are hanging")
        return self._free_slots.pop()

    def release(self, slot: int) -> None:
        self._free_slots.append(slot)

    def address_of(self, slot: int) -> int:
        return self.buffer.address + slot * NONCE_BYTES

    def read(self, slot: int) -> bytes:
        return bytes(self.buffer.memory[slot * NONCE_BYTES : (slot + 1) * NONCE_BYTES])
