"""What passes that took prompts and decodes together teach of either, on passes of known laws."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv.blocks import BlockOwner
from common.laws import chunk_features, pairs_of, step_features
from common.performance import FittedTime, PassLoad
from prefill.events import ChunkSlice
from prefill.sequence import ROOM
from prefill.speed import PrefillSpeed
from scheduler.policy.mixed_batching import prompt_tokens_beside
from scheduler.policy.pass_times import PassTimes
from tests.requests import make_request

FULL_TOKENS = 512


def pass_s(chunk: FittedTime, step: FittedTime, load: PassLoad) -> float:
    """The fixed part is paid once: whoever is not in the pass adds nothing."""
    seconds = 0.0
    if load.chunk_tokens:
        seconds += chunk.seconds(chunk_features(load.chunk_tokens, load.chunk_pairs))
    if load.sequences:
        features = step_features(load.sequences, load.context_tokens)
        seconds += step.seconds(features if not load.chunk_tokens else (*features[:2], 0.0))
    return seconds


def laws(per_token: float, per_sequence: float, base: float) -> tuple[FittedTime, FittedTime]:
    """Seconds a thousand tokens, a sequence and a pass."""
    return FittedTime((per_token, 0.1, base), 0.0, 0), FittedTime((2e-3, per_sequence, base), 0.0, 0)


def shared_pass(chance: random.Random, *, is_full: bool) -> PassLoad:
    """As a mixed instance makes them: what the decodes leave is a chunk, where so much waits."""
    sequences = chance.randint(1, 48)
    tokens = prompt_tokens_beside("chunked", FULL_TOKENS, sequences)
    if not is_full:
        tokens = chance.randint(1, tokens)
    start = chance.choice([0, 0, 512, 1024])
    return PassLoad(tokens, pairs_of(start, tokens), sequences, sequences * chance.randint(50, 2000))


def alone_step(chance: random.Random) -> PassLoad:
    sequences = chance.randint(1, 48)
    return PassLoad(sequences=sequences, context_tokens=sequences * chance.randint(50, 2000))


def learn(passes: PassTimes, chunk: FittedTime, step: FittedTime, loads: list[PassLoad]) -> None:
    """With 2 % of noise."""
    chance = random.Random(len(loads))
    for load in loads:
        passes.observe(load, pass_s(chunk, step, load) * chance.uniform(0.98, 1.02))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30), st.floats(0.5, 2.0), st.floats(1e-4, 2e-3), st.floats(5e-3, 5e-2))
def test_passes_that_are_all_shared_teach_both_laws(
    seed: int, per_token: float, per_sequence: float, base: float
) -> None:
    """Of chunks and steps alone that never were, with those beside them."""
    chance, passes = random.Random(seed), PassTimes()
    chunk, step = laws(per_token, per_sequence, base)
    learn(passes, chunk, step, [shared_pass(chance, is_full=False) for _ in range(1500)])
    found = passes.chunk_time
    assert found is not None
    for start, tokens in ((0, 128), (512, 256), (1024, 512)):
        features = chunk_features(tokens, pairs_of(start, tokens))
        assert found.seconds(features) == pytest.approx(chunk.seconds(features), rel=0.1)
    if passes.step_time is not None:
        features = step_features(24, 24_000)
        assert passes.step_time.seconds(features) == pytest.approx(step.seconds(features), rel=0.25)


def test_where_every_chunk_just_fills_its_pass_nothing_is_said_of_either_alone() -> None:
    """Tokens and sequences are then always as many in all: no fit can tell one from the other."""
    chance, passes = random.Random(1), PassTimes()
    learn(passes, *laws(0.9, 1e-3, 0.02), [shared_pass(chance, is_full=True) for _ in range(600)])
    assert passes.chunk_time is None
    assert passes.step_time is None


@pytest.mark.parametrize("step_base_s", [0.02, 0.005])
def test_passes_of_decodes_alone_have_a_fixed_part_of_their_own(step_base_s: float) -> None:
    """Every tenth chunk is the last one of what waits, and does not fill its pass."""
    chance, passes = random.Random(2), PassTimes()
    chunk, step = laws(0.9, 1e-3, 0.02)
    alone = FittedTime((*step.coefficients[:2], step_base_s), 0.0, 0)
    shared = [shared_pass(chance, is_full=number % 10 > 0) for number in range(600)]
    loads = [load for each in shared for load in (each, alone_step(chance))]
    learn(passes, chunk, alone, loads)
    assert passes.chunk_time is not None
    for tokens in (64, 256, 512):
        features = chunk_features(tokens, pairs_of(0, tokens))
        assert passes.chunk_time.seconds(features) == pytest.approx(chunk.seconds(features), rel=0.15)


def test_nothing_is_said_by_passes_of_one_kind() -> None:
    chance, passes = random.Random(3), PassTimes()
    learn(passes, *laws(0.9, 1e-3, 0.02), [alone_step(chance) for _ in range(100)])
    assert passes.chunk_time is None
    assert passes.step_time is None


def chunk_of(tokens: int) -> tuple[ChunkSlice, ...]:
    request = make_request("r0", tokens)
    return (ChunkSlice(BlockOwner(ROOM, request.request_id, 0), request, 0, tokens, (), True),)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30))
def test_what_chunks_alone_taught_is_the_same_whatever_was_shared_between_them(seed: int) -> None:
    chance = random.Random(seed)
    quiet, busy = PrefillSpeed(FULL_TOKENS), PrefillSpeed(FULL_TOKENS)
    chunk, step = laws(0.9, 1e-3, 0.02)
    for _ in range(200):
        load = shared_pass(chance, is_full=False)
        busy.passes.observe(load, pass_s(chunk, step, load) * chance.uniform(0.5, 2.0))
        busy.observe(chunk_of(load.chunk_tokens), 0.5, is_alone=False)
        tokens = chance.randint(1, FULL_TOKENS)
        taken_s = chunk.seconds(chunk_features(tokens, pairs_of(0, tokens))) * chance.uniform(0.95, 1.05)
        for speed in (quiet, busy):
            speed.observe(chunk_of(tokens), taken_s, is_alone=True)
    assert quiet.chunk_time is not None
    assert busy.chunk_time == quiet.chunk_time


def test_an_instance_that_never_computes_a_chunk_alone_knows_what_one_takes() -> None:
    chance, speed = random.Random(4), PrefillSpeed(FULL_TOKENS)
    chunk, step = laws(0.9, 1e-3, 0.02)
    learn(speed.passes, chunk, step, [shared_pass(chance, is_full=False) for _ in range(300)])
    assert speed.chunk_time is not None
    features = chunk_features(400, pairs_of(0, 400))
    assert speed.chunk_time.seconds(features) == pytest.approx(chunk.seconds(features), rel=0.1)
