"""The chunks in flight: which prompts' tokens the engine computes now, and how many layers of them it has.

There is one, or in a pipeline of stages one more whenever the newest has left the first stage; they end in
the order in which they began. Until a chunk ends its sequences' blocks are read and written, and none of them
is in another. What of a sequence's KV stands in the pool follows from it (``prefill.handover``).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from common.kv.blocks import BlockOwner
from common.messages import SampledToken
from prefill.events import ChunkSlice
from prefill.handover import ComputedKV
from prefill.sequence import PrefillSequence


@dataclass(slots=True)
class ChunksInFlight:
    """Of a model of so many ``layers``."""

    layers: int
    _chunks: deque[tuple[ChunkSlice, ...]] = field(default_factory=deque)
    _computed_layers: int = 0
    _has_advanced: bool = False

    @property
    def is_computing(self) -> bool:
        return bool(self._chunks)

    @property
    def can_begin(self) -> bool:
        """Whether there is room for another one."""
        return not self._chunks or self._has_advanced

    @property
    def slices(self) -> tuple[ChunkSlice, ...]:
        """Of the oldest; empty where nothing is computed."""
        return self._chunks[0] if self._chunks else ()

    @property
    def all_slices(self) -> Iterator[ChunkSlice]:
        for slices in self._chunks:
            yield from slices

    def computes(self, owner: BlockOwner) -> bool:
        """Whether they use the sequence's blocks."""
        return any(piece.owner == owner for piece in self.all_slices)

    def computed_kv(self, sequence: PrefillSequence) -> ComputedKV:
        """What a later chunk has of its layers counts once it is the oldest."""
        for piece in self.slices:
            if piece.owner == sequence.owner:
                return ComputedKV(sequence.computed_tokens, piece.tokens, self._computed_layers)
        return ComputedKV(sequence.computed_tokens)

    def begin(self, slices: tuple[ChunkSlice, ...]) -> None:
        self._chunks.append(slices)
        self._has_advanced = False

    def advance(self) -> None:
        """The newest has left the first stage. Raises ValueError where it had, or there is none."""
        if not self._chunks or self._has_advanced:
            raise ValueError(f"no chunk is in the first stage; {len(self._chunks)} are in flight")
        self._has_advanced = True

    def take_layers(self, layers: int) -> None:
        """The first ``layers`` of the oldest are computed. Raises ValueError where no chunk has just come so
        far."""
        if not (self._chunks and self._computed_layers < layers <= self.layers):
            raise ValueError(
                f"{layers} layers of a chunk are computed, of {self._computed_layers} before and"
                f" {self.layers} in all; {len(self.slices)} slices are in flight"
            )
        self._computed_layers = layers

    def end(self, tokens: Sequence[SampledToken | None] | None) -> tuple[ChunkSlice, ...]:
        """The oldest's. ``tokens``: the one drawn for each slice that ends its prompt, None for the others;
        None where the chunk failed. Raises ValueError where no such chunk is in flight."""
        slices = self.slices
        count = len(slices) if tokens is None else len(tokens)
        if not slices or len(slices) != count:
            raise ValueError(f"a chunk of {count} slices ended, {len(slices)} are in flight")
        for piece, token in zip(slices, tokens or (), strict=False):
            if piece.is_last != (token is not None):
                raise ValueError(f"{piece.owner}: is_last is {piece.is_last}, the drawn token {token}")
        self._chunks.popleft()
        self._computed_layers = 0
        return slices
