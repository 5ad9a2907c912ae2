"""Whether an operator may give an instance another role: asked by the command line and by the gateway."""

from collections.abc import Sequence

from common.messages import InstanceRecord, MemberRecord, Role
from common.phases import lost_phases


def why_not_flip(
    members: Sequence[MemberRecord], name: str, role: Role, *, force: bool, forcing: str
) -> str | None:
    """A sentence for people; None where nothing speaks against it. ``force``: also the last of a phase, and
    ``forcing`` is how who asks says that."""
    instances = [each for each in members if isinstance(each, InstanceRecord)]
    found = [each for each in instances if each.instance_id == name]
    if not found:
        known = ", ".join(sorted(each.instance_id for each in instances)) or "none"
        return f"there is no instance {name}; registered: {known}"
    former = found[0].role
    if former == role and found[0].home in (None, role):
        return f"{name} is a {role} instance already"
    others = [each.role for each in instances if each.instance_id != name]
    for phase in lost_phases([former, *others], [role, *others]):
        if not force:
            reason = "without one no request is served"
            return f"{name} is the last {phase} instance: {reason}; {forcing} flips it"
    return None
