"""Swapping against computing again, and when a swapped sequence comes back."""

import msgspec

from common.performance import FittedTime, PromptTime
from scheduler.policy.decode_admission import Growing
from scheduler.policy.preemption import STEPS_BEFORE_GROWTH, Holder, Rates, blocks_to_return, is_swap_cheaper

PROMPT_TIME = PromptTime(FittedTime((0.5, 0.0, 0.0), 0.1, 20), chunk_tokens=100)
"""Half a second for 1,000 tokens."""
MEASURED = Rates(copy_bytes_per_s=1e6, pull_bytes_per_s=1e6, prompt_time=PROMPT_TIME)


def test_two_copies_are_held_against_the_prompt_and_its_hand_over() -> None:
    # 2 B / 1e6 < 0.5 + B / 1e6, so below half a million bytes.
    assert is_swap_cheaper(1000, 499_000, MEASURED)
    assert not is_swap_cheaper(1000, 501_000, MEASURED)


def test_a_slow_network_or_a_long_prompt_speaks_for_swapping_and_slow_memory_against_it() -> None:
    slow_network = Rates(1e6, 1e3, PROMPT_TIME)
    slow_memory = Rates(1e3, 1e6, PROMPT_TIME)
    assert is_swap_cheaper(1000, 900_000, slow_network)
    assert is_swap_cheaper(10_000, 900_000, MEASURED)
    assert not is_swap_cheaper(1000, 10_000, slow_memory)


def test_what_was_never_measured_is_tried() -> None:
    assert is_swap_cheaper(1, 1 << 40, Rates(prompt_time=PROMPT_TIME))
    assert is_swap_cheaper(1, 1 << 40, Rates(copy_bytes_per_s=1.0))


def test_who_comes_back_leaves_room_for_what_everybody_draws_next() -> None:
    swapped, present = Growing(8, 1000), [Holder(Growing(8, 1000), blocks=8)]
    assert blocks_to_return(swapped, present, 1) == 8 + 2 * STEPS_BEFORE_GROWTH


def test_one_that_is_about_to_end_needs_no_more_room_than_to_its_end() -> None:
    present = [Holder(Growing(8, 2), blocks=8)]
    assert blocks_to_return(Growing(8, 1), present, 1) == 8 + 1 + 2


def test_alone_a_sequence_comes_back_wherever_it_fits() -> None:
    assert blocks_to_return(Growing(8, 1000), [], 4) == 2


def test_the_prompt_time_travels() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(PROMPT_TIME), type=PromptTime) == PROMPT_TIME
