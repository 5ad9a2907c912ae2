"""What the model's slices and the attention between them say to each other.

The model never sees a KV cache: between two slices it hands out Q, then K and V, and receives the attention's
output. Whoever answers (this process's pool, or attention workers elsewhere) implements ``AttentionIO``.
Q goes first, so that attention over the cached tokens can start before K and V exist (Infinite-LLM, Lamina).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class AttentionIO(Protocol):
    """One step's attention, layer by layer: ``send_q``, ``send_kv``, ``receive``, then the next layer.

    Tensors are flat over the batch's T tokens and may be strided views.
    """

    def send_q(self, layer: int, q: torch.Tensor) -> None:
        """``q`` [T, heads, head_dim], rotated."""
        ...

    def send_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """``k``, ``v`` [T, kv_heads, head_dim], rotated."""
        ...

    def receive(self, layer: int) -> torch.Tensor:
        """[T, heads, head_dim], contiguous, in the model's dtype."""
        ...


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """``length`` new tokens of one sequence in a batch, after ``start`` tokens whose KV exists.

    ``key`` names the sequence to whoever holds its KV; 0: nobody will ask for it.
    """

    block_table: Sequence[int]
    start: int
    length: int
    key: int = 0


class StepAttention(AttentionIO, Protocol):
    """Attention that is told of each step before its first layer."""

    def begin(self, chunks: Sequence[SequenceChunk]) -> None:
        """Raises ValueError for chunks that cannot be computed."""
        ...

    def give_up(self) -> None:
        """The step failed, at its beginning or amid its layers. When this returns, nothing writes into its
        sequences' KV any more."""
        ...
