"""Which links between instances carry no KV, as these say: part of the scheduler's decisions.

Who is at fault, the sender or the receiver, nobody knows: both answer. Of a link that failed it is whoever
is part of more such links and has not been part of one that works since; of equals, both. Where both work
with others, it is what lies between them. Until a while is over, twice as long each time, requests go
elsewhere, as long as there is anybody else. Then one request at a time tries it, and its outcome says more.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.ids import InstanceId

FIRST_BACKOFF_S = 5.0
LONGEST_BACKOFF_S = 60.0
FORGET_AFTER_S = 5 * LONGEST_BACKOFF_S
"""A link that nobody said to have failed for so long: word that it works may have been lost."""

KVLink = tuple[InstanceId, InstanceId]
"""(sender, receiver)."""


@dataclass(slots=True)
class BrokenLink:
    """Since ``failed_s`` nothing is known to have got through. Nobody is to use it until ``until_s``.
    ``is_tried``: somebody was placed over it since it failed. ``working``: its ends that work with others."""

    failed_s: float
    until_s: float
    backoff_s: float = FIRST_BACKOFF_S
    is_tried: bool = False
    working: set[InstanceId] = field(default_factory=set)

    def fail_again(self, now: float) -> None:
        """What failed together with the first one says nothing new."""
        if self.is_tried:
            self.backoff_s = min(2 * self.backoff_s, LONGEST_BACKOFF_S)
        if self.is_tried or now >= self.until_s:
            self.until_s = now + self.backoff_s
        self.failed_s, self.is_tried = now, False
        self.working.clear()


@dataclass(frozen=True, slots=True)
class Distrust:
    """At one time. ``ends``: who is at fault, and a link that says so; ``links``: that are not to be used."""

    ends: dict[InstanceId, KVLink]
    links: frozenset[KVLink]

    def senders(
        self, able: list[InstanceId], receivers: Iterable[InstanceId], *, is_anybody_else: bool
    ) -> list[InstanceId]:
        """Of ``able``, those that are the best to trust to send to any of ``receivers``; none of them where
        nobody is to be trusted and ``is_anybody_else``."""
        known = list(receivers)
        reaching = [
            each for each in able if any((each, other) not in self.links for other in known if other != each)
        ]
        sound = [each for each in reaching if each not in self.ends]
        return sound if sound or is_anybody_else else reaching or able

    def receivers(self, sender: InstanceId, able: list[InstanceId]) -> list[InstanceId]:
        """Of ``able``, those that are the best to trust to get KV from it. It needs no link to itself."""
        reached = [each for each in able if (sender, each) not in self.links]
        sound = [
            each for each in reached if each == sender or (sender not in self.ends and each not in self.ends)
        ]
        return sound or [each for each in reached if each not in self.ends] or reached or able

    def reason(self, instance_id: InstanceId, sender: InstanceId | None) -> str:
        """Why it was not taken, by that sender if that is known, for people."""
        link = self.ends.get(instance_id)
        if link is None and sender is not None and (sender, instance_id) in self.links:
            link = sender, instance_id
        if link is None and sender is not None:
            link = self.ends.get(sender)
        if link is None:
            return "KV does not get from it to any decode instance"
        return f"KV did not get from {link[0]} to {link[1]}, and has not since"


@dataclass(slots=True)
class KVLinks:
    """Of lives that are there."""

    broken: dict[KVLink, BrokenLink] = field(default_factory=dict)

    def check(self) -> None:
        """Invariants, called by tests after every event."""
        for (sender, receiver), link in self.broken.items():
            assert sender != receiver, "a link to itself"
            assert link.working <= {sender, receiver}
            assert FIRST_BACKOFF_S <= link.backoff_s <= LONGEST_BACKOFF_S

    def fail(self, sender: InstanceId, receiver: InstanceId, now: float) -> None:
        known = self.broken.get((sender, receiver))
        if known is None:
            self.broken[sender, receiver] = BrokenLink(now, now + FIRST_BACKOFF_S)
        else:
            known.fail_again(now)

    def work(self, sender: InstanceId, receiver: InstanceId, now: float) -> None:
        """Neither is the cause of anything. Where it alone was taken for it, that may be tried again."""
        self.broken.pop((sender, receiver), None)
        at_fault, ends = self._at_fault(), {sender, receiver}
        for link, state in self.broken.items():
            state.working.update(ends.intersection(link))
            if at_fault[link] and at_fault[link] <= ends:
                state.until_s = min(state.until_s, now)

    def forget(self, instance_id: InstanceId) -> None:
        """It is gone: of its next life nothing is known."""
        for link in [each for each in self.broken if instance_id in each]:
            del self.broken[link]

    def forget_all(self) -> None:
        """Who did not hear everything knows nothing for certain."""
        self.broken.clear()

    def forget_old(self, now: float) -> None:
        for link in [each for each, state in self.broken.items() if now - state.failed_s > FORGET_AFTER_S]:
            del self.broken[link]

    def distrust(self, now: float) -> Distrust | None:
        """None: every link may be used."""
        if not self.broken:
            return None
        links = frozenset(link for link, state in self.broken.items() if now < state.until_s)
        if not links:
            return None
        at_fault = self._at_fault()
        return Distrust({end: link for link in sorted(links) for end in at_fault[link]}, links)

    def at_fault(self, now: float) -> frozenset[InstanceId]:
        distrusted = self.distrust(now)
        return frozenset() if distrusted is None else frozenset(distrusted.ends)

    def note_placed(self, sender: InstanceId, receiver: InstanceId, now: float) -> None:
        """Who was placed there tries every link of which this may tell more: others wait for its outcome."""
        if not self.broken or sender == receiver:
            return
        at_fault = self._at_fault()
        for link, state in self.broken.items():
            is_concerned = link == (sender, receiver) or not at_fault[link].isdisjoint((sender, receiver))
            if is_concerned and now >= state.until_s:
                state.until_s, state.is_tried = now + state.backoff_s, True

    def _at_fault(self) -> dict[KVLink, frozenset[InstanceId]]:
        """Of each broken link, who is."""
        degrees = Counter(
            end for link, state in self.broken.items() for end in link if end not in state.working
        )
        found: dict[KVLink, frozenset[InstanceId]] = {}
        for link, state in self.broken.items():
            suspects = [end for end in link if end not in state.working]
            most = max((degrees[end] for end in suspects), default=0)
            found[link] = frozenset(end for end in suspects if degrees[end] == most)
        return found
