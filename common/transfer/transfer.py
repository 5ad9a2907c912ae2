"""A write under way, as its waiter sees it.

Invariants: a transfer settles exactly once, when *all* its slices are terminal, well or not: only then may
the source be reused. Nobody can cancel it: a cancelled waiter merely stops looking, and the transfer keeps
its source memory alive in ``open_transfers`` until it settles.
"""

import asyncio
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

from common.transfer.interface import (
    PeerInfo,
    Run,
    TransferFailed,
    TransferLimits,
    TransferStalled,
    TransferStatistics,
)
from common.transfer.regions import Region, Slice, plan_slices


class Transfer:
    """Awaitable once or many times; answers TransferStatistics or raises TransferFailed, TransferStalled.

    ``open_transfers`` is the endpoint's set of everything in flight: this object enters it now and leaves it
    when it settles. ``sources`` are the local regions it reads.
    """

    def __init__(
        self,
        peer: PeerInfo,
        runs: Sequence[Run],
        sources: tuple[Region, ...],
        slices: int,
        deadline_s: float,
        open_transfers: "set[Transfer]",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peer = peer
        self.runs = tuple(runs)
        self.nbytes = sum(run.nbytes for run in self.runs)
        self.slices = slices
        self.slices_arrived = 0
        self.slices_failed = 0
        self._slices_unsent = 0
        self.sources = sources
        self._deadline_s = deadline_s
        self._clock = clock
        self._started_s = clock()
        self._open_transfers = open_transfers
        self._outcome: asyncio.Future[TransferStatistics] = asyncio.get_running_loop().create_future()
        open_transfers.add(self)

    def __await__(self) -> Generator[object, None, TransferStatistics]:
        return self.wait(self._deadline_s).__await__()

    async def wait(self, timeout_s: float) -> TransferStatistics:
        """Raises TransferStalled after ``timeout_s``; the transfer itself goes on."""
        if not self._outcome.done():
            await asyncio.wait([self._outcome], timeout=timeout_s)
        if not self._outcome.done():
            raise TransferStalled(
                f"{self.slices_in_flight} of {self.slices} slices to peer {self.peer.incarnation[:8]} "
                f"are not terminal after {timeout_s:g} s",
                self.runs,
            )
        return self._outcome.result()

    async def wait_settled(self) -> None:
        """Returns when no slice is in the air any more, whatever became of them. Never raises."""
        await asyncio.wait([self._outcome])

    @property
    def is_settled(self) -> bool:
        return self._outcome.done()

    @property
    def failure(self) -> TransferFailed | None:
        """Why a settled transfer failed; None where it arrived."""
        error = self._outcome.exception()
        return error if isinstance(error, TransferFailed) else None

    @property
    def slices_in_flight(self) -> int:
        """Slices that are queued or sent and not terminal."""
        return self.slices - self.slices_arrived - self.slices_failed - self._slices_unsent

    def reads(self, region: str) -> bool:
        """Whether the local region is a source of this transfer."""
        return any(source.name == region for source in self.sources)

    # -- told by the link that carries it -------------------------------------------------------------------

    def slice_arrived(self, count: int = 1) -> None:
        self.slices_arrived += count
        self._settle_if_terminal("")

    def slice_failed(self, reason: str, count: int = 1) -> None:
        self.slices_failed += count
        self._settle_if_terminal(reason)

    def slices_unsent(self, count: int, reason: str) -> None:
        """``count`` slices will never be sent."""
        self._slices_unsent += count
        self._settle_if_terminal(reason)

    def _settle_if_terminal(self, reason: str) -> None:
        if self.slices_in_flight:
            return
        self._open_transfers.discard(self)
        self.sources = ()
        if self.slices_arrived == self.slices:
            seconds = self._clock() - self._started_s
            self._outcome.set_result(TransferStatistics(self.nbytes, seconds, self.slices))
            return
        was_sent = self.slices_arrived + self.slices_failed > 0
        self._outcome.set_exception(
            TransferFailed(
                f"{self.slices_arrived} of {self.slices} slices arrived at peer "
                f"{self.peer.incarnation[:8]}: {reason}",
                self.runs if was_sent else (),
            )
        )
        # A waiter that was cancelled never looks; the failure is then told by the link, which is dead.
        self._outcome.exception()


@dataclass(frozen=True, slots=True)
class Outbox:
    """What all links of one endpoint share: the memory they may read and everything they have under way."""

    deadline_s: float
    limits: TransferLimits
    regions: dict[str, Region] = field(default_factory=dict)
    open_transfers: set[Transfer] = field(default_factory=set)

    def begin(
        self, peer: PeerInfo, runs: Sequence[Run], remote_base: Mapping[str, int], max_slice_bytes: int
    ) -> tuple[Transfer, list[Slice]]:
        """A transfer and the slices to send for it. A write of nothing has arrived. Raises RegionError."""
        slices, sources = plan_slices(runs, self.regions, peer, remote_base, max_slice_bytes)
        transfer = Transfer(peer, runs, sources, len(slices), self.deadline_s, self.open_transfers)
        if not slices:
            transfer.slice_arrived(0)
        return transfer, slices
