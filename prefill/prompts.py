"""The prompts that wait to be computed: in the order of arrival, a window of them in its policy's order.

A class of service may have a head start: its requests count as having come so much earlier. So a more urgent
one goes first, and nobody waits for ever.

TetriInfer 3.3.1 (PrefillSchedBatch): only when the window is used up is the next one taken. Ordered by what
is left of them, all are looked at every time.
"""

from collections import deque
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from common.config import PrefillOrder
from common.kv.blocks import BlockOwner
from common.lifecycle import PrefillPhase
from prefill.sequence import PrefillSequence
from scheduler.policy.prefill_batching import order_by_rest, order_window


@dataclass(slots=True)
class PromptQueue:
    """A sequence stays until its prompt is computed, or it is removed. ``count``: of those that are here."""

    order: PrefillOrder
    window_size: int
    aging_tokens_per_s: float = 0.0
    count: int = 0
    _arrivals: deque[PrefillSequence] = field(default_factory=deque)
    _window: list[PrefillSequence] = field(default_factory=list)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[PrefillSequence]:
        yield from self._window
        yield from self._arrivals

    @property
    def remaining_tokens(self) -> int:
        """That are not computed yet."""
        tokens = 0
        for opened in (self._window, self._arrivals):
            for sequence in opened:
                tokens += sequence.tokens - sequence.computed_tokens
        return tokens

    def add(self, sequence: PrefillSequence) -> None:
        self._arrivals.append(sequence)
        self.count += 1

    def remove(self, sequence: PrefillSequence) -> None:
        """One that is not here is left alone."""
        if sequence in self._window:
            self._window.remove(sequence)
        elif sequence in self._arrivals:
            self._arrivals.remove(sequence)
        else:
            return
        self.count -= 1

    def begun(self) -> list[PrefillSequence]:
        """Those that have memory. With ``srpt`` they may be anywhere."""
        opened = self if self.order == "srpt" else self._window
        return [sequence for sequence in opened if sequence.phase is PrefillPhase.COMPUTING]

    def window(
        self, now: float, computed: Set[BlockOwner] = frozenset(), at_least: int = 1
    ) -> list[PrefillSequence]:
        """Whose turn it is, in order, but for those that are ``computed`` now; the next windows, too, where
        fewer than ``at_least`` are left to have theirs. With ``srpt``: all."""
        if self.order == "srpt":
            everybody = [each for each in self if each.owner not in computed]
            rest = [sequence.remaining_tokens for sequence in everybody]
            waited_s = [now - _came_s(sequence) for sequence in everybody]
            return [everybody[index] for index in order_by_rest(rest, waited_s, self.aging_tokens_per_s)]
        waiting = [each for each in self._window if each.owner not in computed]
        while self._arrivals and len(waiting) < at_least:
            arrivals = sorted(self._arrivals, key=_came_s)
            batch, self._arrivals = arrivals[: self.window_size], deque(arrivals[self.window_size :])
            order = order_window([sequence.remaining_tokens for sequence in batch], self.order)
            opened = [batch[index] for index in order]
            self._window += opened
            waiting += opened
        return waiting


def _came_s(sequence: PrefillSequence) -> float:
    return sequence.arrived_s - sequence.request.head_start_s
