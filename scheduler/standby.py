"""Who could serve a phase now, found once for each change of that: a placement looks at every instance, and
few of all reports change who is ready, or for how long a sequence.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from common.ids import InstanceId
from common.messages import ROLES_WITH, Phase
from scheduler.views import InstanceView, KVFormat, Standing


class Serving(NamedTuple):
    """``members`` have the phase's role, ``are_all_mixed`` among them; of the ``ready`` ones are the rest:
    ``least_tokens`` of a sequence each of them can hold."""

    members: list[InstanceView]
    ready: list[InstanceView]
    kv_formats: frozenset[KVFormat]
    least_tokens: int
    is_any_mixed: bool
    are_all_mixed: bool


def serving_of(views: Iterable[InstanceView], phase: Phase) -> Serving:
    roles = ROLES_WITH[phase]
    members = [view for view in views if view.role in roles]
    ready = [view for view in members if view.is_ready]
    return Serving(
        members,
        ready,
        frozenset([view.kv_format for view in ready]),
        min([view.longest_tokens for view in ready], default=0),
        any(view.role == "mixed" for view in ready),
        all(view.role == "mixed" for view in members),
    )


@dataclass(slots=True)
class Standby:
    """``instances`` are the state's own, and ``standing`` counts the changes of all of them."""

    instances: Mapping[InstanceId, InstanceView]
    standing: Standing
    _found: dict[Phase, tuple[int, Serving]] = field(default_factory=dict)

    def serving(self, phase: Phase) -> Serving:
        found = self._found.get(phase)
        if found is None or found[0] != self.standing.changes:
            found = self.standing.changes, serving_of(self.instances.values(), phase)
            self._found[phase] = found
        return found[1]

    def check(self) -> None:
        """What is remembered is how it is; called by tests after every event."""
        for phase, (changes, serving) in self._found.items():
            is_new = changes != self.standing.changes
            assert is_new or serving == serving_of(self.instances.values(), phase), (
                "an old view of who serves"
            )
