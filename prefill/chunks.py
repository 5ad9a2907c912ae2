"""The chunk in flight: which prompts' tokens the engine computes now, and how many layers of them it has.

There is at most one, and until it ends its sequences' blocks are read and written. What of a sequence's KV
stands in the pool follows from it (``prefill.handover``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.kv.blocks import BlockOwner
from common.messages import SampledToken
from prefill.events import ChunkSlice
from prefill.handover import ComputedKV
from prefill.sequence import PrefillSequence


@dataclass(slots=True)
class ChunkInFlight:
    """Of a model of so many ``layers``; ``slices`` is empty where nothing is computed."""

    layers: int
    slices: tuple[ChunkSlice, ...] = ()
    _computed_layers: int = 0

    @property
    def is_computing(self) -> bool:
        return bool(self.slices)

    def computes(self, owner: BlockOwner) -> bool:
        """Whether it uses the sequence's blocks."""
        return any(piece.owner == owner for piece in self.slices)

    def computed_kv(self, sequence: PrefillSequence) -> ComputedKV:
        for piece in self.slices:
            if piece.owner == sequence.owner:
                return ComputedKV(sequence.computed_tokens, piece.tokens, self._computed_layers)
        return ComputedKV(sequence.computed_tokens)

    def begin(self, slices: tuple[ChunkSlice, ...]) -> None:
        self.slices = slices

    def take_layers(self, layers: int) -> None:
        """The first ``layers`` are computed. Raises ValueError where no chunk has just come so far."""
        if not (self.slices and self._computed_layers < layers <= self.layers):
            raise ValueError(
                f"{layers} layers of a chunk are computed, of {self._computed_layers} before and"
                f" {self.layers} in all; {len(self.slices)} slices are in flight"
            )
        self._computed_layers = layers

    def end(self, tokens: Sequence[SampledToken | None] | None) -> tuple[ChunkSlice, ...]:
        """``tokens``: the one drawn for each slice that ends its prompt, None for the others; None where the
        chunk failed. Raises ValueError where no such chunk is in flight."""
        count = len(self.slices) if tokens is None else len(tokens)
        if not self.slices or len(self.slices) != count:
            raise ValueError(f"a chunk of {count} slices ended, {len(self.slices)} are in flight")
        for piece, token in zip(self.slices, tokens or (), strict=False):
            if piece.is_last != (token is not None):
                raise ValueError(f"{piece.owner}: is_last is {piece.is_last}, the drawn token {token}")
        slices, self.slices, self._computed_layers = self.slices, (), 0
        return slices
