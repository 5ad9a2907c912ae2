"""What becomes of open streams while the bus is away, or has lost messages."""

import asyncio
from dataclasses import dataclass

from gateway.journal import Journal

LOSS_SETTLES_S = 1.0


@dataclass(slots=True)
class Outages:
    """Whatever is published to a gateway meanwhile is lost, without a later token that shows the gap: all its
    sequences continue once it is over."""

    journal: Journal
    bus_timeout_s: float
    _continuing: asyncio.TimerHandle | None = None
    _stranded: asyncio.TimerHandle | None = None

    def note_loss(self) -> None:
        """Messages to this gateway were dropped, most likely more are about to be: all continue, once."""
        if self._continuing is None:
            self._continuing = asyncio.get_running_loop().call_later(
                LOSS_SETTLES_S, self._continue_after_loss
            )

    def note_disconnect(self) -> None:
        """No token comes until the bus is back. Streams wait for that, but not for ever."""
        if self._stranded is None:
            self._stranded = asyncio.get_running_loop().call_later(self.bus_timeout_s, self._fail_stranded)

    def note_reconnect(self) -> None:
        if self._stranded is not None:
            self._stranded.cancel()
            self._stranded = None
        self.journal.continue_all()

    def _continue_after_loss(self) -> None:
        self._continuing = None
        self.journal.continue_all()

    def _fail_stranded(self) -> None:
        self._stranded = None
        self.journal.fail_all(f"the mesh has not answered for {self.bus_timeout_s:g} s")
