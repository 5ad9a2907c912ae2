"""Which instance changes its role, and why. Pure: it remembers only when it first saw something.

``overflow`` is Splitwise's mixed pool (IV-A). Where all that compute prompts have long queues, mixed ones
too, the least loaded decode instance becomes mixed; it keeps its home, and goes back once the queues are
short and its prompts done. Likewise a prefill instance where decode's memory is full. Who stays mixed for
long changes its home. Where the last of a role is gone, one of the other kind becomes mixed, too.
``idle_flip`` is TetriInfer's (3.5): who hardly works while the others do, flips.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.config import RolesConfig
from common.ids import InstanceId
from common.messages import Phase, Role, has_phase

OPPOSITE: dict[Phase, Phase] = {"prefill": "decode", "decode": "prefill"}


@dataclass(frozen=True, slots=True)
class Worker:
    """An instance that is ready. ``queue_s``: seconds of prompts that wait, None before it has learned how
    long they take; ``prompts`` waiting or being handed over. ``kv_share``: of its capacity that decode holds
    or is to hold; ``decodes`` running, ``waiting`` for room, or ``coming`` once prompts are computed."""

    instance_id: InstanceId
    role: Role
    home: Role
    queue_tokens: int
    queue_s: float | None
    prompts: int
    kv_share: float
    decodes: int
    waiting: int
    coming: int = 0

    @property
    def is_busy(self) -> bool:
        """With what its role is for. What is still being computed elsewhere keeps nobody busy."""
        decodes = self.decodes - self.coming
        work = {"prefill": self.prompts, "decode": decodes, "mixed": self.prompts + decodes}
        return work[self.role] > 0

    def work(self, phase: Phase) -> int:
        return self.prompts if phase == "prefill" else self.decodes


@dataclass(frozen=True, slots=True)
class RoleChange:
    """``keeps_home``: it is to come back."""

    instance_id: InstanceId
    role: Role
    keeps_home: bool
    reason: str


@dataclass(slots=True)
class Overflow:
    """``mixed_s``: since when each is mixed away from home; ``relieved_s``: since when nobody needs it so;
    ``lacking_s``: since when nobody does a phase that somebody did; ``known``: those that somebody did."""

    settings: RolesConfig
    mixed_s: dict[InstanceId, float] = field(default_factory=dict)
    relieved_s: dict[InstanceId, float] = field(default_factory=dict)
    lacking_s: dict[Phase, float] = field(default_factory=dict)
    known: set[Phase] = field(default_factory=set)
    _changed_s: float = float("-inf")

    def decide(self, workers: Sequence[Worker], now: float) -> RoleChange | None:
        """At most one at a time: its effect is seen before the next."""
        guests = [each for each in workers if each.role == "mixed" and each.home != "mixed"]
        self._note(workers, guests, now)
        if now - self._changed_s < self.settings.cool_down_s:
            return None
        change = self._replace(workers, now) or self._return(workers, guests, now) or self._help(workers)
        if change is not None:
            self._changed_s = now
        return change

    def pressure(self, worker: Worker, phase: Phase) -> float:
        """Over 1: it has more than it should."""
        settings = self.settings
        if phase == "decode":
            return max(worker.kv_share / settings.overflow_kv_share, 1.01 if worker.waiting else 0.0)
        if worker.queue_s is None:
            return worker.queue_tokens / settings.overflow_queue_tokens
        return worker.queue_s / settings.overflow_queue_s

    def _least(self, workers: Sequence[Worker], phase: Phase) -> float:
        """Of those that have the phase: where the next request would go."""
        serving = [self.pressure(each, phase) for each in workers if has_phase(each.role, phase)]
        return min(serving, default=float("inf"))

    def _note(self, workers: Sequence[Worker], guests: Sequence[Worker], now: float) -> None:
        ids = {each.instance_id for each in guests}
        self.mixed_s = {each: self.mixed_s.get(each, now) for each in ids}
        relieved = set()
        for guest in guests:
            others = [each for each in workers if each.instance_id != guest.instance_id]
            if self._least(others, _foreign(guest)) < self.settings.return_share:
                relieved.add(guest.instance_id)
        self.relieved_s = {each: self.relieved_s.get(each, now) for each in relieved}
        present = {phase for phase in OPPOSITE if any(has_phase(each.role, phase) for each in workers)}
        self.known |= present
        lacking = [phase for phase in OPPOSITE if phase in self.known - present]
        self.lacking_s = {each: self.lacking_s.get(each, now) for each in lacking}

    def _replace(self, workers: Sequence[Worker], now: float) -> RoleChange | None:
        """Also the last one of the other kind, which it remains. Who has yet to begin is waited for."""
        most_s = self.settings.replace_after_s
        for phase, since_s in self.lacking_s.items():
            other = OPPOSITE[phase]
            helpers = [each for each in workers if each.role == other]
            if helpers and now - since_s >= most_s:
                best = min(helpers, key=lambda each: (self.pressure(each, other), each.instance_id))
                least = f"roles.replace_after_s = {most_s:g}"
                reason = f"nobody has been there to {phase} for {now - since_s:.1f} s, {least}"
                return RoleChange(best.instance_id, "mixed", keeps_home=True, reason=reason)
        return None

    def _help(self, workers: Sequence[Worker]) -> RoleChange | None:
        for phase, other in OPPOSITE.items():
            pressure = self._least(workers, phase)
            helpers = [each for each in workers if each.role == other]
            free = [each for each in helpers if self.pressure(each, other) < 1]
            has_any = any(has_phase(each.role, phase) for each in workers)
            if pressure <= 1 or not has_any or not free or len(helpers) <= self._minimum(other):
                continue
            best = min(free, key=lambda each: (self.pressure(each, other), each.instance_id))
            reason = f"even the least loaded of those that {phase} {self._excess(workers, phase)}"
            return RoleChange(best.instance_id, "mixed", keeps_home=True, reason=reason)
        return None

    def _excess(self, workers: Sequence[Worker], phase: Phase) -> str:
        """What the least loaded of them has more of than it should."""
        settings = self.settings
        serving = [each for each in workers if has_phase(each.role, phase)]
        least = min(serving, key=lambda each: self.pressure(each, phase))
        if phase == "decode":
            if least.kv_share > settings.overflow_kv_share:
                most = f"roles.overflow_kv_share = {settings.overflow_kv_share:g}"
                return f"has {least.kv_share:.0%} of its KV memory taken, {most}"
            return "has sequences that wait for room"
        if least.queue_s is None:
            most = f"roles.overflow_queue_tokens = {settings.overflow_queue_tokens}"
            return f"has {least.queue_tokens} tokens of prompts waiting, {most}"
        most = f"roles.overflow_queue_s = {settings.overflow_queue_s:g}"
        return f"has {least.queue_s:.1f} s of prompts waiting, {most}"

    def _return(self, workers: Sequence[Worker], guests: Sequence[Worker], now: float) -> RoleChange | None:
        settings = self.settings
        for guest in sorted(guests, key=lambda each: each.instance_id):
            foreign = _foreign(guest)
            relieved_s = self.relieved_s.get(guest.instance_id)
            if relieved_s is not None:
                work, waited_s = guest.work(foreign), now - relieved_s
                if work == 0 or waited_s >= settings.settle_s:
                    share = f"roles.return_share = {settings.return_share:g}"
                    reason = f"{foreign} is under {share} of its bound; {work} requests of it are left here"
                    return RoleChange(guest.instance_id, guest.home, keeps_home=True, reason=reason)
            stayed_s = now - self.mixed_s[guest.instance_id]
            alike = sum(each.home == guest.home for each in workers)
            if stayed_s >= settings.repurpose_s and alike > self._minimum(OPPOSITE[foreign]):
                longest = f"roles.repurpose_s = {settings.repurpose_s:g}"
                reason = f"{foreign} has needed its help for {stayed_s:.0f} s, {longest}"
                return RoleChange(guest.instance_id, foreign, keeps_home=False, reason=reason)
        return None

    def _minimum(self, phase: Phase) -> int:
        return self.settings.min_prefill if phase == "prefill" else self.settings.min_decode


@dataclass(slots=True)
class IdleFlip:
    """``busy``: of each instance, whether it had work at the newest looks, for ``idle_s``."""

    settings: RolesConfig
    busy: dict[InstanceId, deque[bool]] = field(default_factory=dict)

    def decide(self, workers: Sequence[Worker], now: float) -> RoleChange | None:
        """After a change everybody is watched anew. ``now`` says nothing: looks are equally far apart."""
        looks = max(1, round(self.settings.idle_s / self.settings.look_s))
        self.busy = {
            each.instance_id: self.busy.get(each.instance_id, deque(maxlen=looks)) for each in workers
        }
        for each in workers:
            self.busy[each.instance_id].append(each.is_busy)
        if any(len(each) < looks for each in self.busy.values()):
            return None
        for phase, other in OPPOSITE.items():
            idle = [each for each in workers if each.role == phase]
            loaded = [each for each in workers if each.role == other]
            minimum = self.settings.min_prefill if phase == "prefill" else self.settings.min_decode
            if not loaded or len(idle) <= minimum:
                continue
            laziest = min(idle, key=lambda each: (self._share(each), each.instance_id))
            share, least_loaded = self._share(laziest), min(map(self._share, loaded))
            settings = self.settings
            if share < settings.idle_share and least_loaded >= settings.loaded_share:
                reason = (
                    f"busy for {share:.0%} of {settings.idle_s:g} s,"
                    f" roles.idle_share = {settings.idle_share:g}; all that {other} for"
                    f" {least_loaded:.0%}, roles.loaded_share = {settings.loaded_share:g}"
                )
                self.busy.clear()
                return RoleChange(laziest.instance_id, other, keeps_home=False, reason=reason)
        return None

    def _share(self, worker: Worker) -> float:
        looks = self.busy[worker.instance_id]
        return sum(looks) / len(looks)


RolePolicy = Overflow | IdleFlip


def role_policy(settings: RolesConfig) -> RolePolicy | None:
    """None: roles are fixed."""
    match settings.policy:
        case "overflow":
            return Overflow(settings)
        case "idle_flip":
            return IdleFlip(settings)
        case "fixed":
            return None


def _foreign(guest: Worker) -> Phase:
    """What it does besides that of its home."""
    return "prefill" if guest.home == "decode" else "decode"
