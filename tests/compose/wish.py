"""Run inside a container of the mesh: wishes as the gateway does. ``python -c FILE ROLE COUNT``."""

import asyncio
import sys
from typing import cast

from common.bus import Bus
from common.config_file import load_config
from common.errors import NoResponder
from common.messages import Acknowledged, ScaleWish
from common.scaling import ScaledRole
from common.subjects import Subjects

WAIT_S = 30.0


async def wish(role: ScaledRole, count: int) -> None:
    mesh = load_config(None).mesh
    subjects = Subjects(mesh.namespace)
    bus = Bus(mesh.nats_url, name="wishing", subjects=subjects)
    await bus.connect(WAIT_S)
    try:
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    await bus.call(subjects.admin_scale(), ScaleWish(role, count), Acknowledged, WAIT_S)
                except NoResponder:
                    # Whoever takes it up has only just begun.
                    await asyncio.sleep(0.5)
                else:
                    return
    finally:
        await bus.close()


if __name__ == "__main__":
    asyncio.run(wish(cast(ScaledRole, sys.argv[1]), int(sys.argv[2])))
