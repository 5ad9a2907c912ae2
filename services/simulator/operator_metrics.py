"""What each operator of the model took in a run, and of how many tokens (Vidur 5.2): what a device's time
goes to. Counted pass by pass where asked for; told by the source of performance, so as if alone and healthy:
stragglers' passes count as anyone's.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from services.simulator.engine import EnginePass
from services.simulator.performance.interface import OperatorTimes
from services.simulator.shape import attended_tokens

CHUNKS_ATTENTION, STEPS_ATTENTION = "attn_prefill", "attn_decode"


class OperatorMetrics(msgspec.Struct, frozen=True):
    """``passes``: that it was part of; ``tokens``: of a pass, on average: rows, for attention those that are
    attended to. ``seconds``: of all passes, layers and stages; ``share``: of all its pool's operators'."""

    pool: str
    operator: str
    passes: int
    tokens: float
    seconds: float
    share: float


@dataclass(slots=True)
class _Use:
    passes: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, passes: int, tokens: int, seconds: float) -> None:
        self.passes += passes
        self.tokens += tokens
        self.seconds += seconds


@dataclass(slots=True)
class OperatorTally:
    """Of a pool's passes. ``is_attending``: attention is computed there, too, and not on workers."""

    model: OperatorTimes
    is_attending: bool = True
    _passes: Counter[tuple[int, int]] = field(default_factory=Counter)
    _chunks: _Use = field(default_factory=_Use)
    _steps: _Use = field(default_factory=_Use)

    def add(self, done: EnginePass) -> None:
        rows = heads = done.sequences
        if done.chunk is not None:
            chunks = tuple((piece.start, piece.tokens) for piece in done.chunk.slices)
            rows += sum(tokens for _, tokens in chunks)
            heads += len(chunks)
            if chunks:
                attended = sum(before + tokens for before, tokens in chunks)
                self._chunks.add(1, attended, self.model.chunks_attention_s(chunks))
        if not rows:
            return
        self._passes[rows, heads] += done.steps
        if done.sequences and self.is_attending:
            steps = (done.sequences, done.context_tokens, done.steps)
            self._steps.add(done.steps, attended_tokens(*steps), self.model.steps_attention_s(*steps))

    def metrics(self, pool: str) -> Iterator[OperatorMetrics]:
        """What took longest first."""
        found: dict[str, _Use] = {}
        for (rows, heads), passes in self._passes.items():
            for name, seconds in self.model.row_operators_s(rows, heads).items():
                found.setdefault(name, _Use()).add(passes, passes * rows, passes * seconds)
        found |= {CHUNKS_ATTENTION: self._chunks, STEPS_ATTENTION: self._steps}
        whole_s = sum(each.seconds for each in found.values())
        for name, each in sorted(found.items(), key=lambda item: -item[1].seconds):
            if each.passes:
                mean, share = each.tokens / each.passes, each.seconds / whole_s if whole_s > 0 else 0.0
                yield OperatorMetrics(pool, name, each.passes, mean, each.seconds, share)
