"""Which of the sequences whose KV is under way asks for its next portion, and when.

Every portion has a bound (``PullBudget``; Lamina 2, section 5). While nothing is computed all ask, for what
comes within some tens of milliseconds: a step that begins meanwhile soon has the link to itself. While steps
run, every end of one lets one ask, at once or when somebody comes to need it: the earliest admitted that is
not waiting for an answer. So a portion a step is pulled, and one that the prefill instance has yet to compute
keeps nobody else waiting.
"""

from dataclasses import dataclass, field

from common.kv.blocks import BlockOwner
from scheduler.policy.pull_budget import PullBudget


@dataclass(frozen=True, slots=True)
class Portion:
    """To be asked for."""

    owner: BlockOwner
    number: int
    max_bytes: int


@dataclass(slots=True)
class _Pull:
    portions: int = 0
    is_asked: bool = False


@dataclass(slots=True)
class Pulls:
    """In the order of admission."""

    budget: PullBudget = field(default_factory=PullBudget)
    _pulls: dict[BlockOwner, _Pull] = field(default_factory=dict)
    _steps_began_s: dict[int, float] = field(default_factory=dict)
    _may_ask: bool = False

    @property
    def owners(self) -> list[BlockOwner]:
        return list(self._pulls)

    def rests(self, owner: BlockOwner) -> bool:
        """Whether nothing of its KV is in the air, or asked for."""
        return owner in self._pulls and not self._pulls[owner].is_asked

    def begin(self, owner: BlockOwner) -> None:
        self._pulls[owner] = _Pull()

    def portion_done(self, owner: BlockOwner, kv_bytes: int, transfer_s: float) -> None:
        """Raises ValueError where none was asked for."""
        pull = self._pulls[owner]
        if not pull.is_asked:
            raise ValueError(f"{owner}: a portion of KV came that nobody had asked for")
        self.budget.portion_done(kv_bytes, transfer_s)
        pull.is_asked = False
        pull.portions += 1

    def end(self, owner: BlockOwner) -> None:
        """Complete or given up; also of one that is not pulled."""
        self._pulls.pop(owner, None)

    def step_began(self, lane: int, now: float) -> None:
        self._steps_began_s[lane] = now

    def step_ended(self, lane: int, now: float, steps: int = 1) -> None:
        """``steps``: that took the time since the first of them began."""
        self.budget.step_ended((now - self._steps_began_s.pop(lane)) / steps, steps)
        self._may_ask = True

    @property
    def is_any_waiting(self) -> bool:
        """Whether somebody asks for a portion as soon as a step ends."""
        return any(not pull.is_asked for pull in self._pulls.values())

    def ask(self, is_computing: bool) -> list[Portion]:
        """What to ask for now. Called after every event."""
        asking = [owner for owner, pull in self._pulls.items() if not pull.is_asked]
        if is_computing:
            asking = asking[: int(self._may_ask)]
        if not asking:
            return []
        self._may_ask = False
        if is_computing:
            max_bytes = self.budget.portion_bytes(len(self._steps_began_s))
        else:
            max_bytes = self.budget.idle_portion_bytes(len(self._pulls))
        for owner in asking:
            self._pulls[owner].is_asked = True
        return [Portion(owner, self._pulls[owner].portions, max_bytes) for owner in asking]
