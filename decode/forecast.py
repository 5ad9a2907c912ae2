"""What a decode instance's sequences will come to need, and who could go on elsewhere: for its load reports.

A prediction that a sequence has outlived is made again: the mean of those that got as far (Aladdin 4.3).
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from common.lifecycle import DecodePhase
from common.messages import DecodeTask, MovableSequence
from decode.expectations import ALL_TOLD, Untold
from decode.sequence import RUNNING, DecodeSequence, Sequences
from scheduler.policy.decode_admission import Growing
from scheduler.policy.decode_rebalancing import HORIZON_STEPS, as_growing, most_need, peak_need

MOST_MOVABLE = 16
"""That a report names."""
SURE_SHARE = 0.5
"""Of the memory: where even the most that they could need is less, it is said instead of what they will."""


class Forecast(NamedTuple):
    """``coming_tokens``: still to be drawn by those that are here. ``need_tokens``: the most KV at one of the
    next steps, with that of the instance's prompts; where memory is plenty or nobody asks, the most that it
    could be. ``length_error_tokens`` and ``batch_error``: l^e and b^e of Aladdin's algorithm 2, over the
    sequences that have outlived their predictions: how many they are, and by how many tokens they will. Those
    that ended early left the scheduler's books with their requests, so nothing of them is to be corrected.
    ``movable``: none where all fit, or nobody asks."""

    coming_tokens: int
    need_tokens: int
    length_error_tokens: int
    batch_error: int
    movable: tuple[MovableSequence, ...] = ()


NOTHING = Forecast(0, 0, 0, 0)


def make_forecast(
    sequences: Sequences,
    prompt_tokens: Sequence[int],
    growing_prompts: Callable[[], Sequence[Growing]],
    block_size: int,
    capacity_tokens: int,
    *,
    can_hand_on: bool,
    are_needs_asked: bool = True,
    untold: Untold = ALL_TOLD,
) -> Forecast:
    """``prompt_tokens``: what each prompt of the instance's other room holds; they all stay.
    ``growing_prompts``: what they will come to need, which is asked only where memory may get short.
    ``can_hand_on``: sequences that run can leave. ``are_needs_asked``: whether anybody looks at what they
    need exactly, and who could leave; it is the most that it could be where nobody does."""
    if not (sequences or prompt_tokens):
        return NOTHING
    sums = sequences.staying(untold)
    held_tokens = sums.tokens + sum(prompt_tokens)
    need_tokens = most_need(held_tokens, sums.sequences + len(prompt_tokens), block_size)
    if not are_needs_asked:
        return Forecast(sums.coming_tokens, need_tokens, sums.error_tokens, sums.errors)
    movable: Iterable[MovableSequence] = ()
    if need_tokens > SURE_SHARE * capacity_tokens:
        staying = [each for each in sequences.values() if not each.is_cancelled]
        growing = _growing(staying, untold)
        need_tokens, step = peak_need([*growing, *growing_prompts()], block_size)
    if need_tokens > capacity_tokens:
        movable = (
            MovableSequence(
                each.owner.request_id,
                each.owner.attempt,
                grows.tokens,
                grows.coming_tokens,
                has_begun=has_begun(each),
            )
            for each, grows in zip(reversed(staying), reversed(growing), strict=True)
            if min(grows.coming_tokens, HORIZON_STEPS) >= step and is_movable(each, can_hand_on=can_hand_on)
        )
    return Forecast(
        sums.coming_tokens,
        need_tokens,
        sums.error_tokens,
        sums.errors,
        tuple(islice(movable, MOST_MOVABLE))[::-1],
    )


def least_spare_s(
    sequences: Iterable[DecodeSequence],
    tpot_s: Callable[[str], float],
    now: float,
    untold: Untold = ALL_TOLD,
) -> float | None:
    """The least of T_dec · l_out − t_dec (Aladdin 4.2, constraint d) over those that run: by how much each is
    ahead of its pace since it came here. ``tpot_s``: promised to a class of service."""
    of_lane = untold.of_lane
    service_class: str | None = None
    least_s: float | None = None
    pace_s = 0.0
    for each in sequences:
        if each.phase is not RUNNING:
            continue
        if each.service_class != service_class:
            service_class = each.service_class
            pace_s = tpot_s(service_class)
        drawn = len(each.output_ids) - each.drawn_tokens_before
        if of_lane:
            drawn += of_lane[each.lane]
        spare_s = pace_s * drawn - (now - each.arrived_s)
        if least_s is None or spare_s < least_s:
            least_s = spare_s
    return least_s


def is_movable(sequence: DecodeSequence, *, can_hand_on: bool) -> bool:
    """Whether it runs, or its KV lies complete with its prefill instance and nobody has asked for it."""
    if sequence.phase is DecodePhase.RUNNING:
        return can_hand_on
    task = sequence.task
    return sequence.phase is DecodePhase.WAITING and isinstance(task, DecodeTask) and not task.is_early


def has_begun(sequence: DecodeSequence) -> bool:
    return sequence.phase is not DecodePhase.WAITING


def _growing(sequences: Iterable[DecodeSequence], untold: Untold) -> list[Growing]:
    """Where memory is short every report asks it of everybody."""
    growing = []
    for each in sequences:
        drawn = len(each.output_ids) + each.drawn_in(untold)
        left = each.max_tokens - drawn
        coming_tokens = each.coming_after(drawn)
        growing.append(as_growing(each.prompt_tokens + drawn, coming_tokens, left if left > 1 else 1))
    return growing
