"""Records of instances as the tests of several rooms need them."""

import msgspec

from common.ids import Incarnation, InstanceId
from common.messages import InstanceRecord, Role


def make_record(name: str, role: Role, incarnation: str = "i1", /, **facts: object) -> InstanceRecord:
    """Of an instance with one small pool, but for ``facts``."""
    usual = InstanceRecord(
        instance_id=InstanceId(name),
        incarnation=Incarnation(incarnation),
        role=role,
        model="m",
        host="h",
        pid=1,
        http_url="",
        block_size=16,
        total_blocks=64,
        largest_pool_blocks=64,
        context_length=8192,
        dtype="fp32",
    )
    return msgspec.structs.replace(usual, **facts)
