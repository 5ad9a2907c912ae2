"""What rules choose between: a request that is to be placed, and what is known of who could have it."""

import msgspec

from common.ids import InstanceId
from common.lengths import LengthDistribution
from common.performance import DEFAULT_CHUNK_TOKENS, FittedTime
from scheduler.policy.best_fit import Growth


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A request that is to be placed. Of its ``prompt_tokens`` it has itself drawn ``drawn_tokens`` before,
    which in the end will be as many as ``lengths`` say. ``number``: how many were placed before. ``salt``: 64
    bits that are the request's own, for rules that draw lots: every scheduler draws the same. ``home``: the
    mixed instance that is to compute its prompt, if it is one."""

    number: int
    salt: int
    prompt_tokens: int
    drawn_tokens: int
    lengths: LengthDistribution
    home: InstanceId | None = None

    def at(self, home: InstanceId) -> "Arrival":
        """The same, with its prompt computed there."""
        return Arrival(self.number, self.salt, self.prompt_tokens, self.drawn_tokens, self.lengths, home)


class Objectives(msgspec.Struct, frozen=True, gc=False):
    """Seconds to the first token and between tokens that users are promised."""

    ttft_s: float
    tpot_s: float


class DecodeCandidate(msgspec.Struct, frozen=True, gc=False):
    """``context_tokens``: KV of the ``requests`` that live there or are on their way; ``coming_tokens``: what
    they are still expected to draw; ``sequences``: both of each of them, None where that is not known, the
    pool is not half full or no rule asks. ``heavy``: how many of them are expected to draw many."""

    instance_id: InstanceId
    requests: int
    context_tokens: int
    capacity_tokens: int
    coming_tokens: float = 0.0
    heavy: int = 0
    step_time: FittedTime | None = None
    sequences: tuple[Growth, ...] | None = None


class PrefillCandidate(msgspec.Struct, frozen=True, gc=False):
    """``pending_tokens``: prompt tokens queued or on their way there, not yet computed. ``coming_tokens``:
    that are still to be drawn there, on a mixed instance. ``requests``: of both phases. ``tokens_per_s`` and
    ``chunk_time``: how fast it has measured that it computes prompts, in chunks of ``chunk_tokens``;
    ``queue_s``: how long by that it takes for what is pending, 0 where nothing is measured."""

    instance_id: InstanceId
    pending_tokens: int
    requests: int = 0
    tokens_per_s: float | None = None
    chunk_time: FittedTime | None = None
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    coming_tokens: float = 0.0
    beside: DecodeCandidate | None = None
    spare_s: float | None = None
    queue_s: float = 0.0


class Scored(msgspec.Struct, frozen=True, gc=False):
    """Of one candidate. ``refusal``: why the rule would not take it; ``note``: what speaks against one that
    it takes as the least evil. Every decision makes and keeps one of each instance, hence a Struct, which
    is made in a fifth of a dataclass's time and which garbage collections pass by."""

    instance_id: InstanceId
    score: float
    refusal: str | None = None
    note: str | None = None

    def noting(self, note: str) -> "Scored":
        return Scored(self.instance_id, self.score, self.refusal, note)
