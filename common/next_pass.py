"""Whose work an engine takes next, of an instance's two rooms: the live and the simulated engine ask here.

What waits is taken as it is. What is due is chosen now, prompts first: decodes that they leave no turn stay
due, and are chosen when it has come, with whoever comes until then.
"""

from typing import Protocol

from common.messages import Phase
from common.room_mates import RoomMates


class Choice(Protocol):
    """Where both rooms want the engine (``scheduler.policy.mixed_batching``)."""

    def takes_prompts(self, step_since_s: float, now: float) -> bool:
        """Whether a chunk, whatever it is, comes before or beside a step that has waited since then."""
        ...

    def choose(self, chunk_tokens: int, sequences: int, step_since_s: float, now: float) -> tuple[Phase, ...]:
        """Whose the next pass is."""
        ...


class Desk(Protocol):
    """Where the rooms' work waits for the engine: one piece of each, at the most."""

    def chunk_tokens(self) -> int | None:
        """Of the chunk that waits."""
        ...

    def step(self) -> tuple[int, float] | None:
        """Of the step that waits: its sequences, and since when."""
        ...

    def ask(self, phase: Phase) -> None:
        """That room to choose; afterwards what it chose waits, if anything."""
        ...


def next_phases(desk: Desk, mates: RoomMates, choice: Choice, now: float) -> tuple[Phase, ...]:
    """Of what waits then. Empty where nothing does, and nothing is due."""
    while True:
        step, tokens = desk.step(), desk.chunk_tokens()
        since_s = mates.step_due_s if step is None else step[1]
        if mates.is_chunk_due and (since_s is None or choice.takes_prompts(since_s, now)):
            desk.ask("prefill")
            tokens = desk.chunk_tokens()
        phases: tuple[Phase, ...] = ("prefill",)
        if tokens is None:
            phases = ("decode",)
        elif since_s is not None:
            phases = choice.choose(tokens, mates.decoding if step is None else step[0], since_s, now)
        if step is None and mates.step_due_s is not None and "decode" in phases:
            desk.ask("decode")
        if desk.step() is None:
            phases = ("prefill",) if tokens is not None else ()
        if phases or not mates.is_any_due:
            return phases
