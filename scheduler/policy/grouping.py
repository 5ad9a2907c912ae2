"""Which instances each of several schedulers looks at first (Aladdin 5.2: distributed grouped scheduling).

A decision looks at every candidate, so where requests come faster than one scheduler can decide, each of n
looks at its n-th part of every role's instances. Everyone deals the same way, without asking. Aladdin's
Appendix A, which says how it groups, is not in the published text: dealing in turn is ours, for equal parts.
"""

from collections.abc import Iterable, Sequence

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
