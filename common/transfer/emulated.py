"""A slower link than the one at hand, for experiments with bandwidth and latency (TetriInfer section 4).

The bytes move over the wrapped link. Their arrival is told when a link of the given bandwidth and latency,
which sends one transfer after the other, would have delivered them, and never before they really arrived.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from common.transfer.interface import Link, PeerInfo, Run
from common.transfer.transfer import Outbox, Transfer

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]


class EmulatedLink:
    """Sends at ``bandwidth_bytes_per_s`` (None: unlimited), one after the other, ``latency_s`` late."""

    def __init__(
        self,
        link: Link,
        outbox: Outbox,
        bandwidth_bytes_per_s: float | None,
        latency_s: float,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._link = link
        self._outbox = outbox
        self._bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self._latency_s = latency_s
        self._clock = clock
        self._sleep = sleep
        self._is_free_at_s = clock()
        self._carried: dict[Transfer, Transfer] = {}
        self._deliveries: set[asyncio.Task[None]] = set()

    @property
    def kind(self) -> str:
        return f"emulated {self._link.kind}"

    @property
    def peer(self) -> PeerInfo:
        return self._link.peer

    @property
    def is_alive(self) -> bool:
        return self._link.is_alive

    @property
    def is_idle(self) -> bool:
        return self._link.is_idle and not self._carried

    def write(self, runs: Sequence[Run]) -> Transfer:
        carried = self._link.write(runs)
        transfer = Transfer(
            self.peer,
            runs,
            carried.sources,
            1,
            self._outbox.deadline_s,
            self._outbox.open_transfers,
            self._clock,
        )
        self._carried[transfer] = carried
        send_s = transfer.nbytes / self._bandwidth_bytes_per_s if self._bandwidth_bytes_per_s else 0.0
        self._is_free_at_s = max(self._is_free_at_s, self._clock()) + send_s
        delivery = asyncio.create_task(
            self._deliver(transfer, carried, self._is_free_at_s + self._latency_s), name="emulated delivery"
        )
        self._deliveries.add(delivery)
        delivery.add_done_callback(self._deliveries.discard)
        return transfer

    async def _deliver(self, transfer: Transfer, carried: Transfer, arrives_at_s: float) -> None:
        await carried.wait_settled()
        remaining_s = arrives_at_s - self._clock()
        if remaining_s > 0:
            await self._sleep(remaining_s)
        self._settle_as_carried(transfer)

    def _settle_as_carried(self, transfer: Transfer) -> None:
        failure = self._carried.pop(transfer).failure
        if failure is None:
            transfer.slice_arrived()
        else:
            transfer.slice_failed(str(failure))

    def die(self, reason: str) -> None:
        self._link.die(reason)

    async def close(self) -> None:
        """Waits for the bytes but not for the emulated time."""
        await self._link.close()
        for delivery in self._deliveries:
            delivery.cancel()
        if self._deliveries:
            await asyncio.wait(self._deliveries)
        for transfer, carried in list(self._carried.items()):
            if carried.is_settled:
                self._settle_as_carried(transfer)

    def forfeit(self) -> None:
        self._link.forfeit()
        for transfer in list(self._carried):
            self._settle_as_carried(transfer)
