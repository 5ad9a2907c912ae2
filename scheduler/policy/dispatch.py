"""Where a request goes. Pure choices over what is known of the instances' load.

Prefill: join the shortest queue, counted in pending tokens (Splitwise IV-A, DistServe 4.3). Decode: the
least loaded (DistServe 4.3). Both are chosen at once, so the transfer can overlap prefill.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.ids import InstanceId


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """``pending_tokens``: prompt tokens queued or on their way there, not yet computed."""

    instance_id: InstanceId
    pending_tokens: int
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    """``context_tokens``: KV of the sequences that live there or are on their way."""

    instance_id: InstanceId
    requests: int
    context_tokens: int
    capacity_tokens: int


def join_shortest_queue(candidates: Sequence[PrefillCandidate]) -> PrefillCandidate:
    """The candidate with the fewest pending tokens; ties by id, so every scheduler agrees."""
    return min(candidates, key=lambda candidate: (candidate.pending_tokens, candidate.instance_id))


def least_loaded(candidates: Sequence[DecodeCandidate]) -> DecodeCandidate:
    """The candidate with the smallest share of its KV capacity spoken for; ties by requests, then id."""
    return min(
        candidates,
        key=lambda candidate: (
            candidate.context_tokens / candidate.capacity_tokens,
            candidate.requests,
            candidate.instance_id,
        ),
    )
