"""Names of things that exist at run time.

Every id is made here, is safe inside a NATS subject and a Redis key (``[a-z0-9-]``), and never holds user
text. A user's ``x-request-id`` is a label of the request; the mesh routes by ``RequestId`` alone.
"""

import hashlib
import re
import secrets
from functools import lru_cache
from typing import NewType

RequestId = NewType("RequestId", str)
"""One sequence to generate: one choice of one client call."""
InstanceId = NewType("InstanceId", str)
"""One process that holds weights and a KV pool."""
GatewayId = NewType("GatewayId", str)
BindingId = NewType("BindingId", str)
"""One decode instance's use of one attention worker."""
Incarnation = NewType("Incarnation", str)
"""One life of a process: a restarted instance keeps its id and gets a new incarnation."""

ID_PATTERN = re.compile(r"[a-z0-9-]{1,64}")
COUNTED = re.compile(r"([^0-9]*)([0-9]*)")


def new_call_id() -> str:
    """Of one client call; the name its answer bears, after the kind of the call."""
    return secrets.token_hex(8)


def request_id_of(call_id: str, choice: int) -> RequestId:
    return RequestId(call_id if choice == 0 else f"{call_id}-{choice}")


def new_request_id() -> RequestId:
    return request_id_of(new_call_id(), 0)


def new_incarnation() -> Incarnation:
    return Incarnation(secrets.token_hex(8))


def new_binding_id() -> BindingId:
    return BindingId(secrets.token_hex(8))


@lru_cache(maxsize=4096)
def sequence_key(request_id: RequestId) -> int:
    """The request's name as one word, over 0, for plans that go without text."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest()) >> 1 | 1


def counted_order(name: str) -> tuple[tuple[str, int], ...]:
    """To sort by: as people count, ``decode-2`` before ``decode-10``."""
    counted = ((text, int(number or 0)) for text, number in COUNTED.findall(name))
    return (*counted, (name, 0))


def is_valid_id(text: str) -> bool:
    """Whether ``text`` may stand in a subject and a key."""
    return ID_PATTERN.fullmatch(text) is not None
