"""What the two rooms of an instance let each other know: they share its engine's passes and its pool.

Like the pool's allocator it is one value that both states hold. Each writes what is its own after every
event, and their engine whether it is taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.config import DecodeAdmission, MixedPolicy
from common.kv.blocks import BlockOwner
from common.messages import Phase

UNBOUNDED = 1 << 30


def nobody() -> Sequence[tuple[int, int]]:
    return ()


@dataclass(slots=True)
class RoomMates:
    """``decoding``: sequences in the batch, or in one of those that take turns, each of which takes a token
    of a pass. ``policy``: who goes first (``scheduler.policy.mixed_batching``). ``admission``: by which a
    sequence is let in that is to be decoded, on a mixed instance (``is_mixed``) with its prompt already.

    ``wanted_blocks``: of the prompt whose turn it is (``wanting``), where there is not room for it; on a
    mixed instance decodes give way to it. ``entry_blocks``: that have to be free for it by the
    ``admission``, where nobody gives way. ``away``: the first sequence that waits for memory to be decoded,
    with ``away_blocks`` that let it in, and ``away_since_s``: since when it is the first. From
    ``max_wait_s`` on prompts leave it those; before, it leaves the prompt what that wants. So it is with
    slots, too, where prompts need one of ``max_batch`` (``orca``): ``taken_slots`` are, by those
    that are decoded or about to be, and ``wants_slot`` the prompt.
    ``stuck_since_s``: since when all that are to be decoded here wait for memory; None: somebody gets on.

    ``is_computing`` and ``waiting_prompts``: what prompts are about. Where batches are ``static`` they are
    taken by turns from them and from those that come from elsewhere: ``is_decodes_turn``. ``decoded``:
    (tokens, tokens to come) of those that hold memory in the decode room; ``begun``: of prompts that will.

    ``is_engine_taken``: one engine computes for both and is at it, of the rooms ``under_way``. What could
    have waited there for its turn is not chosen yet, as more may come meanwhile: it is due (``is_chunk_due``,
    and ``step_due_s``: since when the step is), and the engine asks for it when its turn has come.
    """

    policy: MixedPolicy = "chunked"
    max_wait_s: float = 1.0
    is_mixed: bool = False
    admission: DecodeAdmission = "greedy"
    max_batch: int = UNBOUNDED
    decoding: int = 0
    taken_slots: int = 0
    wanted_blocks: int = 0
    entry_blocks: int = 0
    wants_slot: bool = False
    wanting: BlockOwner | None = None
    is_computing: bool = False
    waiting_prompts: int = 0
    is_decodes_turn: bool = False
    decoded: Callable[[], Sequence[tuple[int, int]]] = field(default=nobody, compare=False, repr=False)
    begun: Callable[[], Sequence[tuple[int, int]]] = field(default=nobody, compare=False, repr=False)
    away_blocks: int = 0
    away_since_s: float = 0.0
    stuck_since_s: float | None = None
    away: BlockOwner | None = None
    is_engine_taken: bool = False
    under_way: tuple[Phase, ...] = ()
    is_chunk_due: bool = False
    step_due_s: float | None = None

    def may_choose_chunk(self, staying: int) -> bool:
        """Before the engine asks. ``staying``: sequences that the decode room is about to have."""
        return not (self.is_engine_taken and self.decoding + staying)

    def may_choose_step(self) -> bool:
        """Before the engine asks."""
        if not self.is_engine_taken:
            return True
        return "decode" in self.under_way and not (self.is_computing or self.waiting_prompts)

    def take_engine(self, *under_way: Phase) -> None:
        """None of them: what comes first is yet to be chosen."""
        self.is_engine_taken, self.under_way = True, under_way

    def leave_engine(self) -> None:
        self.is_engine_taken, self.under_way = False, ()

    @property
    def is_any_due(self) -> bool:
        return self.is_chunk_due or self.step_due_s is not None

    def note_away(self, owner: BlockOwner | None, blocks: int, now: float) -> None:
        """None: nobody waits for memory to be decoded."""
        if owner != self.away:
            self.away, self.away_since_s = owner, now
        self.away_blocks = blocks

    def note_stuck(self, *, is_stuck: bool, now: float) -> None:
        if not is_stuck:
            self.stuck_since_s = None
        elif self.stuck_since_s is None:
            self.stuck_since_s = now

    @property
    def is_away(self) -> bool:
        """Whether somebody waits for memory, or a slot, to be decoded."""
        return self.away is not None

    @property
    def is_static(self) -> bool:
        """Whether nobody joins a batch that is decoded."""
        return self.is_mixed and self.policy == "static"

    @property
    def needs_slots(self) -> bool:
        """Whether prompts need one of the batch's slots."""
        return self.is_mixed and self.policy in ("orca", "static")

    def want_nothing(self) -> None:
        """No prompt lacks anything, as far as is known."""
        self.wanted_blocks = self.entry_blocks = 0
        self.wants_slot = False
        self.wanting = None

    def owed_blocks(self, now: float) -> int:
        """That no prompt may take."""
        return self.away_blocks if self.away_blocks and self._is_owed(now) else 0

    def reserved_blocks(self, now: float) -> int:
        """That no sequence may take which is to be decoded beside others: whoever gave way to a prompt would
        be back before it."""
        return 0 if self.owed_blocks(now) else max(self.wanted_blocks, self.entry_blocks)

    def owed_slots(self, now: float) -> int:
        """That no prompt may take."""
        return 1 if self.is_away and self._is_owed(now) else 0

    def reserved_slots(self, now: float) -> int:
        """That nobody may take who comes from elsewhere."""
        return 0 if self.owed_slots(now) else int(self.wants_slot)

    def _is_owed(self, now: float) -> bool:
        """Static batches are taken by turns instead."""
        return not self.is_static and now - self.away_since_s >= self.max_wait_s
