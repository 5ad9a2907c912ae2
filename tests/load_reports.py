"""Load reports as the tests of several rooms need them."""

import msgspec

from common.ids import Incarnation, InstanceId
from common.messages import LoadReport, Role


def make_report(
    name: str, role: Role, total_blocks: int = 64, incarnation: str = "i1", /, **load: object
) -> LoadReport:
    """Of an instance with nothing to do and all of its one pool free, but for ``load``."""
    idle = LoadReport(
        instance_id=InstanceId(name),
        incarnation=Incarnation(incarnation),
        sequence=1,
        role=role,
        is_draining=False,
        pending_prefill_tokens=0,
        pending_prefill_requests=0,
        handovers_waiting=0,
        decode_running=0,
        decode_waiting=0,
        decode_tokens=0,
        total_blocks=total_blocks,
        largest_pool_blocks=total_blocks,
        free_blocks=total_blocks,
    )
    return msgspec.structs.replace(idle, **load)
