"""Running sequences that leave, as the instance's role has changed or its memory is expected to run out: part
of the decode room's decisions.

While a sequence runs on, a home is sought for it (``SeekHome``); once the scheduler has named one it leaves
between two steps. Its blocks then change their owner: the instance's prefill room hands them over as it does
those of a prompt that it has just computed. Who finds no home goes on here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from common.ids import InstanceId
from common.kv.blocks import BlockAllocator, BlockOwner
from common.messages import GenerationRequest, Placement
from decode.events import HandOn, SeekHome
from decode.sequence import DecodeSequence, Sequences

HANDED_ON_ROOM = "handed-on"
"""Of blocks that this room has given up and prefill has yet to take: it does so before the next event."""


@dataclass(slots=True)
class Departures:
    """``departed``: how many have left since the last change of the role. ``homes``: that were found for
    those that have yet to leave."""

    blocks: BlockAllocator
    is_leaving: bool = False
    departed: int = 0
    _sought: set[BlockOwner] = field(default_factory=set)
    _asked: set[BlockOwner] = field(default_factory=set)
    homes: dict[BlockOwner, Placement] = field(default_factory=dict)

    def check(self, sequences: Sequences) -> None:
        """Invariants, called by tests after every event."""
        assert self.homes.keys() <= self._sought, "a home that nobody sought"
        assert self._asked <= self._sought, "one that was asked to leave is forgotten"
        assert self._sought <= sequences.keys(), "a home is sought for a sequence that is gone"

    def change_role(self, *, is_decode: bool) -> None:
        """For whom a home was found leaves nevertheless: it is expected there."""
        self.is_leaving, self.departed = not is_decode, 0

    def seek(self, running: Iterable[DecodeSequence]) -> list[SeekHome]:
        """For those that run and have not been asked for yet. Called after every event."""
        if not self.is_leaving:
            return []
        leaving = [each for each in running if each.owner not in self._sought and not each.is_cancelled]
        self._sought.update(sequence.owner for sequence in leaving)
        return [SeekHome(sequence.owner, _as_it_stands(sequence)) for sequence in leaving]

    def ask(self, sequence: DecodeSequence, wanted: InstanceId) -> list[SeekHome]:
        """Of a running one. For whom a home is sought already, nothing changes."""
        if sequence.owner in self._sought or sequence.is_cancelled:
            return []
        self._sought.add(sequence.owner)
        self._asked.add(sequence.owner)
        return [SeekHome(sequence.owner, _as_it_stands(sequence), wanted)]

    def is_sought(self, owner: BlockOwner) -> bool:
        """Whether a home is still wanted."""
        return owner in self._sought and (self.is_leaving or owner in self._asked)

    def find(self, owner: BlockOwner, home: Placement) -> None:
        """Of a sequence that has ended meanwhile, nothing is wanted any more."""
        if owner in self._sought:
            self.homes[owner] = home

    def leave(self, resting: Iterable[DecodeSequence]) -> list[HandOn]:
        """Those that have a home, of all that no step computes. They hold nothing here any more."""
        commands: list[HandOn] = []
        for sequence in resting:
            home = self.homes.get(sequence.owner)
            if home is None:
                continue
            owner = sequence.owner
            handed_on = BlockOwner(HANDED_ON_ROOM, owner.request_id, owner.attempt)
            self.blocks.rename(owner, handed_on)
            commands.append(
                HandOn(
                    owner,
                    handed_on,
                    _as_it_stands(sequence),
                    home,
                    sequence.predicted or sequence.task.lengths,
                )
            )
            self.forget(owner)
            self.departed += 1
        return commands

    def forget(self, owner: BlockOwner) -> None:
        """It is here no more, or nobody seeks for it any more."""
        self._sought.discard(owner)
        self._asked.discard(owner)
        self.homes.pop(owner, None)


def _as_it_stands(sequence: DecodeSequence) -> GenerationRequest:
    """The request with all that was drawn."""
    return msgspec.structs.replace(sequence.request, output_ids=tuple(sequence.output_ids))
