"""What an instance admits, and how it is told to admit something else."""

from typing import Literal

import msgspec

Phase = Literal["prefill", "decode"]
"""Of a request."""
Role = Literal["prefill", "decode", "mixed"]
"""What an instance admits; mixed: both. Both rooms exist in every instance, so a role is a rule, not a
deployment."""


ROLES_WITH: dict[Phase, tuple[Role, ...]] = {"prefill": ("prefill", "mixed"), "decode": ("decode", "mixed")}
"""To instances of which roles requests come for a phase."""


def has_phase(role: Role, phase: Phase) -> bool:
    return role in ROLES_WITH[phase]


class FlipRole(msgspec.Struct, frozen=True, tag="flip"):
    """command line or leading scheduler → instance: have this role from now on. Answered by a FlipProgress,
    and as often as asked again. ``epoch``: with which the scheduler leads; LeaderSuperseded: another does.
    ``keeps_home``: it is to come back to its home role, which otherwise becomes ``role``, too."""

    role: Role
    epoch: int | None = None
    keeps_home: bool = False


class FlipProgress(msgspec.Struct, frozen=True, tag="flip-progress"):
    """instance → command line: the role is that which was asked for. ``switch_s``: how long the last change
    took, ``left``: sequences of the former role that are still here, ``moved``: that have left since."""

    switch_s: float
    left: int
    moved: int
