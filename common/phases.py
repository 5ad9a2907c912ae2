"""Which phases nobody does: a mesh that lacks one answers every request with a 503, once it has
waited in vain."""

from collections.abc import Iterable

from common.messages import Phase, Role, has_phase

PHASES: tuple[Phase, ...] = ("prefill", "decode")


def missing_phases(roles: Iterable[Role]) -> list[Phase]:
    """Of a mesh whose instances have these roles."""
    there = set(roles)
    return [phase for phase in PHASES if not any(has_phase(role, phase) for role in there)]


def lost_phases(before: Iterable[Role], after: Iterable[Role]) -> list[Phase]:
    """Those that somebody did, and nobody will do."""
    missing = missing_phases(before)
    return [phase for phase in missing_phases(after) if phase not in missing]
