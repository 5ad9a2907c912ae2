"""The linear law beside the emulated engine that waits by it: both say how long the same pass takes. But for
a resumed prompt's last chunk of one token, which the engine takes for a decode."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import EmulationConfig
from common.emulation import EmulatedRunner
from common.messages import SamplingParams
from common.steps import Draw, SequenceStep
from services.simulator.performance.linear import LinearPerformance
from services.simulator.shape import PassShape

EMULATION = EmulationConfig(
    prefill_base_s=0.5,
    prefill_per_token_s=0.01,
    decode_base_s=0.25,
    decode_per_sequence_s=0.03,
    decode_per_context_token_s=0.0007,
)
LAW = LinearPerformance(
    prefill_s=0.5, per_prompt_token_s=0.01, step_s=0.25, per_sequence_s=0.03, per_context_token_s=0.0007
)


def step(start: int, tokens: int, output: int) -> SequenceStep:
    draw = Draw(SamplingParams(max_tokens=9), (1,) * start, (2,) * output)
    return SequenceStep((3,) * tokens, start, (0,), draw)


@given(
    chunks=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), max_size=4),
    contexts=st.lists(st.integers(1, 500), max_size=5),
)
def test_an_emulated_pass_takes_what_the_law_says(chunks: list[tuple[int, int]], contexts: list[int]) -> None:
    batch = [step(start, tokens, 0) for start, tokens in chunks]
    batch += [step(context - 1, 1, 1) for context in contexts]
    if batch:
        shape = PassShape(tuple(chunks), len(contexts), sum(contexts))
        assert EmulatedRunner(EMULATION).step_time_s(batch) == pytest.approx(LAW.pass_s(shape))


def test_a_pass_of_both_kinds_reads_its_weights_once() -> None:
    both = EmulatedRunner(EMULATION).step_time_s([step(0, 10, 0), step(99, 1, 1)])
    assert both == pytest.approx(0.5 + 0.1 + 0.03 + 0.07)


def test_a_prompt_that_ends_costs_its_process_once() -> None:
    law = LinearPerformance(prefill_s=0.5, step_s=0.25, per_ended_prompt_s=2.0)
    assert [law.pass_s(PassShape(((0, 8),), 1, 9, ended)) for ended in (0, 1, 3)] == pytest.approx(
        [0.5, 2.5, 6.5]
    )
    assert law.steps_s(1, 9, 4) == pytest.approx(1.0)
