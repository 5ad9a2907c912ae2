"""What lies in one instance's KV pool: of whom, and which position. It shows every block used by two."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from common.ids import RequestId
from common.kv.layout import KVSpan

Content = tuple[RequestId, int]
LATE_BYTES: Content = (RequestId("late"), 0)

LANDING_S = 1.9
"""After its sender has settled or died, a transfer's last bytes land within this time."""


@dataclass(slots=True)
class Memory:
    block_size: int
    _slots: dict[tuple[int, int], Content] = field(default_factory=dict)
    _layers: dict[tuple[int, int], set[tuple[Content, int]]] = field(default_factory=dict)

    def write_layers(
        self, block_table: Sequence[int], request_id: RequestId, span: KVSpan, layers: int
    ) -> None:
        """Of ``layers``, those of the span; a position is there when all its layers are."""
        for position in span.positions:
            content = (request_id, position)
            written = self._layers.setdefault(self._slot(block_table, position), set())
            written |= {(content, layer) for layer in span.layers}
            if {(content, layer) for layer in range(layers)} <= written:
                self._layers.pop(self._slot(block_table, position))
                self.write(block_table, request_id, position, 1)

    def write(self, block_table: Sequence[int], request_id: RequestId, start: int, tokens: int) -> None:
        for position in range(start, start + tokens):
            self._slots[self._slot(block_table, position)] = (request_id, position)

    def copy(self, blocks: Sequence[int], into: "Memory", destination_blocks: Sequence[int]) -> None:
        """Whatever lies in ``blocks``."""
        for block, destination in zip(blocks, destination_blocks, strict=True):
            for offset in range(self.block_size):
                content = self._slots.get((block, offset))
                if content is not None:
                    into._slots[destination, offset] = content

    def check(self, block_table: Sequence[int], request_id: RequestId, tokens: int) -> None:
        """The first ``tokens`` positions of the sequence lie in its blocks."""
        for position in range(tokens):
            found = self._slots.get(self._slot(block_table, position))
            assert found == (request_id, position), f"{request_id} finds {found} at position {position}"

    def spoil(self, blocks: Sequence[int]) -> None:
        """Bytes of a transfer that was given up on land."""
        for block in blocks:
            for offset in range(self.block_size):
                self._slots[block, offset] = LATE_BYTES
                self._layers.pop((block, offset), None)

    def _slot(self, block_table: Sequence[int], position: int) -> tuple[int, int]:
        return block_table[position // self.block_size], position % self.block_size


@runtime_checkable
class HasMemory(Protocol):
    """Somebody on the bus whose blocks others write into."""

    @property
    def memory(self) -> Memory: ...
