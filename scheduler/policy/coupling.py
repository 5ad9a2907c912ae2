"""Whether a sequence is decoded where its prompt is computed: on a mixed instance its KV is there already.

Such an instance gives prompts only to itself or to decode instances, never to another mixed one: two that had
each filled up with what waits for room in the other would wait for ever. What its memory will not hold may
go to one that has some to spare (``policy.decode_rebalancing``). Splitwise (IV-A) runs its mixed pool
as machines that know no split; a mesh of nothing else is the coupled baseline.
"""

from collections.abc import Sequence

from common.config import DecodePolicy
from common.ids import InstanceId
from scheduler.policy.candidates import Scored
from scheduler.policy.dispatch import choose

TRANSFER_WORTH: dict[DecodePolicy, float] = {
    "round_robin": float("inf"),
    "least_outstanding": 1.0,
    "least_loaded": 0.1,
    "power_of_two": 1.0,
    "best_fit": float("inf"),
}
"""By how much another instance's score must be less to be worth a transfer: a request, a tenth of the KV
capacity, a request or a heavy one for each light one. A turn says nothing about load, and how full an
instance is nothing about how fast."""

STAYS = "computes its prompt: no KV moves"


def choose_coupled(scored: Sequence[Scored], home: InstanceId, policy: DecodePolicy) -> Scored | None:
    """``home``, which computes the prompt, unless it is refused or another one is so much better. None: all
    are refused."""
    best = choose(scored)
    own = next((each for each in scored if each.instance_id == home), None)
    if best is None or own is None or own.refusal is not None:
        return best
    is_worth_it = best.score < own.score - TRANSFER_WORTH[policy]
    return best if is_worth_it else own.noting(own.note or STAYS)
