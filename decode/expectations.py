"""What a room's sequences are expected to draw, in sums that every load report tells: kept from step to step,
and made anew of those sequences alone of which something else may be expected by now."""

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from common.kv.blocks import BlockOwner

if TYPE_CHECKING:
    from decode.sequence import DecodeSequence


class Expectation(NamedTuple):
    """Of a sequence, as long as it has drawn fewer than ``until_tokens``: it will have drawn ``end_tokens``,
    which is so many more than was predicted; ``error_tokens`` None: it has not outlived that yet.
    ``until_tokens`` None: both grow with every token that it draws, for ever."""

    end_tokens: int
    error_tokens: int | None
    until_tokens: int | None


class Untold(NamedTuple):
    """Steps in flight that have ended and are not told yet, so many ``of_lane``: whoever runs is computed,
    and has drawn a token in each step of its lane. ``steps``, and ``tokens`` drawn: of all lanes."""

    of_lane: tuple[int, ...]
    steps: int
    tokens: int


ALL_TOLD = Untold((), 0, 0)


class Sums(NamedTuple):
    """``errors``: how many have outlived their predictions."""

    end_tokens: int
    error_tokens: int
    errors: int


@dataclass(slots=True)
class Expectations:
    """Looked at when they are asked for. ``_steps``: that have ended, of each of which a sequence has drawn
    one token at the most; so ``_due`` says when each is to be looked at again, at the earliest."""

    _steps: int = 0
    _end_tokens: int = 0
    _error_tokens: int = 0
    _errors: int = 0
    _fresh: set[BlockOwner] = field(default_factory=set)
    _known: dict[BlockOwner, tuple[Expectation, int]] = field(default_factory=dict)
    _growing: dict[BlockOwner, list[int]] = field(default_factory=dict)
    """Of whom nobody knows how far they get: what they have drawn."""
    _beyond: dict[BlockOwner, tuple[int, int]] = field(default_factory=dict)
    """Theirs: by how much ``end_tokens`` and ``error_tokens`` exceed that. Both in sums, too."""
    _beyond_end_tokens: int = 0
    _beyond_error_tokens: int = 0
    _due: list[tuple[int, BlockOwner]] = field(default_factory=list)

    def note_changed(self, owner: BlockOwner) -> None:
        """It is new, or something else is predicted of it, or it drew a token beside the steps."""
        self._fresh.add(owner)

    def note_steps(self, steps: int) -> None:
        self._steps += steps

    def forget(self, owner: BlockOwner) -> None:
        """Also of one that is not known."""
        self._fresh.discard(owner)
        self._uncount(owner)

    def sums(self, sequences: "dict[BlockOwner, DecodeSequence]", untold: Untold = ALL_TOLD) -> Sums:
        """``sequences``: all that were noted and not forgotten, maybe others. What is ``untold`` now is told
        before less of it is asked for."""
        due, fresh = self._due, self._fresh
        steps = self._steps + untold.steps
        while due and due[0][0] <= steps:
            at, owner = heapq.heappop(due)
            known = self._known.get(owner)
            if known is not None and known[1] == at:
                fresh.add(owner)
        if fresh:
            for owner in fresh:
                sequence = sequences[owner]
                self._look_at(owner, sequence, steps, sequence.drawn_in(untold))
            fresh.clear()
        sums = Sums(self._end_tokens, self._error_tokens, self._errors)
        return self._with_growing(sums, sequences, untold) if self._growing else sums

    def _with_growing(
        self, sums: Sums, sequences: "dict[BlockOwner, DecodeSequence]", untold: Untold
    ) -> Sums:
        growing = self._growing
        drawn = sum(map(len, growing.values()))
        if untold.steps:
            drawn += sum([sequences[owner].drawn_in(untold) for owner in growing])
        return Sums(
            sums.end_tokens + drawn + self._beyond_end_tokens,
            sums.error_tokens + drawn + self._beyond_error_tokens,
            sums.errors + len(growing),
        )

    def _look_at(self, owner: BlockOwner, sequence: "DecodeSequence", steps: int, untold: int) -> None:
        self._uncount(owner)
        expected = sequence.expect(untold)
        drawn = len(sequence.output_ids) + untold
        if expected.until_tokens is None:
            error_tokens = expected.error_tokens
            assert error_tokens is not None, "it has outlived all that is known"
            beyond = expected.end_tokens - drawn, error_tokens - drawn
            self._growing[owner], self._beyond[owner] = sequence.output_ids, beyond
            self._beyond_end_tokens += beyond[0]
            self._beyond_error_tokens += beyond[1]
            return
        at = steps + expected.until_tokens - drawn
        self._known[owner] = expected, at
        heapq.heappush(self._due, (at, owner))
        self._end_tokens += expected.end_tokens
        if expected.error_tokens is not None:
            self._error_tokens += expected.error_tokens
            self._errors += 1

    def _uncount(self, owner: BlockOwner) -> None:
        known = self._known.pop(owner, None)
        if known is None:
            if self._growing.pop(owner, None) is not None:
                end_tokens, error_tokens = self._beyond.pop(owner)
                self._beyond_end_tokens -= end_tokens
                self._beyond_error_tokens -= error_tokens
            return
        expected, _ = known
        self._end_tokens -= expected.end_tokens
        if expected.error_tokens is not None:
            self._error_tokens -= expected.error_tokens
            self._errors -= 1
