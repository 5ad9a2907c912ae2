"""Whose pass is next, and when what is due is chosen: over the live policies' choice."""

from dataclasses import dataclass, field

import pytest

from common.config import MixedPolicy
from common.messages import Phase
from common.next_pass import next_phases
from common.room_mates import RoomMates
from scheduler.policy.mixed_batching import MAX_PASSED_OVER, PassChoice

PASS_TOKENS = 100
MAX_WAIT_S = 2.0


@dataclass(slots=True)
class Counter:
    """A desk: ``chosen`` waits, and ``choices`` are what a room chooses when it is asked; else it has
    nothing for the engine."""

    mates: RoomMates
    chosen: dict[Phase, int] = field(default_factory=dict)
    choices: dict[Phase, int] = field(default_factory=dict)
    asked: list[Phase] = field(default_factory=list)
    since_s: float = 0.0

    def chunk_tokens(self) -> int | None:
        return self.chosen.get("prefill")

    def step(self) -> tuple[int, float] | None:
        sequences = self.chosen.get("decode")
        return None if sequences is None else (sequences, self.since_s)

    def ask(self, phase: Phase) -> None:
        self.asked.append(phase)
        if phase == "prefill":
            self.mates.is_chunk_due = False
        else:
            self.mates.step_due_s = None
        if phase in self.choices:
            self.chosen[phase] = self.choices[phase]


def counter(*, decoding: int = 0, is_chunk_due: bool = False, step_due_s: float | None = None) -> Counter:
    mates = RoomMates(decoding=decoding, is_chunk_due=is_chunk_due, step_due_s=step_due_s)
    return Counter(mates)


def choice(policy: MixedPolicy) -> PassChoice:
    return PassChoice(policy, PASS_TOKENS, MAX_WAIT_S)


@pytest.mark.parametrize("policy", ["chunked", "orca", "splitwise", "prefill_first", "static"])
def test_what_waits_alone_is_taken_and_nobody_asked(policy: MixedPolicy) -> None:
    for phase in ("prefill", "decode"):
        desk = counter()
        desk.chosen = {phase: 5}
        assert next_phases(desk, desk.mates, choice(policy), 9.0) == (phase,)
        assert desk.asked == []
    desk = counter()
    assert next_phases(desk, desk.mates, choice(policy), 9.0) == ()


def test_where_both_are_due_prompts_choose_first_and_decodes_go_along() -> None:
    desk = counter(decoding=3, is_chunk_due=True, step_due_s=0.0)
    desk.choices = {"prefill": 97, "decode": 3}
    assert next_phases(desk, desk.mates, choice("chunked"), 9.0) == ("prefill", "decode")
    assert desk.asked == ["prefill", "decode"]


def test_decodes_that_have_no_turn_stay_due_and_have_not_chosen() -> None:
    first = choice("prefill_first")
    desk = counter(decoding=3, is_chunk_due=True, step_due_s=1.0)
    desk.choices = {"prefill": 50, "decode": 3}
    assert next_phases(desk, desk.mates, first, 1.5) == ("prefill",)
    assert (desk.asked, desk.mates.step_due_s) == (["prefill"], 1.0)
    # So they do while they have waited for less than they may.
    desk.chosen, desk.mates.is_chunk_due = {}, True
    assert next_phases(desk, desk.mates, first, 1.0 + MAX_WAIT_S) == ("decode",)
    assert (desk.asked, desk.mates.is_chunk_due) == (["prefill", "decode"], True)


def test_splitwise_s_decodes_are_counted_before_they_choose() -> None:
    """As many as are in the batch: with these the pass is full or not."""
    rule = choice("splitwise")
    for passes in range(MAX_PASSED_OVER + 1):
        desk = counter(decoding=11, is_chunk_due=True, step_due_s=1.0)
        desk.choices = {"prefill": 90, "decode": 11}
        both = next_phases(desk, desk.mates, rule, 1.5)
        assert both == (("prefill", "decode") if passes == MAX_PASSED_OVER else ("prefill",))
    desk = counter(decoding=10, is_chunk_due=True, step_due_s=2.0)
    desk.choices = {"prefill": 90, "decode": 10}
    assert next_phases(desk, desk.mates, rule, 2.5) == ("prefill", "decode")


def test_prompts_without_memory_leave_the_pass_to_decodes() -> None:
    desk = counter(decoding=3, is_chunk_due=True, step_due_s=0.0)
    desk.choices = {"decode": 3}
    assert next_phases(desk, desk.mates, choice("chunked"), 9.0) == ("decode",)
    assert desk.asked == ["prefill", "decode"]


def test_decodes_whose_turn_it_is_and_that_have_nothing_leave_it_to_prompts() -> None:
    desk = counter(is_chunk_due=True, step_due_s=0.0)
    desk.choices = {"prefill": 50}
    assert next_phases(desk, desk.mates, choice("prefill_first"), 9.0) == ("prefill",)
    assert desk.asked == ["decode", "prefill"]
    assert not desk.mates.is_any_due


def test_where_nobody_who_is_due_has_anything_there_is_no_pass() -> None:
    desk = counter(is_chunk_due=True, step_due_s=0.0)
    assert next_phases(desk, desk.mates, choice("chunked"), 9.0) == ()
    assert not desk.mates.is_any_due


@pytest.mark.parametrize("policy", ["chunked", "splitwise"])
def test_a_step_that_waits_is_not_chosen_anew(policy: MixedPolicy) -> None:
    desk = counter(is_chunk_due=True)
    desk.chosen, desk.choices = {"decode": 4}, {"prefill": 96}
    assert next_phases(desk, desk.mates, choice(policy), 9.0) == ("prefill", "decode")
    assert desk.asked == ["prefill"]
