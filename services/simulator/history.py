"""What changed in a simulated mesh beside its requests: what befell whom, who came and went, and who got
another role. By itself, as its Struct is written and the modules that note it are compiled."""

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from services.simulator.clock import Clock

Kind = Literal[
    "death",
    "return",
    "straggler",
    "straggler_over",
    "slow_link",
    "slow_link_over",
    "silence",
    "silence_over",
    "start",
    "ready",
    "leave",
    "end",
    "role",
]
"""Faults, as a configuration names them, and their ends; ``start`` and ``leave``: an instance is begun to be
started, or asked to drain, and ``ready`` or at its ``end`` later; ``role``: it has another one."""


FOR_GOOD = "for good"
"""Of a death, after which nobody of that name comes."""


class MeshChange(msgspec.Struct, frozen=True):
    """To ``instance``, which may be an attention worker, at ``at_s`` of virtual time."""

    at_s: float
    kind: Kind
    instance: str
    detail: str = ""


@dataclass(slots=True)
class History:
    """``befell``: how often each fault did, by its number; 0: whoever it names was never there then."""

    clock: Clock
    changes: list[MeshChange] = field(default_factory=list)
    befell: dict[int, int] = field(default_factory=dict)

    def note(self, kind: Kind, instance: str, detail: str = "") -> None:
        self.changes.append(MeshChange(self.clock.now, kind, instance, detail))
