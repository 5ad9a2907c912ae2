"""The spans of the sequences in one room of an instance: each ends with its sequence, however that ends."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from common.kv.blocks import BlockOwner
from common.messages import GenerationRequest, TokenEvent
from common.spans import Attributes, spans


@dataclass(slots=True)
class _Open:
    request: GenerationRequest
    began_s: float
    tokens: int = 0
    ending: str = "left"


@dataclass(slots=True)
class RoomSpans:
    """``room`` names the spans and the owners. Empty where nothing is traced."""

    room: str
    _open: dict[BlockOwner, _Open] = field(default_factory=dict)

    def begin(self, request: GenerationRequest, now: float) -> None:
        """The sequence has come."""
        if spans.is_on and request.traceparent is not None:
            owner = BlockOwner(self.room, request.request_id, request.attempt)
            self._open.setdefault(owner, _Open(request, now))

    def note_tokens(self, events: Sequence[TokenEvent]) -> None:
        """They were drawn here."""
        if not self._open:
            return
        for event in events:
            found = self._open.get(BlockOwner(self.room, event.request_id, event.attempt))
            if found is not None:
                found.tokens += 1
                found.ending = event.finish_reason or found.ending

    def end(self, owner: BlockOwner, now: float, attributes: Attributes) -> None:
        """The room's work for it is done, though it may stay."""
        if owner in self._open:
            self._end(owner, now, attributes)

    def end_departed(self, here: Collection[BlockOwner], now: float) -> None:
        """Those that are not ``here`` any more: finished, cancelled, failed, or gone to another instance."""
        # Nearly always nobody is traced: this is asked after every event.
        for owner in [each for each in self._open if each not in here] if self._open else ():
            self._end(owner, now, {"lamella.ending": self._open[owner].ending})

    def _end(self, owner: BlockOwner, now: float, attributes: Attributes) -> None:
        ended = self._open.pop(owner)
        request = ended.request
        facts: Attributes = {
            "lamella.request.id": request.request_id,
            "lamella.attempt": request.attempt,
            "gen_ai.usage.input_tokens": len(request.prompt_ids),
            "gen_ai.usage.output_tokens": ended.tokens,
        }
        spans.record(self.room, request.traceparent, ended.began_s, {**facts, **attributes}, now)
