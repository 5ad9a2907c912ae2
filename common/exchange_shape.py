"""How an exchange's two regions lie in memory: offsets and sizes from a few numbers both sides know."""

import msgspec

from common.spec import ElementType

LINE = 64
SIGNAL_BYTES = 3 * LINE
"""Of the sequence numbers, at a region's beginning."""
ELEMENT_BYTES: dict[ElementType, int] = {"bfloat16": 2, "float32": 4}


class ExchangeShape(msgspec.Struct, frozen=True):
    """One attention worker's share of the heads, and the largest step.

    ``plan_words`` bounds a step's plan: one word, and three words and its block table a sequence.
    """

    max_tokens: int
    plan_words: int
    heads: int
    kv_heads: int
    head_dim: int
    element_type: ElementType

    @property
    def plan_offset(self) -> int:
        return SIGNAL_BYTES

    @property
    def q_offset(self) -> int:
        return self.plan_offset + _lines(8 * self.plan_words)

    @property
    def k_offset(self) -> int:
        return self.q_offset + self._rows(self.heads)

    @property
    def v_offset(self) -> int:
        return self.k_offset + self._rows(self.kv_heads)

    @property
    def request_bytes(self) -> int:
        return self.v_offset + self._rows(self.kv_heads)

    @property
    def output_offset(self) -> int:
        return SIGNAL_BYTES

    @property
    def response_bytes(self) -> int:
        return self.output_offset + self._rows(self.heads)

    def _rows(self, heads: int) -> int:
        return _lines(self.max_tokens * heads * self.head_dim * ELEMENT_BYTES[self.element_type])


def _lines(nbytes: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-nbytes // LINE) * LINE
