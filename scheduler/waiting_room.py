"""Requests that wait at the scheduler for an instance with hardly anything to do (Vidur 4.5: the routing
decision is deferred, so that under bursts nobody is bound early to a queue that turns out slow).

Whoever waits asks: its gateway's call is held for a moment, answered by ``Queued``, and made again. Only a
request with a call at hand is bound, so that the answer has somebody to take it; one for which nobody asks
any more, as its gateway or the call was lost, gives its place up.

Order is that of a prefill instance's prompts (TetriInfer 3.3.1): a window of those that came first, less
their class's head start, ordered inside it, and the next window only when it is used up: nobody starves.
"""

from dataclasses import dataclass, field

from common.config import PrefillOrder
from common.errors import Overloaded, RequestCancelled
from common.ids import GatewayId, RequestId
from common.messages import GenerationRequest
from scheduler.policy.prefill_batching import order_by_rest, order_window

ASKED_AGAIN_WITHIN_S = 5.0
"""Longer than a gateway that lives takes from one answer to its next call."""


@dataclass(slots=True)
class _Waiting:
    """``answered_s``: since when nobody asks; None: a call is held. ``is_guest``: it had waited before, at
    another scheduler or here."""

    request: GenerationRequest
    came_s: float
    is_guest: bool
    answered_s: float | None = None


@dataclass(slots=True)
class WaitingRoom:
    """At most ``most`` requests, beside those that were let in elsewhere or before: they have a turn."""

    most: int
    order: PrefillOrder = "fcfs"
    window_size: int = 16
    aging_tokens_per_s: float = 0.0
    _waiting: dict[RequestId, _Waiting] = field(default_factory=dict)
    _window: list[RequestId] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waiting

    @property
    def tokens(self) -> int:
        """Of prompts: what would wait at instances if nobody waited here."""
        return sum(each.request.tokens for each in self._waiting.values())

    def check(self) -> None:
        assert self._newcomers <= self.most, "more wait than there is room for"
        assert set(self._window) <= self._waiting.keys(), "it is the turn of one that does not wait"

    @property
    def _newcomers(self) -> int:
        return sum(not each.is_guest for each in self._waiting.values())

    def enter(self, request: GenerationRequest, now: float, waited_s: float = 0.0) -> None:
        """Or ask again: it keeps its place, also where that has lapsed or is another scheduler's. Raises
        Overloaded; RequestCancelled for an attempt that has been superseded."""
        known = self._waiting.get(request.request_id)
        if known is not None:
            if known.request.attempt > request.attempt:
                raise RequestCancelled(f"request {request.request_id} has been submitted again since")
            known.request, known.answered_s = request, None
            return
        if not waited_s and self._newcomers >= self.most:
            raise Overloaded(
                f"{self.most} requests wait for a prefill instance; as many as"
                " scheduler.max_deferred_requests allows"
            )
        came_s = now - waited_s - request.head_start_s
        self._waiting[request.request_id] = _Waiting(request, came_s, is_guest=waited_s > 0)

    def note_answered(self, request_id: RequestId, now: float) -> None:
        """Its call was told to ask again."""
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            waiting.answered_s = now

    def find(self, request_id: RequestId) -> GenerationRequest | None:
        waiting = self._waiting.get(request_id)
        return None if waiting is None else waiting.request

    def leave(self, request_id: RequestId) -> None:
        """Of one that waits."""
        del self._waiting[request_id]
        if request_id in self._window:
            self._window.remove(request_id)

    def leave_gateway(self, gateway_id: GatewayId) -> None:
        """Nobody reads the answers to its calls."""
        for request_id, waiting in list(self._waiting.items()):
            if waiting.request.gateway_id == gateway_id:
                self.leave(request_id)

    def forget_unasked(self, now: float) -> None:
        for request_id, waiting in list(self._waiting.items()):
            if waiting.answered_s is not None and now - waiting.answered_s > ASKED_AGAIN_WITHIN_S:
                self.leave(request_id)

    def next_in_turn(self, now: float) -> GenerationRequest | None:
        """Of those with a call at hand."""
        for order in (self._in_window(now), self._by_arrival()):
            for request_id in order:
                if self._waiting[request_id].answered_s is None:
                    return self._waiting[request_id].request
        return None

    def _in_window(self, now: float) -> list[RequestId]:
        if self.order == "srpt":
            everybody = self._by_arrival()
            rest = [self._waiting[each].request.tokens for each in everybody]
            waited_s = [now - self._waiting[each].came_s for each in everybody]
            return [everybody[index] for index in order_by_rest(rest, waited_s, self.aging_tokens_per_s)]
        if not self._window:
            batch = self._by_arrival()[: self.window_size]
            order = order_window([self._waiting[each].request.tokens for each in batch], self.order)
            self._window = [batch[index] for index in order]
        return self._window

    def _by_arrival(self) -> list[RequestId]:
        return sorted(self._waiting, key=lambda each: self._waiting[each].came_s)
