"""How a KV pool's bytes lie, and which byte runs carry a sequence from one pool to another.

A pool is ONE contiguous buffer ``[layers, 2, blocks, kv_heads, block_size, head_dim]`` (2: keys, values).
A *page* is one block of one plane (layer, K or V): head-major, so that attention kernels read each head's
tokens in one stretch (Infinite-LLM's rBlocks and P/D-Serve's block-free send both cut along it). Offsets and
lengths are bytes from the pool's beginning. Knows nothing of torch or of transports.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

ByteRun = tuple[int, int]
"""(offset, length)"""
PairedRun = tuple[int, int, int]
"""(source offset, destination offset, length)"""


@dataclass(frozen=True, slots=True)
class KVSpan:
    """A part of one sequence's KV: those positions in those layers."""

    layers: range
    positions: range


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of a pool, except for its number of blocks. Raises ValueError for a size below 1."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    element_bytes: int

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_size", "element_bytes"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")

    @property
    def token_bytes(self) -> int:
        """KV of one token over all layers."""
        return self.layers * self.token_layer_bytes

    @property
    def token_layer_bytes(self) -> int:
        """KV of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def head_block_bytes(self) -> int:
        """One head's keys, or its values, of one block."""
        return self.block_size * self.head_dim * self.element_bytes

    @property
    def page_bytes(self) -> int:
        """One block's keys, or its values, in one layer."""
        return self.kv_heads * self.head_block_bytes

    @property
    def block_bytes(self) -> int:
        """One block over all layers, keys and values."""
        return self.layers * 2 * self.page_bytes

    def pool_bytes(self, total_blocks: int) -> int:
        return total_blocks * self.block_bytes

    def layer_bytes(self, total_blocks: int) -> int:
        """Keys and values of one layer: the stride between layers."""
        return 2 * total_blocks * self.page_bytes

    def runs(self, blocks: Sequence[int], tokens: int, layers: range, total_blocks: int) -> list[ByteRun]:
        """The bytes of a sequence's first ``tokens`` positions, in (layer, K/V, block, head) order."""
        pairs = self.paired_runs(blocks, blocks, range(tokens), total_blocks, total_blocks, layers)
        return [(offset, length) for offset, _, length in pairs]

    def paired_runs(
        self,
        source_blocks: Sequence[int],
        destination_blocks: Sequence[int],
        positions: range,
        source_total_blocks: int,
        destination_total_blocks: int,
        layer_range: range,
        heads: range | None = None,
    ) -> list[PairedRun]:
        """What to copy so that the destination holds those positions of the sequence, in those layers.

        ``heads``: the KV heads that the destination holds, and no others (Lamina 2, section 5: head-level
        partition); None: all. Whole blocks are one run a page, partial ones one run a head; runs adjacent on
        both sides are one. Raises ValueError where the block tables cannot hold the positions or leave the
        pools.
        """
        held = self if heads is None else self.of_heads(heads)
        first_head = 0 if heads is None else heads.start
        self._check_blocks("source_blocks", source_blocks, positions, source_total_blocks)
        self._check_blocks("destination_blocks", destination_blocks, positions, destination_total_blocks)
        if layer_range and not (min(layer_range) >= 0 and max(layer_range) < self.layers):
            raise ValueError(f"layer_range = {layer_range}: must lie in 0..{self.layers - 1}")
        in_plane = list(
            _coalesced(self._plane_runs(source_blocks, destination_blocks, positions, held, first_head))
        )
        source_plane = source_total_blocks * self.page_bytes
        destination_plane = destination_total_blocks * held.page_bytes
        planes = (2 * layer + half for layer in layer_range for half in (0, 1))
        return list(
            _coalesced(
                (plane * source_plane + source, plane * destination_plane + destination, length)
                for plane in planes
                for source, destination, length in in_plane
            )
        )

    def of_heads(self, heads: range) -> "KVLayout":
        """The layout of a pool that holds these KV heads only. Raises ValueError for heads that are not."""
        if not (heads and heads.step == 1 and heads.start >= 0 and heads.stop <= self.kv_heads):
            raise ValueError(f"heads = {heads}: must lie in 0..{self.kv_heads - 1}")
        return replace(self, kv_heads=len(heads))

    def _plane_runs(
        self,
        source_blocks: Sequence[int],
        destination_blocks: Sequence[int],
        positions: range,
        held: "KVLayout",
        first_head: int,
    ) -> Iterator[PairedRun]:
        """The runs within one plane; every plane of a pool repeats them."""
        row_bytes = self.head_dim * self.element_bytes
        begin = positions.start
        while begin < positions.stop:
            index, offset = divmod(begin, self.block_size)
            stop = min(positions.stop, begin - offset + self.block_size)
            source = source_blocks[index] * self.page_bytes + first_head * self.head_block_bytes
            destination = destination_blocks[index] * held.page_bytes
            if stop - begin == self.block_size:
                yield source, destination, held.page_bytes
            else:
                for head in range(held.kv_heads):
                    skipped = head * self.head_block_bytes + offset * row_bytes
                    yield source + skipped, destination + skipped, (stop - begin) * row_bytes
            begin = stop

    def _check_blocks(self, name: str, blocks: Sequence[int], positions: range, total_blocks: int) -> None:
        if positions.start < 0 or positions.step != 1 or positions.stop > len(blocks) * self.block_size:
            raise ValueError(
                f"positions = {positions}: {name} holds {len(blocks)} blocks of {self.block_size} tokens"
            )
        if blocks and not (min(blocks) >= 0 and max(blocks) < total_blocks):
            raise ValueError(f"{name}: block ids must lie in 0..{total_blocks - 1}, got {list(blocks)}")


def _coalesced(runs: Iterable[PairedRun]) -> Iterator[PairedRun]:
    """Joins runs that continue each other on both sides."""
    current: PairedRun | None = None
    for source, destination, length in runs:
        if current is None:
            current = (source, destination, length)
            continue
        if source == current[0] + current[2] and destination == current[1] + current[2]:
            current = (current[0], current[1], current[2] + length)
        else:
            yield current
            current = (source, destination, length)
    if current is not None:
        yield current
