"""Whose turn it is where a step may not attend to all that runs: part of the decode room's decisions."""

from collections.abc import Container
from dataclasses import dataclass, field

from common.kv.blocks import BlockOwner
from decode.outlook import Outlook
from decode.sequence import DecodeSequence
from scheduler.policy.decode_batching import choose_in_turn

TURNS = 1 << 20
"""Of a step: more than a batch has sequences. The first is that of whoever came while it was computed."""


@dataclass(slots=True)
class ContextTurns:
    """``most_tokens``: of a step's contexts together, as in DistServe's simulator; None: any number. Who is
    left out comes before those who were computed, and before who has come since.

    Of each lane: how often it was chosen for, whose turns are when, and the share of its sequences that was
    in its newest step.
    """

    most_tokens: int | None = None
    _steps: dict[int, int] = field(default_factory=dict)
    _turns: dict[int, dict[BlockOwner, int]] = field(default_factory=dict)
    _shares: dict[int, float] = field(default_factory=dict)

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

    def take_all(self, lane: int) -> None:
        """Its next step is of all its sequences."""
        if self.most_tokens is not None:
            self._shares[lane] = 1.0

    def steps_per_token(self, lane: int) -> float:
        """Of each sequence, as things are."""
        return 1.0 / self._shares.get(lane, 1.0)

    def choose(
        self, lane: int, ready: list[DecodeSequence], present: Container[BlockOwner]
    ) -> list[DecodeSequence]:
        """Those of the lane's next step. Both are in the order of arrival. ``present``: who is in the room,
        and keeps his turn where he is not ``ready``."""
        if self.most_tokens is None:
            return ready
        steps, turns = self._steps.get(lane, 0), self._turns.get(lane, {})
        newcomers = steps * TURNS
        own = [turns.get(each.owner, newcomers) for each in ready]
        chosen = choose_in_turn([each.tokens for each in ready], own, self.most_tokens)
        steps += 1
        for place, index in enumerate(chosen):
            own[index] = steps * TURNS + 1 + place
        known = {owner: turn for owner, turn in turns.items() if owner in present}
        known |= {each.owner: turn for each, turn in zip(ready, own, strict=True)}
        self._steps[lane], self._turns[lane] = steps, known
        self._shares[lane] = len(chosen) / len(ready)
        return [ready[index] for index in sorted(chosen)]
