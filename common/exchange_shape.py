"""How an exchange's two regions lie in memory: offsets and sizes from a few numbers both sides know.

Everything goes as *records*: the data, padded to whole words, then a trailer of two words: when it is due (an
emulated link's, else 0) and its number. One write carries both, and the reader polls the trailer.
"""

from dataclasses import dataclass

import msgspec

from common.spec import ELEMENT_BYTES, ElementType

LINE = 64
WORD = 8
TRAILER_BYTES = 2 * WORD
PLAN_HEAD_WORDS = 3
"""When it is due, its number, how many words follow; and the number again after these."""
MAX_MINI_BATCHES = 8


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Bytes of one record within a region. ``number_word`` indexes the region's words; the word before it
    says when the record is due."""

    offset: int
    nbytes: int
    number_word: int


class ExchangeShape(msgspec.Struct, frozen=True):
    """One attention worker's share of the heads, and the largest step.

    ``plan_words`` bounds a step's plan: four words a sequence and its block table.
    """

    max_tokens: int
    plan_words: int
    heads: int
    kv_heads: int
    head_dim: int
    element_type: ElementType

    @property
    def q_row_bytes(self) -> int:
        """Of one token; the output's rows are as long."""
        return self.heads * self.head_dim * ELEMENT_BYTES[self.element_type]

    @property
    def kv_row_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_dim * ELEMENT_BYTES[self.element_type]

    @property
    def q_offset(self) -> int:
        return _lines(WORD * (PLAN_HEAD_WORDS + self.plan_words + 1))

    @property
    def kv_offset(self) -> int:
        return self.q_offset + self._area_bytes(self.q_row_bytes)

    @property
    def request_bell(self) -> int:
        """The offset of what is rung as records come (``common.bell``), behind all of them."""
        return self.kv_offset + self._area_bytes(self.kv_row_bytes)

    @property
    def response_bell(self) -> int:
        return self._area_bytes(self.q_row_bytes)

    @property
    def request_bytes(self) -> int:
        return self.request_bell + LINE

    @property
    def response_bytes(self) -> int:
        return self.response_bell + LINE

    def record(self, area_offset: int, row_bytes: int, tokens_before: int, tokens: int) -> RecordPlace:
        """Of the mini-batch of ``tokens`` rows that follow ``tokens_before`` others in the step."""
        offset = area_offset + tokens_before * (_lines(row_bytes) + LINE)
        data_bytes = -(-tokens * row_bytes // WORD) * WORD
        return RecordPlace(offset, data_bytes + TRAILER_BYTES, (offset + data_bytes) // WORD + 1)

    def _area_bytes(self, row_bytes: int) -> int:
        return self.max_tokens * (_lines(row_bytes) + LINE)


def _lines(nbytes: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-nbytes // LINE) * LINE
