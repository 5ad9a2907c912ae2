"""How many workers of each kind a mesh should have: the scheduler's word to whoever starts and ends them."""

from typing import Literal

import msgspec

ScaledService = Literal["gateway", "prefill", "decode", "mixed", "attention"]
"""What follows the load."""
ScaledRole = Literal["gateway", "scheduler", "prefill", "decode", "mixed", "attention", "predictor"]
"""What an operator may have more or fewer of."""


class ServiceCount(msgspec.Struct, frozen=True):
    """``current``: how many were ready. ``reason``: a sentence for people."""

    service: ScaledService
    current: int
    desired: int
    reason: str


class DesiredCounts(msgspec.Struct, frozen=True, tag="desired-counts"):
    """scheduler → launcher, and into the store, at every window's end. Services that are not named are left
    alone.

    ``epoch`` is the leader's: who has seen a higher one refuses it. ``decided_unix_s`` tells plans of one
    epoch apart, and people how old it is. ``changed``: what of the workload has changed, so that it was
    planned anew at once.
    """

    counts: tuple[ServiceCount, ...]
    epoch: int
    decided_unix_s: float
    rate_per_s: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    changed: tuple[str, ...] = ()
