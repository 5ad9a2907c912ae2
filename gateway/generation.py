"""One choice of one client call: its journal entry, and its tokens on their way to text.

The journal entry is the ``GenerationRequest``: prompt, sampling and every token received. From it the
sequence can be continued on other instances at any moment (attempt + 1), and draws are keyed by position, so
the client sees the tokens it would have seen.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from common.errors import RequestError
from common.ids import InstanceId
from common.messages import GenerationRequest, Placement, SampledToken, TokenEvent
from common.model.tokens import Detokenizer
from gateway.stop_strings import StopStrings

Verdict = Literal["taken", "stale", "gap"]


@dataclass(slots=True)
class TextPiece:
    """Text that became certain, with the tokens that were drawn since the last piece."""

    text: str
    tokens: list[SampledToken]


@dataclass(slots=True)
class Generation:
    """``changed`` is shared by a call's choices; it is set whenever there is something to read."""

    index: int
    request: GenerationRequest
    detokenizer: Detokenizer
    stops: StopStrings
    changed: asyncio.Event
    placement: Placement | None = None
    continuations: int = 0
    finish_reason: str | None = None
    error: RequestError | None = None
    lost_instances: tuple[InstanceId, ...] = ()
    is_ended_by_instance: bool = False
    output_ids: list[int] = field(default_factory=list)
    attempt_tokens: int = 0
    arrived_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    last_token_s: float | None = None
    _pieces: list[TextPiece] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def take(self, event: TokenEvent) -> Verdict:
        """Takes one token in if it is the next one. A repeated or superseded one is stale.

        An end token counts as output and is no text, whether or not it is special.
        """
        if self.is_over or event.attempt != self.request.attempt or event.index < len(self.output_ids):
            return "stale"
        if event.index > len(self.output_ids):
            return "gap"
        self.output_ids.append(event.token.token_id)
        self.attempt_tokens += 1
        is_end_token = event.finish_reason == "stop"
        if not is_end_token:
            text = self.stops.push(self.detokenizer.push(event.token.token_id))
            self._pieces.append(TextPiece(text, [event.token]))
        if event.finish_reason is not None:
            self.is_ended_by_instance = True
        if self.stops.is_found:
            self.finish_reason = "stop"
        elif event.finish_reason is not None:
            self._pieces.append(TextPiece(self.stops.push(self.detokenizer.flush()), []))
            self._pieces.append(TextPiece(self.stops.flush(), []))
            self.finish_reason = "stop" if self.stops.is_found else event.finish_reason
        self.changed.set()
        return "taken"

    def fail(self, error: RequestError) -> None:
        if not self.is_over:
            self.error = error
            self.changed.set()

    def read(self) -> TextPiece | None:
        """Everything that became certain since the last read, as one piece; None when there is nothing."""
        if not self._pieces:
            return None
        pieces, self._pieces = self._pieces, []
        if len(pieces) == 1:
            return pieces[0]
        return TextPiece(
            "".join(piece.text for piece in pieces), [token for piece in pieces for token in piece.tokens]
        )

    def continue_elsewhere(self) -> GenerationRequest:
        """The next attempt: what has come so far becomes part of what is computed anew."""
        self.continuations += 1
        self.attempt_tokens = 0
        self.placement = None
        self.request = msgspec.structs.replace(
            self.request, output_ids=tuple(self.output_ids), attempt=self.request.attempt + 1
        )
        return self.request
