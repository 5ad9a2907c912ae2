"""In which order prompts are computed while more come than can be: by how many each may be overtaken."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import PrefillBatching, PrefillOrder
from common.ids import RequestId
from prefill.handover import HandOver, KVCursor
from prefill.prompts import PromptQueue
from prefill.sequence import PrefillSequence
from scheduler.policy.prefill_batching import FillBatch, fill_batch_of
from tests.prefill.states import DECODE, LAYOUT, LIFE, owner_of
from tests.requests import make_request

WINDOW, AGING_TOKENS_PER_S = 4, 10.0
BATCH_TOKENS = 32
STEPS = 60
HEAD_STARTS_S = (0.0, 0.0, 3.0, 20.0)
"""Of classes of service; a batch takes a second."""
SEEDS = st.integers(0, 1 << 32)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    sequence: PrefillSequence

    @property
    def request_id(self) -> RequestId:
        return self.sequence.request.request_id

    @property
    def came_s(self) -> float:
        """As its class counts it."""
        return self.sequence.arrived_s - self.sequence.request.head_start_s

    def is_after(self, other: "Prompt") -> bool:
        """By the clock, too: where a window is open already, no head start brings anybody into it."""
        return self.came_s > other.came_s and self.sequence.arrived_s >= other.sequence.arrived_s


def arrive(chance: random.Random, number: int, now: float) -> Prompt:
    """Mostly short ones, so that a long one always finds shorter ones beside it."""
    tokens = chance.choice([1, 5, 20, 200])
    request = make_request(f"r{number}", tokens, head_start_s=chance.choice(HEAD_STARTS_S))
    owner, hand_over = (
        owner_of(request.request_id),
        HandOver(tokens, KVCursor(LAYOUT.layers, LAYOUT.token_layer_bytes)),
    )
    return Prompt(PrefillSequence(owner, request, DECODE, LIFE, now, hand_over))


def arrivals_of(chance: random.Random) -> list[list[Prompt]]:
    """Twice as much a second as is computed."""
    return [[arrive(chance, 2 * step + each, float(step)) for each in range(2)] for step in range(STEPS)]


def compute(
    queue: PromptQueue, fill: FillBatch, arrivals: list[list[Prompt]]
) -> Iterator[tuple[list[Prompt], list[Prompt], list[Prompt]]]:
    """Batch by batch, until nobody waits: whose prompts were in it, whose were done with it, who waits on."""
    waiting: list[Prompt] = []
    for step in count():
        for prompt in arrivals[step] if step < len(arrivals) else ():
            waiting.append(prompt)
            queue.add(prompt.sequence)
        if not waiting:
            return
        turn = list(queue.window(float(step)))
        slices = fill([sequence.remaining_tokens for sequence in turn], BATCH_TOKENS)
        assert slices, "nobody is computed though somebody waits"
        for sequence, tokens in zip(turn, slices, strict=False):
            sequence.computed_tokens += tokens
            if sequence.remaining_tokens == 0:
                queue.remove(sequence)
        chosen = [prompt for prompt in waiting if prompt.sequence in turn[: len(slices)]]
        done = [prompt for prompt in chosen if prompt.sequence.remaining_tokens == 0]
        waiting = [prompt for prompt in waiting if prompt not in done]
        yield chosen, done, [prompt for prompt in waiting if prompt not in chosen]


@settings(max_examples=30)
@given(st.sampled_from(["fcfs", "sjf", "ljf"]), st.sampled_from(get_args(PrefillBatching)), SEEDS)
def test_in_windows_a_prompt_is_overtaken_by_fewer_than_a_window_s_that_came_later(
    order: PrefillOrder, batching: PrefillBatching, seed: int
) -> None:
    queue, overtaken = PromptQueue(order, WINDOW), Counter[RequestId]()
    arrivals = arrivals_of(random.Random(seed))
    for _, done, waiting in compute(queue, fill_batch_of(batching, order), arrivals):
        for prompt in waiting:
            overtaken[prompt.request_id] += sum(each.is_after(prompt) for each in done)
    assert len(queue) == 0
    assert max(overtaken.values(), default=0) < WINDOW


@settings(max_examples=30)
@given(st.sampled_from(get_args(PrefillBatching)), SEEDS)
def test_by_what_is_left_a_prompt_is_overtaken_only_by_those_that_came_before_waiting_outweighed_it(
    batching: PrefillBatching, seed: int
) -> None:
    queue = PromptQueue("srpt", WINDOW, AGING_TOKENS_PER_S)
    arrivals = arrivals_of(random.Random(seed))
    for chosen, _, waiting in compute(queue, fill_batch_of(batching, "srpt"), arrivals):
        for prompt in waiting:
            latest_s = prompt.came_s + prompt.sequence.request.tokens / AGING_TOKENS_PER_S
            assert all(each.came_s <= latest_s for each in chosen)
    assert len(queue) == 0
