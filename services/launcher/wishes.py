"""How many processes of each role an operator asks for, and what came of it."""

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from common.config import Config
from common.errors import ConfigError, LauncherError
from common.messages import Role
from common.phases import lost_phases
from common.scaling import ScaledRole
from services.launcher.launch_plan import MAX_INSTANCES, SCALED_ROLES, LaunchPlan, check_counts

WISH = re.compile(rf"({'|'.join(SCALED_ROLES)})=([+-]?)([0-9]{{1,9}})")


class LastOfPhase(LauncherError):
    """Who asks may be able to have it nevertheless, and says how in words of its own."""


class CountWish(msgspec.Struct, frozen=True):
    """So many of a role; with ``is_change`` so many more than there are, or fewer where it is below zero."""

    number: int
    is_change: bool = False

    def count(self, present: int) -> int:
        """Below zero where there are not so many to give up."""
        return present + self.number if self.is_change else self.number


class RoleChange(msgspec.Struct, frozen=True):
    """``before``, ``after``: how many there were, and are. ``started`` are ready, ``ended`` have drained."""

    role: ScaledRole
    before: int
    after: int
    started: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()


class RoleCount(msgspec.Struct, frozen=True):
    """``wanted``: how many there are to be; ``ready``: that take work."""

    role: ScaledRole
    ready: int
    wanted: int


Wishes = Mapping[ScaledRole, CountWish]


def parse_wishes(items: Sequence[str]) -> dict[ScaledRole, CountWish]:
    """Of ``role=N``, ``role=+N`` and ``role=-N``. Raises ConfigError."""
    wishes: dict[ScaledRole, CountWish] = {}
    for item in items:
        matched = WISH.fullmatch(item)
        if matched is None:
            rule = f"must be ROLE=N, =+N or =-N, of at most nine digits, of {', '.join(SCALED_ROLES)}"
            raise ConfigError("scale", item, rule)
        role = next(each for each in SCALED_ROLES if each == matched[1])
        if role in wishes:
            raise ConfigError("scale", item, f"{role} is said twice")
        wishes[role] = CountWish(int(matched[2] + matched[3]), is_change=bool(matched[2]))
    return wishes


def check_wishes(wishes: Wishes) -> None:
    """Raises ConfigError for one that cannot be, however many there are."""
    check_counts({role: wish.number for role, wish in wishes.items() if not wish.is_change})


def wanted_counts(
    wishes: Wishes, present: Mapping[ScaledRole, int], most: int = MAX_INSTANCES
) -> dict[ScaledRole, int]:
    """How many there are to be where so many are there. Raises ConfigError, in the words that were asked."""
    counts = {role: wish.count(present[role]) for role, wish in wishes.items()}
    for role, wish in wishes.items():
        if wish.is_change and not 0 <= counts[role] <= most:
            rule = f"there are {present[role]}, and must be 0..{most} instances"
            raise ConfigError(role, f"{wish.number:+d}", rule)
    check_counts(counts, most)
    return counts


def say_change(change: RoleChange) -> str:
    """One line for people."""
    if not change.started and not change.ended:
        return f"{change.role}: {change.after}, as before"
    said = []
    if change.started:
        said.append(f"{', '.join(change.started)} ready")
    if change.ended:
        said.append(f"{', '.join(change.ended)} drained")
    return f"{change.role}: {change.before} → {change.after} ({'; '.join(said)})"


def count_roles(present: Iterable[tuple[str, bool]]) -> list[RoleCount]:
    """(role, whether it takes work) of each that is there. Of a role that nobody has nothing is said."""
    found = list(present)
    counts = []
    for role in SCALED_ROLES:
        ready = [is_ready for each, is_ready in found if each == role]
        if ready:
            counts.append(RoleCount(role, sum(ready), len(ready)))
    return counts


def say_count(count: RoleCount) -> str:
    """One line for people."""
    if count.ready == count.wanted:
        return f"{count.role}: {count.wanted}"
    return f"{count.role}: {count.wanted}, {count.ready} of them ready"


def check_possible(counts: Mapping[ScaledRole, int], plan: LaunchPlan, config: Config) -> None:
    """Raises LauncherError for counts that a mesh that was started so cannot have."""
    if counts.get("predictor", 0) and config.predictor.kind == "none":
        raise LauncherError("this mesh was started without a length predictor: `lamella up --predictor KIND`")
    shares = config.attention.decode_instances
    if plan.attention and counts.get("decode", 0) > shares:
        raise LauncherError(
            f"decode = {counts['decode']}: the attention workers' memory is shared out among {shares}"
            " decode instances; start the mesh with more of them"
        )
    if "attention" not in counts:
        return
    if counts["attention"] == plan.attention:
        return
    if not plan.attention:
        raise LauncherError("this mesh was started without attention workers: `lamella up --attention N`")
    if config.instance.attention_partition == "heads":
        raise LauncherError(
            f"attention = {counts['attention']}: each attention worker holds some KV heads of every sequence,"
            f" so their number is fixed at {plan.attention}; `lamella up --partition requests` allows any"
            " number"
        )
    if counts["attention"] < 1:
        raise LauncherError("attention = 0: decode needs at least one attention worker")


def check_phases(before: Iterable[Role], after: Iterable[Role]) -> None:
    """Raises LastOfPhase where nobody of the instances that are left would prefill, or decode."""
    for phase in lost_phases(before, after):
        raise LastOfPhase(f"no instance would be left that does {phase}: without one no request is served")
