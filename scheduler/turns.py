"""Calls that are held for requests that wait at the scheduler, until their turn or for a moment."""

import asyncio
from dataclasses import dataclass, field

from common.errors import NoInstanceReady, RequestError
from common.ids import RequestId
from common.messages import Placement
from scheduler.events import EndWait

HOLD_S = 2.0
LEAVING_RETRY_S = 1.0
Turn = asyncio.Future[Placement | RequestError]


@dataclass(slots=True)
class Turns:
    """``hold_s``: at most so long, which is less than a caller's timeout."""

    hold_s: float
    is_leaving: bool = False
    _held: dict[RequestId, Turn] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._held)

    def begin(self, request_id: RequestId) -> Turn:
        """Holds a call for it, instead of an earlier one that is forgotten. ``end_call`` has to follow."""
        turn: Turn = asyncio.get_running_loop().create_future()
        self._held[request_id] = turn
        return turn

    def end_call(self, request_id: RequestId, turn: Turn) -> bool:
        """Whether no later call is held for the request."""
        is_newest = self._held.get(request_id) is turn
        if is_newest:
            del self._held[request_id]
        return is_newest

    async def wait(self, turn: Turn, *, is_new: bool) -> Placement | None:
        """None: it has not come. Whoever is new hears so at once, and knows from then on that it waits.
        Raises the refusal."""
        if not is_new:
            await asyncio.wait({turn}, timeout=self.hold_s)
        if not turn.done():
            return None
        outcome = turn.result()
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    def end(self, command: EndWait) -> bool:
        """Whether somebody takes the outcome."""
        turn = self._held.get(command.request_id)
        if turn is None or turn.done():
            return False
        turn.set_result(command.outcome)
        return True

    def leave(self) -> None:
        """Everybody asks somebody else, and nobody waits here from now on."""
        self.is_leaving = True
        for turn in self._held.values():
            if not turn.done():
                turn.set_result(
                    NoInstanceReady("this scheduler is shutting down", retry_after_s=LEAVING_RETRY_S)
                )
