"""One choice of one client call: its journal entry, and its tokens on their way to text.

The journal entry is the ``GenerationRequest``: prompt, sampling and every token received. From it the
sequence can be continued on other instances at any moment (attempt + 1), and draws are keyed by position, so
the client sees the tokens it would have seen.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from common.errors import RequestError
from common.ids import InstanceId
from common.latency import RequestLatency, end_to_end_s, tpot_s, ttft_s
from common.messages import (
    GenerationRequest,
    InstanceLife,
    Placement,
    SampledToken,
    SequenceMoved,
    TokenEvent,
)
from common.model.tokens import Detokenizer
from common.spans import SpanEvent
from gateway.continuing import continuations_after
from gateway.history import History
from gateway.stop_strings import StopStrings

Verdict = Literal["taken", "stale", "gap"]


@dataclass(slots=True)
class TextPiece:
    """Text that became certain, with the tokens that were drawn since the last piece."""

    text: str
    tokens: list[SampledToken]


def _ignore(_: "Generation") -> None:
    """Nobody reads yet."""


@dataclass(slots=True, eq=False)
class Generation:
    """``notify`` is called whenever there is something to read; it belongs to whoever delivers the text.

    ``is_probe``: no user waits for it. ``is_queued``: it waits at a scheduler, which has said so. ``moved``:
    where this attempt went on, if it did. ``former``: the life that decoded the sequence until it was gone,
    for the placement that is to come. ``continuations``: in a row, without getting on
    (``gateway.continuing``). ``resubmissions``: in a row, as a scheduler had died before the placement came.
    ``continued``: when and why each attempt but the first began. ``wanted_s``: since when it wants a place,
    as it had come or lost the one that it had; ``asked_s``: when the call went out that placed this attempt.
    """

    index: int
    request: GenerationRequest
    detokenizer: Detokenizer
    stops: StopStrings
    arrived_s: float = field(default_factory=time.monotonic)
    notify: Callable[["Generation"], None] = _ignore
    placement: Placement | None = None
    wanted_s: float = 0.0
    asked_s: float = 0.0
    is_probe: bool = False
    is_queued: bool = False
    moved: SequenceMoved | None = None
    lost_instances: tuple[InstanceId, ...] = ()
    former: InstanceLife | None = None
    continuations: int = 0
    resubmissions: int = 0
    finish_reason: str | None = None
    error: RequestError | None = None
    is_told: bool = False
    continued: list[SpanEvent] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    attempt_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    history: History = field(init=False)
    _texts: list[str] = field(default_factory=list)
    _tokens: list[SampledToken] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history = History(self.arrived_s)
        self.wanted_s = self.arrived_s

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def ttft_s(self) -> float | None:
        first_s = self.first_token_s
        return None if first_s is None else ttft_s(self.arrived_s, first_s)

    @property
    def tpot_s(self) -> float | None:
        """Over what came so far."""
        if self.first_token_s is None or self.last_token_s is None:
            return None
        return tpot_s(self.first_token_s, self.last_token_s, len(self.output_ids))

    def latency(self, now: float) -> RequestLatency | None:
        """Of a response that ends now; None where no token came."""
        to_first_s = self.ttft_s
        if to_first_s is None:
            return None
        return RequestLatency(to_first_s, self.tpot_s, None, end_to_end_s(self.arrived_s, now))

    def take(self, event: TokenEvent) -> Verdict:
        """Takes one token in if it is the next one. A repeated or superseded one is stale.

        An end token counts as output and is no text, whether or not it is special.
        """
        place = len(self.output_ids)
        if event.index != place or event.attempt != self.request.attempt or self.is_over:
            is_gap = event.index > place and event.attempt == self.request.attempt and not self.is_over
            return "gap" if is_gap else "stale"
        token = event.token
        self.output_ids.append(token.token_id)
        self.attempt_tokens += 1
        if event.finish_reason != "stop":
            text = self.detokenizer.push(token.token_id)
            if self.stops.has_any and place >= self.request.sampling.min_tokens:
                text = self.stops.push(text)
            self._texts.append(text)
            self._tokens.append(token)
        if self.stops.is_found:
            self.finish_reason = "stop"
        elif event.finish_reason is not None:
            rest = self.stops.push(self.detokenizer.flush()) + self.stops.flush()
            if rest:
                self._texts.append(rest)
            self.finish_reason = "stop" if self.stops.is_found else event.finish_reason
        return "taken"

    def place(self, placement: Placement) -> Placement:
        """Where it is: word that the attempt has moved since may have overtaken that of its placement."""
        self.is_queued = False
        self.resubmissions = 0
        self.placement = placement if self.moved is None else self.moved.placement
        return self.placement

    def move(self, moved: SequenceMoved) -> None:
        """The attempt goes on elsewhere. There it stands as one whose first token came from whoever hands it
        over; tokens of its new home may have overtaken this word."""
        self.moved = moved
        self.attempt_tokens = 1 + len(self.output_ids) - moved.output_tokens
        if self.placement is not None:
            self.placement = moved.placement

    def fail(self, error: RequestError) -> None:
        if not self.is_over:
            self.error = error
            self.notify(self)

    def read(self) -> TextPiece | None:
        """Everything that became certain since the last read, as one piece; None when there is nothing."""
        if not self._texts:
            return None
        texts, tokens = self._texts, self._tokens
        self._texts, self._tokens = [], []
        return TextPiece(texts[0] if len(texts) == 1 else "".join(texts), tokens)

    def continue_elsewhere(self) -> GenerationRequest:
        """The next attempt: what has come so far becomes part of what is computed anew."""
        self.continuations = continuations_after(self.continuations, self.attempt_tokens)
        return self.next_attempt()

    def submit_again(self) -> GenerationRequest:
        """The next attempt, of one that may never have begun: nothing says that it broke."""
        self.resubmissions += 1
        return self.next_attempt()

    def next_attempt(self) -> GenerationRequest:
        """A number that no instance has heard of: a submission that failed may have left cancellations."""
        self.attempt_tokens = 0
        self.placement = None
        self.moved = None
        self.request = msgspec.structs.replace(
            self.request, output_ids=tuple(self.output_ids), attempt=self.request.attempt + 1
        )
        self.history.attempt = self.request.attempt
        return self.request
