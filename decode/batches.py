"""The batches that take turns, a lane each: which sequences the steps in flight compute, and how lanes share.

A lane has at most one step in flight, and a sequence is in at most one of them: until that step ends its
blocks are read and written.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.kv.blocks import BlockOwner
from decode.events import StepRow
from decode.expectations import ALL_TOLD, Untold
from decode.sequence import DecodeSequence


@dataclass(slots=True)
class Outlook:
    """Of a step's ``rows``: nobody ends within fewer than ``left`` steps, and for ``room`` steps each has a
    block, the one that is computed, or is next, being the first. ``rooms``: the same of each row, as it was
    ``ended`` steps before. ``end_token_ids``: any of which ends one of them."""

    rows: tuple[StepRow, ...]
    left: int
    rooms: list[int]
    end_token_ids: frozenset[int]
    room: int = field(init=False)
    ended: int = 0

    def __post_init__(self) -> None:
        self.room = min(self.rooms)

    def lacking(self, steps: int) -> list[tuple[int, int]]:
        """(room, index) of each row that has it for fewer steps than that."""
        enough = steps + self.ended
        return [(room - self.ended, index) for index, room in enumerate(self.rooms) if room < enough]

    def grow(self, index: int, tokens: int) -> None:
        """A row has room for so many more."""
        self.rooms[index] += tokens

    def count(self) -> None:
        """After rows have grown."""
        self.room = min(self.rooms) - self.ended


@dataclass(slots=True)
class Batches:
    """``kept``: of the step that ended last, where nobody ended with it: the next one may be of the same
    rows."""

    lanes: int = 1
    kept: Outlook | None = None
    _outlooks: dict[int, Outlook] = field(default_factory=dict)
    steps: dict[int, tuple[StepRow, ...]] = field(default_factory=dict)
    """In flight, by lane."""
    _computed: set[BlockOwner] = field(default_factory=set)

    @property
    def is_computing(self) -> bool:
        return bool(self.steps)

    @property
    def is_any_idle(self) -> bool:
        """Whether a lane has no step in flight."""
        return len(self.steps) < self.lanes

    @property
    def idle_lanes(self) -> list[int]:
        """Those without a step in flight."""
        return [lane for lane in range(self.lanes) if lane not in self.steps]

    @property
    def computes_any(self) -> bool:
        """Whether ``computes`` is true of anybody."""
        return bool(self._computed)

    @property
    def rows(self) -> int:
        """Of all steps in flight."""
        return sum([len(step) for step in self.steps.values()])

    def is_uneven(self, lane: int) -> bool:
        """Whether some of the lane's rows would go to another's next step (``even_out``)."""
        least = min(len(self.steps.get(other, ())) for other in range(self.lanes))
        return len(self.steps[lane]) - least > 1

    def computes(self, owner: BlockOwner) -> bool:
        """Whether a step in flight uses the sequence's blocks."""
        return owner in self._computed

    def untold(self, steps: int) -> Untold:
        """So many steps of the only one in flight have ended."""
        return Untold(steps, self._computed) if steps else ALL_TOLD

    def begin(self, lane: int, outlook: Outlook) -> None:
        self.kept = None
        self.steps[lane], self._outlooks[lane] = outlook.rows, outlook
        if len(self._computed) != len(outlook.rows) or self.lanes > 1:
            self._computed.update([row.owner for row in outlook.rows])

    def outlook(self, lane: int) -> Outlook:
        """Of the step in flight."""
        return self._outlooks[lane]

    def disturb(self) -> None:
        """Somebody who is computed is to go when the step ends."""
        for outlook in self._outlooks.values():
            outlook.left = 1

    def end_quietly(self, lane: int, steps: int) -> None:
        """So many steps have ended and nobody with them."""
        del self.steps[lane]
        self.kept = outlook = self._outlooks.pop(lane)
        outlook.left -= steps
        outlook.room -= steps
        outlook.ended += steps

    def forget_kept(self) -> None:
        """The next step's rows are to be found anew."""
        if self.kept is not None:
            self._computed.difference_update([row.owner for row in self.kept.rows])
            self.kept = None

    def end(self, lane: int, tokens: int | None) -> tuple[tuple[StepRow, ...], frozenset[int]]:
        """The step's rows, and the tokens that end any of them. ``tokens``: how many came; None where the
        step failed. Raises ValueError where no such step is."""
        step = self.steps.get(lane)
        if step is None or tokens not in (None, len(step)):
            raise ValueError(f"lane {lane}: a step of {tokens} rows ended, {len(step or ())} are in flight")
        del self.steps[lane]
        self._computed.difference_update([row.owner for row in step])
        return step, self._outlooks.pop(lane).end_token_ids

    def even_out(self, running: Iterable[DecodeSequence], resting: Sequence[DecodeSequence]) -> None:
        """Batches that take turns should be alike: a lane's surplus, of those at rest, goes to the others."""
        if self.lanes == 1:
            return
        counts = Counter(sequence.lane for sequence in running)
        for sequence in reversed(resting):
            least = min(range(self.lanes), key=lambda lane: counts[lane])
            if counts[sequence.lane] - counts[least] > 1:
                counts[sequence.lane] -= 1
                counts[least] += 1
                sequence.lane = least

    def check(self) -> None:
        """Invariants, called by tests after every event."""
        owners = [row.owner for step in self.steps.values() for row in step]
        assert len({*owners}) == len(owners), "a sequence is in two steps at once"
        assert self.kept is None, "rows are kept beyond an event"
        assert self._outlooks.keys() == self.steps.keys()
        assert {*owners} == self._computed, "who is computed is not known"
        assert all(0 <= lane < self.lanes for lane in self.steps), "a step in no lane"
