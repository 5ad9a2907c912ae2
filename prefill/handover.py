"""How far one sequence's KV has been handed over: what is sent next, and when a pull is answered.

The decode instance asks for one portion after the other (``PullKV``). While the prompt is computed, its KV
comes chunk by chunk, and within the chunk in flight layer by layer (Splitwise 4.4; Lamina 2, section 5).
"""

import sys
from dataclasses import dataclass

from common.errors import HandoverFailed, InvalidRequest, UnknownRequest
from common.kv.layout import KVSpan
from common.messages import KVDelivered, PullKV


@dataclass(frozen=True, slots=True)
class ComputedKV:
    """What of a sequence's KV stands in the pool: all layers of the first ``tokens`` positions, and of the
    ``chunk_tokens`` after them, which are being computed, the first ``chunk_layers`` layers."""

    tokens: int
    chunk_tokens: int = 0
    chunk_layers: int = 0


@dataclass(slots=True)
class KVCursor:
    """What has been taken: band by band of positions, of each layer by layer.

    A band is what was computed, or being computed, when it was begun. Of ``band``, the first ``layer`` layers
    have been taken, and of the next one the positions before ``position``; of all before it, everything.
    """

    layers: int
    token_layer_bytes: int
    band: range = range(0)
    layer: int = 0
    position: int = 0

    def is_at(self, tokens: int) -> bool:
        """Whether all KV of the first ``tokens`` positions has been taken."""
        return self.band.stop == tokens and self.layer == self.layers

    def take(self, computed: ComputedKV, max_bytes: int | None) -> tuple[KVSpan, ...]:
        """The next that is there, of all heads at most ``max_bytes``, and at least one position of one layer;
        empty where all that is there has been taken."""
        spans: list[KVSpan] = []
        room = sys.maxsize if max_bytes is None else max(1, max_bytes // self.token_layer_bytes)
        while room > 0 and (self._is_in_band(computed) or self._begin_band(computed)):
            span = self._next_span(computed, room)
            spans.append(span)
            room -= len(span.layers) * len(span.positions)
        return tuple(spans)

    def _is_in_band(self, computed: ComputedKV) -> bool:
        return bool(self.band) and self.layer < self._layers_there(computed)

    def _layers_there(self, computed: ComputedKV) -> int:
        return self.layers if self.band.stop <= computed.tokens else computed.chunk_layers

    def _begin_band(self, computed: ComputedKV) -> bool:
        """Goes on behind a band that is done, if anything is there."""
        if self.band and self.layer < self.layers:
            return False
        begin = self.band.stop
        if begin < computed.tokens:
            band = range(begin, computed.tokens)
        elif begin == computed.tokens and computed.chunk_layers:
            band = range(begin, begin + computed.chunk_tokens)
        else:
            return False
        self.band, self.layer, self.position = band, 0, begin
        return True

    def _next_span(self, computed: ComputedKV, room: int) -> KVSpan:
        """Whole layers where one begins and there is room for it, else a part of one."""
        layer, positions = self.layer, range(self.position, self.band.stop)
        layers = 1
        if len(positions) == len(self.band):
            layers = min(self._layers_there(computed) - layer, max(1, room // len(positions)))
        positions = positions[:room]
        if positions.stop == self.band.stop:
            self.layer, self.position = layer + layers, self.band.start
        else:
            self.position = positions.stop
        return KVSpan(range(layer, layer + layers), positions)


@dataclass(slots=True)
class HandOver:
    """One sequence's. ``tokens``: positions of KV in all. ``asked``: the portion that is to be answered."""

    tokens: int
    cursor: KVCursor
    asked: PullKV | None = None
    is_sending: bool = False
    _answered: int = 0
    _last_answer: KVDelivered | None = None
    _arrived: tuple[int, float] | None = None

    def take_ask(self, pull: PullKV) -> KVDelivered | None:
        """Asks for a portion. One that has been answered before has its answer still; one under way goes on.
        Raises UnknownRequest for a portion whose turn it is not."""
        if self._last_answer is not None and pull.portion == self._answered - 1:
            return self._last_answer
        if pull.portion != self._answered:
            raise UnknownRequest(
                f"portion {pull.portion} of the KV of request {pull.request_id} is asked for,"
                f" {self._answered} were answered"
            )
        if self.asked is None:
            self.asked = pull
        return None

    def begin_send(self, computed: ComputedKV) -> tuple[KVSpan, ...]:
        """What to send now for the portion asked for; empty where that is sent, or nothing is there."""
        if self.asked is None or self.is_sending:
            return ()
        if self._arrived is not None and self.asked.max_bytes is not None:
            return ()
        spans = self.cursor.take(computed, self.asked.max_bytes)
        self.is_sending = bool(spans)
        return spans

    @property
    def has_begun(self) -> bool:
        """Whether a portion was asked for: then the offer was taken."""
        return self.asked is not None or self._answered > 0

    def give_up(self) -> PullKV:
        """The portion asked for will not come."""
        assert self.asked is not None
        pull, self.asked, self._arrived, self.is_sending = self.asked, None, None, False
        return pull

    def end_send(self, kv_bytes: int, transfer_s: float) -> None:
        before_bytes, before_s = self._arrived or (0, 0.0)
        self.is_sending = False
        self._arrived = (before_bytes + kv_bytes, before_s + transfer_s)

    def try_answer(self, first_token: int | None) -> KVDelivered | None:
        """The answer to the portion asked for, if it can be given: the last one waits for the first token."""
        if self.asked is None or self.is_sending:
            return None
        is_complete = self.cursor.is_at(self.tokens)
        if not is_complete and (self._arrived is None or self.asked.max_bytes is None):
            return None
        if is_complete and first_token is None:
            return None
        kv_bytes, transfer_s = self._arrived or (0, 0.0)
        answer = KVDelivered(kv_bytes, transfer_s, is_complete, first_token if is_complete else None)
        self.asked, self._arrived = None, None
        self._answered += 1
        self._last_answer = answer
        return answer

    def check(self, computed: ComputedKV) -> None:
        """Invariants, called by tests after every event."""
        cursor = self.cursor
        assert self.asked is not None or not self.is_sending, "what nobody asked for is sent"
        assert self.asked is not None or self._arrived is None
        assert cursor.band.stop <= computed.tokens + computed.chunk_tokens, "KV was sent before it was there"
        assert 0 <= cursor.layer <= cursor.layers
        if cursor.band.stop > computed.tokens:
            assert cursor.layer <= computed.chunk_layers, "a layer was sent before it was there"


def check_destination(pull: PullKV, needed_blocks: int) -> None:
    """Raises UnknownRequest, HandoverFailed or InvalidRequest where KV of so many blocks cannot be
    written where it is asked for."""
    if len(pull.blocks) < needed_blocks:
        raise UnknownRequest(f"{len(pull.blocks)} blocks offered for KV that fills {needed_blocks}")
    if not pull.destinations:
        raise HandoverFailed("the pool that the KV was for is gone")
    total_blocks = min(each.total_blocks for each in pull.destinations)
    is_within = min(pull.blocks) >= 0 and max(pull.blocks) < total_blocks
    if not is_within or len({*pull.blocks}) < len(pull.blocks):
        raise InvalidRequest(f"{pull.blocks} are not of a pool of {total_blocks}", param="blocks")
