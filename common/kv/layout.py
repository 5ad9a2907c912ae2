"""How a KV pool lies in memory, and which bytes of it move when a sequence changes instance.

One contiguous buffer ``[layers, 2 (K, V), blocks, kv_heads, block_size, head_dim]``: head-major pages, so a
kernel reads one head's keys of a block as one run, and one layer's blocks are one dense array. No torch here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ModelError


@dataclass(frozen=True, slots=True)
class KVLayout:
    """``element_bytes`` is the width of one number; ``block_size`` is in tokens."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    element_bytes: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ModelError(f"KV layout: {name} = {getattr(self, name)}: must be at least 1")

    @property
    def head_block_bytes(self) -> int:
        """One head's keys (or values) of one block."""
        return self.block_size * self.head_dim * self.element_bytes

    @property
    def page_bytes(self) -> int:
        """All heads' keys (or values) of one block in one layer: one contiguous page."""
        return self.kv_heads * self.head_block_bytes

    @property
    def block_bytes(self) -> int:
        """What one block takes over all layers, K and V."""
        return self.layers * 2 * self.page_bytes

    @property
    def token_bytes(self) -> int:
        """KV of one token over all layers (Aladdin eq. 1's slope)."""
        return self.block_bytes // self.block_size

    def pool_bytes(self, total_blocks: int) -> int:
        return total_blocks * self.block_bytes

    def paired_runs(
        self,
        source_blocks: Sequence[int],
        destination_blocks: Sequence[int],
        tokens: int,
        source_total_blocks: int,
        destination_total_blocks: int,
        layers: range,
    ) -> list[tuple[int, int, int]]:
        """``(source_offset, destination_offset, nbytes)`` that copy a sequence's first ``tokens`` positions.

        Whole blocks are one run per layer and K/V, joined where both sides' ids are adjacent. Of a last
        block that is not full, only the filled part of each head moves.
        """
        whole, rest = divmod(tokens, self.block_size)
        if len(source_blocks) < whole + bool(rest) or len(destination_blocks) < whole + bool(rest):
            raise ValueError(f"{tokens} tokens do not fit the given blocks of {self.block_size}")
        spans = _adjacent_spans(source_blocks[:whole], destination_blocks[:whole])
        rest_bytes = rest * self.head_dim * self.element_bytes
        runs: list[tuple[int, int, int]] = []
        for layer in layers:
            for key_or_value in range(2):
                array = 2 * layer + key_or_value
                source = array * source_total_blocks * self.page_bytes
                destination = array * destination_total_blocks * self.page_bytes
                for source_block, destination_block, blocks in spans:
                    runs.append(
                        (
                            source + source_block * self.page_bytes,
                            destination + destination_block * self.page_bytes,
                            blocks * self.page_bytes,
                        )
                    )
                if rest:
                    source_page = source + source_blocks[whole] * self.page_bytes
                    destination_page = destination + destination_blocks[whole] * self.page_bytes
                    for head in range(self.kv_heads):
                        offset = head * self.head_block_bytes
                        runs.append((source_page + offset, destination_page + offset, rest_bytes))
        return runs


def _adjacent_spans(
    source_blocks: Sequence[int], destination_blocks: Sequence[int]
) -> list[tuple[int, int, int]]:
    """``(source_block, destination_block, blocks)``, joined where both sides go up by one."""
    spans: list[tuple[int, int, int]] = []
    for source, destination in zip(source_blocks, destination_blocks, strict=True):
        if spans:
            first_source, first_destination, blocks = spans[-1]
            if first_source + blocks == source and first_destination + blocks == destination:
                spans[-1] = (first_source, first_destination, blocks + 1)
                continue
        spans.append((source, destination, 1))
    return spans
