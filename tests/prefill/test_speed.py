"""How fast an instance finds that it computes prompts."""

import pytest

from common.ids import InstanceId
from common.kv.blocks import BlockOwner
from common.laws import prompt_s
from prefill.events import ChunkSlice
from prefill.sequence import ROOM
from prefill.speed import PrefillSpeed
from scheduler.policy.candidates import Arrival, PrefillCandidate
from scheduler.policy.fitting import WARM_SAMPLES
from scheduler.policy.length_history import LengthHistory
from scheduler.policy.shadow import predicted_ttft_s
from tests.requests import make_request

FULL_TOKENS = 512


def chunk_of(tokens: int) -> tuple[ChunkSlice, ...]:
    request = make_request("r0", tokens)
    return (ChunkSlice(BlockOwner(ROOM, request.request_id, 0), request, 0, tokens, (), True),)


def predicted_s(speed: PrefillSpeed, prompt_tokens: int) -> float | None:
    candidate = PrefillCandidate(InstanceId("p0"), 0, 0, speed.tokens_per_s, speed.chunk_time)
    return predicted_ttft_s(
        candidate, Arrival(0, 0, prompt_tokens, 0, LengthHistory().predict(prompt_tokens))
    )


def test_a_few_tiny_prompts_on_a_cold_machine_say_nothing_of_a_long_one() -> None:
    """At their 133 tokens/s a prompt of 550, which takes 0.65 s, was predicted to take 4.1 s."""
    speed = PrefillSpeed(FULL_TOKENS)
    for _ in range(3):
        speed.observe(chunk_of(8), 0.06, is_alone=True)
    assert predicted_s(speed, 550) is None
    speed.observe(chunk_of(400), 0.46, is_alone=True)
    assert predicted_s(speed, 550) == pytest.approx(0.65, rel=0.05)


def test_more_of_them_are_not_taken_for_a_law_that_holds_far_beyond_their_sizes() -> None:
    """1 ms a token and 20 a chunk: cold ones that are by chance the larger ones say 9 ms a token."""
    speed = PrefillSpeed(FULL_TOKENS)
    for number in range(WARM_SAMPLES):
        tokens = 6 + number % 6
        cold_s = 0.06 if number < 12 and tokens > 8 else 0.0
        speed.observe(chunk_of(tokens), 0.02 + 1e-3 * tokens + cold_s, is_alone=True)
    assert speed.chunk_time is not None
    assert prompt_s(speed.chunk_time, 550, FULL_TOKENS) < 2.0


def test_a_pass_that_took_decodes_along_teaches_no_law() -> None:
    speed = PrefillSpeed(FULL_TOKENS)
    for _ in range(WARM_SAMPLES):
        speed.observe(chunk_of(FULL_TOKENS), 0.5, is_alone=False)
    assert speed.chunk_time is None
    assert speed.tokens_per_s == pytest.approx(1024.0)
