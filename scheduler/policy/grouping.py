"""Which instances each of several schedulers looks at first (Aladdin 5.2: distributed grouped scheduling).

A decision looks at every candidate, so where requests come faster than one scheduler can decide, each of n
looks at its n-th part of every role's instances. Everyone deals the same way, without asking. Aladdin's
Appendix A, which says how it groups, is not in the published text: dealing in turn is ours, for equal parts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.ids import Incarnation, InstanceId
from common.messages import Role


def others_instances(
    instances: Iterable[tuple[Role, InstanceId]], schedulers: Sequence[Incarnation], own: Incarnation
) -> frozenset[InstanceId]:
    """Those that belong to the others of ``schedulers``, of which ``own`` is one."""
    dealt = sorted(schedulers)
    place, count = dealt.index(own), len(dealt)
    return frozenset(
        instance_id for rank, (_, instance_id) in enumerate(sorted(instances)) if rank % count != place
    )


@dataclass(slots=True)
class Groups:
    """One scheduler's part, dealt anew only where it may have changed: decisions are far more."""

    own: Incarnation
    _others: frozenset[InstanceId] | None = None
    _schedulers: tuple[Incarnation, ...] = ()

    def forget(self) -> None:
        """An instance has come, gone or changed its role."""
        self._others = None

    def others(
        self, instances: Iterable[tuple[Role, InstanceId]], peers: Iterable[Incarnation]
    ) -> frozenset[InstanceId]:
        """As ``others_instances``. ``instances`` are looked at only after ``forget``, or with other peers."""
        schedulers = (*peers, self.own)
        if self._others is None or schedulers != self._schedulers:
            self._others, self._schedulers = others_instances(instances, schedulers, self.own), schedulers
        return self._others
