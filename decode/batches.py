"""The batches that take turns, a lane each: which sequences the steps in flight compute, and how lanes share.

A lane has at most one step in flight, and a sequence is in at most one of them: until that step ends its
blocks are read and written.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.kv.blocks import BlockOwner
from decode.events import StepRow
from decode.expectations import Untold
from decode.outlook import Outlook
from decode.sequence import DecodeSequence


@dataclass(slots=True)
class Batches:
    """``kept``: of the step that ended last, in ``kept_lane``, and of those of its rows that go on: the next
    one there may be of the same, with those that join."""

    lanes: int = 1
    kept: Outlook | None = None
    kept_lane: int = 0
    _outlooks: dict[int, Outlook] = field(default_factory=dict)
    steps: dict[int, tuple[StepRow, ...]] = field(default_factory=dict)
    """In flight, by lane."""
    computed: set[BlockOwner] = field(default_factory=set)
    """Whose blocks a step in flight uses. Others look, and change nothing."""

    @property
    def is_computing(self) -> bool:
        return bool(self.steps)

    @property
    def idle_lanes(self) -> list[int]:
        """Those without a step in flight."""
        return [lane for lane in range(self.lanes) if lane not in self.steps]

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
        return owner in self.computed

    def untold(self, of_lane: tuple[int, ...]) -> Untold:
        """So many steps of each lane's in flight have ended."""
        steps = tokens = 0
        for lane, ended in enumerate(of_lane):
            if ended:
                steps += ended
                tokens += ended * len(self.steps[lane])
        return Untold(of_lane, steps, tokens)

    def begin(self, lane: int, outlook: Outlook) -> None:
        self.kept = None
        self.steps[lane], self._outlooks[lane] = outlook.table, outlook
        self.computed.update(outlook.fresh)
        outlook.fresh = []

    def outlook(self, lane: int) -> Outlook:
        """Of the step in flight."""
        return self._outlooks[lane]

    def disturb(self) -> None:
        """Somebody who is computed is to go when the step ends."""
        for outlook in self._outlooks.values():
            outlook.disturb()

    def end(self, lane: int, tokens: int | None) -> Outlook:
        """Of the step: what of it goes on is to be kept (``keep``), or nothing (``let_go``). ``tokens``: how
        many came; None where the step failed. Raises ValueError where no such step is."""
        step = self.steps.get(lane)
        if step is None or tokens not in (None, len(step)):
            raise ValueError(f"lane {lane}: a step of {tokens} rows ended, {len(step or ())} are in flight")
        del self.steps[lane]
        return self._outlooks.pop(lane)

    def keep(self, lane: int, outlook: Outlook, steps: int, gone: list[int]) -> None:
        """So many more have ended, and with them the rows in those places; others are left."""
        outlook.ended += steps
        if gone:
            self.computed.difference_update([outlook.rows[place].owner for place in gone])
            outlook.remove(gone)
            outlook.departed += len(gone)
            outlook.count()
        self.kept, self.kept_lane = outlook, lane

    def let_go(self, outlook: Outlook) -> None:
        """The next step's rows are to be found anew."""
        self.computed.difference_update([row.owner for row in outlook.rows])

    def rest_kept(self) -> None:
        """The step after is chosen later, and nobody is computed until then."""
        kept = self.kept
        if kept is not None and not kept.fresh:
            self.let_go(kept)
            kept.fresh = [row.owner for row in kept.rows]

    def forget_kept(self) -> None:
        if self.kept is not None:
            self.let_go(self.kept)
            self.kept = None

    def even_out(self, running: Iterable[DecodeSequence], resting: Sequence[DecodeSequence]) -> None:
        """Batches that take turns should be alike: a lane's surplus, of those at rest, goes to the others."""
        if self.lanes == 1:
            return
        counts = [0] * self.lanes
        for sequence in running:
            counts[sequence.lane] += 1
        for sequence in reversed(resting):
            fewest = min(counts)
            if max(counts) - fewest <= 1:
                return
            if counts[sequence.lane] - fewest > 1:
                counts[sequence.lane] -= 1
                sequence.lane = counts.index(fewest)
                counts[sequence.lane] += 1

    def check(self) -> None:
        """Invariants, called by tests after every event."""
        owners = [row.owner for step in self.steps.values() for row in step]
        assert len({*owners}) == len(owners), "a sequence is in two steps at once"
        assert self.kept is None or self.kept.fresh, "rows that are kept are computed beyond an event"
        assert self._outlooks.keys() == self.steps.keys()
        for lane, outlook in self._outlooks.items():
            outlook.check()
            assert self.steps[lane] == outlook.table
        assert {*owners} == self.computed, "who is computed is not known"
        assert all(0 <= lane < self.lanes for lane in self.steps), "a step in no lane"
