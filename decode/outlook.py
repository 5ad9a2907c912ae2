"""What is known beforehand of a lane's steps: who is computed, until when nobody ends, and for how long there
are blocks."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.kv.blocks import BlockOwner
from decode.events import StepRow
from decode.sequence import DecodeSequence


@dataclass(slots=True)
class Outlook:
    """Of the ``rows`` of the step that is computed, or is next, in the order of arrival. It is kept from one
    step to the next, and whoever joins or goes changes what is known of himself alone: ``_ends`` and
    ``_rooms`` say how many steps will have ``ended`` when each may draw no more, and has no block for its
    next token; ``_bases`` by how much each has more tokens than that. ``departed``: from the batch, as the
    newest step began (``Sequences``)."""

    block_size: int
    eos_token_ids: tuple[int, ...]
    departed: int = 0
    rows: list[StepRow] = field(default_factory=list)
    ended: int = 0
    fresh: list[BlockOwner] = field(default_factory=list)
    _numbers: list[int] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)
    _rooms: list[int] = field(default_factory=list)
    _bases: list[int] = field(default_factory=list)
    _outputs: list[list[int]] = field(default_factory=list)
    _first_end: int = 0
    _first_room: int = 0
    _table: tuple[StepRow, ...] | None = None
    _stops: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _end_token_ids: frozenset[int] | None = None

    @property
    def table(self) -> tuple[StepRow, ...]:
        """The rows, as the engine is given them."""
        if self._table is None:
            self._table = tuple(self.rows)
        return self._table

    @property
    def left(self) -> int:
        """Nobody ends within fewer steps."""
        return self._first_end - self.ended

    @property
    def room(self) -> int:
        """For so many steps each has a block, the one that is computed, or is next, being the first."""
        return self._first_room - self.ended

    @property
    def context_tokens(self) -> int:
        """That the step attends to, of all rows."""
        return sum(self._bases) + self.ended * len(self.rows)

    def draw(self, token_ids: list[int]) -> None:
        """Each of them by all rows."""
        for output_ids in self._outputs:
            output_ids.extend(token_ids)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Any of which ends one of the rows."""
        if self._end_token_ids is None:
            self._end_token_ids = frozenset(self.eos_token_ids).union(*self._stops.values())
        return self._end_token_ids

    def add(self, sequence: DecodeSequence, block_table: list[int]) -> None:
        """To be counted (``count``)."""
        row, number = sequence.row(block_table), sequence.number
        place = bisect_left(self._numbers, number)
        base = row.prompt_tokens + len(row.output_ids) - self.ended
        self.rows.insert(place, row)
        self._numbers.insert(place, number)
        self._ends.insert(place, self.ended + row.max_tokens - len(row.output_ids))
        self._rooms.insert(place, len(row.block_table) * self.block_size + 1 - base)
        self._bases.insert(place, base)
        self._outputs.insert(place, row.output_ids)
        self.fresh.append(row.owner)
        if sequence.stop_token_ids:
            self._stops[number] = sequence.stop_token_ids
            self._end_token_ids = None

    def fill(
        self, sequences: Sequence[DecodeSequence], block_table: Callable[[BlockOwner], list[int]]
    ) -> None:
        """A new one with these, in the order of arrival; and counts them."""
        size = self.block_size
        self.rows = rows = [each.row(block_table(each.owner)) for each in sequences]
        self._numbers = [each.number for each in sequences]
        self._outputs = [row.output_ids for row in rows]
        drawn = [len(output_ids) for output_ids in self._outputs]
        self._ends = [row.max_tokens - each for row, each in zip(rows, drawn, strict=True)]
        self._bases = [row.prompt_tokens + each for row, each in zip(rows, drawn, strict=True)]
        self._rooms = [
            len(row.block_table) * size + 1 - base for row, base in zip(rows, self._bases, strict=True)
        ]
        self.fresh = [row.owner for row in rows]
        self._stops = {each.number: each.stop_token_ids for each in sequences if each.stop_token_ids}
        self.count()

    def remove(self, places: list[int]) -> None:
        """Ascending. Those left are to be counted."""
        for place in reversed(places):
            if self._stops.pop(self._numbers[place], None):
                self._end_token_ids = None
            for column in (self._numbers, self._ends, self._rooms, self._bases):
                del column[place]
            del self.rows[place], self._outputs[place]

    def count(self) -> None:
        """After rows have come, gone or grown. There is one at least."""
        self._first_end, self._first_room = min(self._ends), min(self._rooms)
        self._table = None

    def disturb(self) -> None:
        """Somebody is to go when the step ends."""
        self._first_end = self.ended + 1

    def ending(self, steps: int) -> list[int]:
        """The places of those that may draw no more when so many have ended."""
        at = self.ended + steps
        return [place for place, end in enumerate(self._ends) if end <= at] if at >= self._first_end else []

    def lacking(self, steps: int) -> list[tuple[int, int]]:
        """(room, place) of each row that has it for fewer steps than that."""
        ended = self.ended
        enough = steps + ended
        return [(room - ended, place) for place, room in enumerate(self._rooms) if room < enough]

    def grow(self, place: int) -> None:
        """By a block. To be counted (``count_room``)."""
        self._rooms[place] += self.block_size

    def count_room(self) -> None:
        self._first_room = min(self._rooms)

    def check(self) -> None:
        """Invariants, called by tests after every event."""
        assert self._numbers == sorted({*self._numbers}), "rows are not in the order of arrival"
        for row, end, room, base in zip(self.rows, self._ends, self._rooms, self._bases, strict=True):
            drawn = len(row.output_ids)
            assert end - self.ended == row.max_tokens - drawn, "a row ends at another time"
            assert base + self.ended == row.prompt_tokens + drawn, "a row has another context"
            assert room - self.ended == len(row.block_table) * self.block_size + 1 - base - self.ended
        assert self._first_room == min(self._rooms)
        assert self._first_end <= min(self._ends)
        assert self.table == tuple(self.rows)
        stops = [each for row in self.rows for each in row.request.sampling.stop_token_ids]
        assert self.end_token_ids == {*self.eos_token_ids, *stops}
        assert not self.fresh
