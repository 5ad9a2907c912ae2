"""Whose turn it is where a step may not attend to all that runs: part of the decode room's decisions."""

from dataclasses import dataclass, field

from common.kv.blocks import BlockOwner
from decode.outlook import Outlook
from decode.sequence import DecodeSequence
from scheduler.policy.decode_batching import choose_in_turn

TURNS = 1 << 20
"""Of a step: more than a batch has sequences. The first is that of whoever came while it was computed."""


@dataclass(slots=True)
class Turns:
    """``most_tokens``: of a step's contexts together, as in DistServe's engine; None: any number. Who is left
    out comes before those who were computed, and before who has come since."""

    most_tokens: int | None = None
    _lanes: dict[int, tuple[int, dict[BlockOwner, int]]] = field(default_factory=dict)
    """How often each was chosen for, and the turns of those that might have been chosen last."""

    def has_room_for(self, outlook: Outlook) -> bool:
        """For its next step."""
        most = self.most_tokens
        return most is None or outlook.context_tokens <= most or len(outlook.rows) == 1

    def steps_of(self, outlook: Outlook, most_steps: int) -> int:
        """That follow on one another, at least one, before the contexts of these rows have grown too long."""
        rows = len(outlook.rows)
        if self.most_tokens is None or rows == 1:
            return most_steps
        return min(most_steps, max(0, self.most_tokens - outlook.context_tokens) // rows + 1)

    def choose(self, lane: int, ready: list[DecodeSequence]) -> list[DecodeSequence]:
        """Of the lane's, in the order of arrival, as what comes of it is."""
        if self.most_tokens is None:
            return ready
        steps, turns = self._lanes.get(lane, (0, {}))
        newcomers = steps * TURNS
        own = [turns.get(each.owner, newcomers) for each in ready]
        chosen = choose_in_turn([each.tokens for each in ready], own, self.most_tokens)
        steps += 1
        for place, index in enumerate(chosen):
            own[index] = steps * TURNS + 1 + place
        self._lanes[lane] = steps, {each.owner: turn for each, turn in zip(ready, own, strict=True)}
        return [ready[index] for index in sorted(chosen)]
