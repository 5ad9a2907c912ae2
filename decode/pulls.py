"""Which of the sequences whose KV is under way asks for its next portion, and when.

Every portion has a bound (``PullBudget``; Lamina 2, section 5). While nothing is computed all ask, for what
comes within some tens of milliseconds: a step that begins meanwhile soon has the link to itself. While steps
run, every end of one lets as much be asked for as its share of a step allows, at once or when somebody comes
to need it, by the earliest admitted that is not waiting for an answer. What its portion leaves of that time,
because no more was there, the next one has: each asks once in a step, and short prompts do not take a step
each. One that the prefill instance has yet to compute keeps the others waiting until the step ends.

Where KV is pushed, nobody waits: each asks once, for all, and it comes as it is computed.
"""

from dataclasses import dataclass, field

from common.kv.blocks import BlockOwner
from scheduler.policy.pull_budget import PullBudget


@dataclass(frozen=True, slots=True)
class Portion:
    """To be asked for."""

    owner: BlockOwner
    number: int
    max_bytes: int | None


@dataclass(slots=True)
class _Pull:
    """``allowed_s``: that the newest portion may take. It was asked for in the step before which so many had
    ended (``step``); None: while nothing was computed, and nobody has what it leaves."""

    portions: int = 0
    is_asked: bool = False
    allowed_s: float = 0.0
    step: int | None = None


@dataclass(slots=True)
class Pulls:
    """``under_way``: in the order of admission. ``_left_s``: of the time that the newest end of a
    step left for them; None: all of it."""

    budget: PullBudget = field(default_factory=PullBudget)
    is_pushed: bool = False
    under_way: dict[BlockOwner, _Pull] = field(default_factory=dict)
    _steps_began_s: dict[int, float] = field(default_factory=dict)
    _counted: dict[int, int] = field(default_factory=dict)
    """By lane: of its step in flight and those that follow on it, how many have ended (``count_steps``)."""
    _steps: int = 0
    _left_s: float | None = 0.0

    @property
    def owners(self) -> list[BlockOwner]:
        return list(self.under_way)

    def rests(self, owner: BlockOwner) -> bool:
        """Whether nothing of its KV is in the air, or asked for."""
        return owner in self.under_way and not self.under_way[owner].is_asked

    def begin(self, owner: BlockOwner) -> None:
        self.under_way[owner] = _Pull()

    def portion_done(self, owner: BlockOwner, kv_bytes: int, transfer_s: float) -> None:
        """Raises ValueError where none was asked for."""
        pull = self.under_way[owner]
        if not pull.is_asked:
            raise ValueError(f"{owner}: a portion of KV came that nobody had asked for")
        self.budget.portion_done(kv_bytes, transfer_s)
        if pull.step == self._steps and self._left_s is not None:
            self._left_s += max(0.0, pull.allowed_s - transfer_s)
        pull.is_asked = False
        pull.portions += 1

    def end(self, owner: BlockOwner) -> None:
        """Complete or given up; also of one that is not pulled."""
        self.under_way.pop(owner, None)

    def step_began(self, lane: int, now: float) -> None:
        self._steps_began_s[lane] = now

    def step_ended(self, lane: int, now: float, steps: int = 1) -> None:
        """``steps``: that took the time since the first of them began, or the first that was not counted."""
        began_s = self._steps_began_s.pop(lane)
        if self._counted:
            steps -= self._counted.pop(lane, 0)
        if steps:
            self.budget.step_ended((now - began_s) / steps, steps)
        self._steps += 1
        self._left_s = None

    def count_steps(self, lane: int, now: float, steps: int) -> None:
        """So many more have ended that are told of later (``step_ended``): what they took counts now."""
        self.budget.step_ended((now - self._steps_began_s[lane]) / steps, steps)
        self._steps_began_s[lane] = now
        self._counted[lane] = self._counted.get(lane, 0) + steps

    @property
    def is_any_waiting(self) -> bool:
        """Whether somebody asks for a portion as soon as a step ends."""
        return False in [pull.is_asked for pull in self.under_way.values()]

    def ask(self, decoding: int) -> list[Portion]:
        """What to ask for now, beside a step that so many sequences wait for; 0: none is computed. Called
        after every event."""
        return self._ask_for_all() if self.is_pushed else self._ask_in_turn(decoding)

    def _ask_for_all(self) -> list[Portion]:
        portions = []
        for owner, pull in self.under_way.items():
            if not pull.is_asked:
                pull.is_asked = True
                portions.append(Portion(owner, pull.portions, None))
        return portions

    def _ask_in_turn(self, decoding: int) -> list[Portion]:
        step = self._steps if decoding else None
        asking = [
            owner
            for owner, pull in self.under_way.items()
            if not pull.is_asked and (step is None or step != pull.step)
        ]
        if not asking:
            return []
        allowed_s = 0.0
        if not decoding:
            max_bytes = self.budget.idle_portion_bytes(len(self.under_way))
        elif self._left_s is None or self.budget.has_room(self._left_s):
            allowed_s = self._allowed_s(decoding)
            max_bytes = self.budget.portion_bytes(allowed_s)
            del asking[1:]
        else:
            return []
        self._left_s = 0.0
        for owner in asking:
            pull = self.under_way[owner]
            pull.is_asked, pull.allowed_s, pull.step = True, allowed_s, step
        return [Portion(owner, self.under_way[owner].portions, max_bytes) for owner in asking]

    def _allowed_s(self, decoding: int) -> float:
        if self._left_s is None:
            return self.budget.allowed_s(max(1, len(self._steps_began_s)), len(self.under_way), decoding)
        return self._left_s
