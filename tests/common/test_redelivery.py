import asyncio
from collections.abc import Coroutine

from common.bus import Bus
from common.errors import BusUnavailable
from common.ids import RequestId
from common.messages import RequestEnded
from common.redelivery import publish_surely
from tests.common.buses import pair, run

FILLER = RequestEnded(RequestId("x" * 500_000))


def fill(bus: Bus, subject: str) -> None:
    """Until nothing more fits: the loop does not run meanwhile, so nothing leaves."""
    try:
        while True:
            bus.publish(subject, FILLER)
    except BusUnavailable:
        return


def test_what_a_full_outbox_refused_arrives_when_there_is_room_again(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        async with pair(nats_url, namespace) as (sender, receiver), asyncio.TaskGroup() as tasks:
            arrived = asyncio.Event()

            def spawn(work: Coroutine[None, None, None]) -> None:
                tasks.create_task(work)

            await receiver.subscribe(f"{namespace}.last", RequestEnded, lambda _: arrived.set())
            fill(sender, f"{namespace}.filler")
            publish_surely(
                sender,
                f"{namespace}.last",
                RequestEnded(RequestId("r")),
                spawn,
            )
            async with asyncio.timeout(20):
                await arrived.wait()

    run(work())
