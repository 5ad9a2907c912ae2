"""Offers and portions of KV, as the decode room takes them: events and commands."""

import pytest

from common.errors import HandoverFailed
from common.ids import Incarnation, InstanceId, RequestId
from common.lifecycle import DecodePhase
from common.messages import DecodeTask, SampledToken
from common.sequences import PublishFailure
from decode import events
from decode.pulls import Pulls
from scheduler.policy.pull_budget import UNMEASURED_IDLE_BYTES, PullBudget
from tests.decode.states import (
    FAILED,
    LIFE,
    PREFILL,
    early_of,
    handle,
    kinds,
    make_state,
    owner_of,
    start,
    task_of,
)


def test_blocks_under_a_pull_are_not_reused_before_it_is_known_to_have_drained() -> None:
    state = make_state()
    handle(state, events.TaskArrived(task_of()))
    handle(state, events.CancelArrived(RequestId("r1"), 0))
    assert state.blocks.free_blocks == 6
    assert not handle(state, events.PullFailed(owner_of(), FAILED, is_drained=False))
    assert (state.blocks.free_blocks, state.blocks.quarantined_blocks) == (6, 2)
    handle(state, events.PullDrained(owner_of()))
    assert state.blocks.free_blocks == 8


def test_a_failed_pull_can_continue_and_names_a_lost_instance() -> None:
    state = make_state()
    handle(state, events.TaskArrived(task_of()))
    [failure] = kinds(
        handle(state, events.PullFailed(owner_of(), FAILED, is_drained=True, lost_instance=PREFILL)),
        PublishFailure,
    )
    assert failure.failure.can_continue
    assert failure.failure.lost_instance == PREFILL
    assert state.is_idle


def test_an_early_offer_gets_room_for_its_first_token_which_comes_with_the_kv() -> None:
    state = make_state()
    [pull] = kinds(handle(state, events.TaskArrived(early_of())), events.PullSequence)
    assert (len(pull.blocks), pull.portion, pull.max_bytes) == (2, 0, UNMEASURED_IDLE_BYTES)
    [pull] = kinds(handle(state, events.PortionPulled(owner_of(), 100, 0.1)), events.PullSequence)
    assert pull.portion == 1
    with pytest.raises(ValueError, match="without the first token"):
        handle(state, events.PullFinished(owner_of()))
    [step] = kinds(handle(state, events.PullFinished(owner_of(), 7)), events.RunStep)
    assert [(row.position, row.output_ids) for row in step.rows] == [(4, [7])]


def test_what_a_portion_leaves_of_a_steps_share_the_next_sequence_has() -> None:
    """Each asks once in a step: what it left was not there to be sent."""
    state = make_state(total_blocks=40, pulls=Pulls(PullBudget(share=0.2, least_bytes=10)))
    start(state, "r1", max_tokens=50)
    state.pulls.budget.portion_done(1000, 0.1)
    for request_id in ("r2", "r3", "r4", "r5"):
        handle(state, events.TaskArrived(task_of(request_id)))
    [pull] = kinds(handle(state, events.StepFinished((SampledToken(8),)), now=1.0), events.PullSequence)
    assert (pull.owner, pull.max_bytes) == (owner_of("r2"), 8000), "four wait for KV beside one that runs"
    finished = events.PullFinished(owner_of("r2"), kv_bytes=700, transfer_s=0.07)
    [pull] = kinds(handle(state, finished), events.PullSequence)
    assert (pull.owner, pull.portion, pull.max_bytes) == (owner_of("r3"), 0, 7300)
    [pull] = kinds(handle(state, events.PortionPulled(owner_of("r3"), 300, 0.03)), events.PullSequence)
    assert (pull.owner, pull.portion, pull.max_bytes) == (owner_of("r4"), 0, 7000)
    assert not handle(state, events.PortionPulled(owner_of("r4"), 6995, 0.6995)), "the rest is not worth it"
    [pull] = kinds(handle(state, events.StepFinished((SampledToken(8),)), now=2.0), events.PullSequence)
    assert (pull.owner, pull.portion, pull.max_bytes) == (owner_of("r3"), 1, 6000), "three beside two"
    handle(state, events.StepFinished((SampledToken(8),) * 2), now=3.0)
    assert not kinds(handle(state, events.PortionPulled(owner_of("r3"), 0, 0.0)), events.PullSequence), (
        "what an earlier step let be pulled has lapsed"
    )


def test_short_prompts_whose_pulls_take_a_moment_do_not_take_a_step_each() -> None:
    """However few bytes they have: at their rate the least portion would take seconds."""
    state = make_state(total_blocks=40, pulls=Pulls(PullBudget(share=0.2)))
    start(state, "r1", max_tokens=50)
    state.pulls.budget.portion_done(32, 0.002)
    for request_id in ("r2", "r3", "r4", "r5"):
        handle(state, events.TaskArrived(task_of(request_id)))
    commands = handle(state, events.StepFinished((SampledToken(8),)), now=0.01)
    for request_id in ("r2", "r3", "r4"):
        [pull] = kinds(commands, events.PullSequence)
        assert (pull.owner, pull.max_bytes) == (owner_of(request_id), state.pulls.budget.least_bytes)
        finished = events.PullFinished(owner_of(request_id), kv_bytes=32, transfer_s=0.0023)
        commands = handle(state, finished, now=0.012)
    assert not kinds(commands, events.PullSequence), "1.1 of 8 ms are left, and each takes some 2"


def test_what_is_left_of_a_lane_s_step_lapses_with_another_s_end() -> None:
    """Each end of a step lets ask anew, for that one's part of the share; a slow portion leaves nothing."""
    pulls = Pulls(PullBudget(share=0.2, least_bytes=10))
    pulls.budget.portion_done(1000, 0.1)
    for lane in (0, 1):
        pulls.step_began(lane, 0.0)
    owners = [owner_of(request_id) for request_id in ("r1", "r2", "r3", "r4")]
    for owner in owners:
        pulls.begin(owner)
    pulls.step_ended(0, 1.0)
    pulls.step_began(0, 1.0)
    assert [each.owner for each in pulls.ask(4)] == owners[:1]
    pulls.step_ended(1, 1.0)
    pulls.step_began(1, 1.0)
    assert [each.owner for each in pulls.ask(4)] == owners[1:2]
    pulls.portion_done(owners[0], 10, 0.001)
    assert pulls.ask(4) == [], "of a step that has ended"
    pulls.portion_done(owners[1], 10, 0.26)
    assert pulls.ask(4) == [], "it took longer than half of the half that four beside four have"


def test_while_steps_run_a_portion_a_step_is_pulled_as_large_as_its_share_allows() -> None:
    budget = PullBudget(share=0.2, least_bytes=10)
    state = make_state(total_blocks=40, pulls=Pulls(budget))
    start(state, "r1", max_tokens=50)
    handle(state, events.TaskArrived(task_of("r2")))
    handle(state, events.TaskArrived(early_of("r3")))
    [pull] = kinds(handle(state, events.StepFinished((SampledToken(8),)), now=1.0), events.PullSequence)
    assert (pull.owner, pull.portion, pull.max_bytes) == (owner_of("r2"), 0, 10)
    assert not kinds(handle(state, events.PortionPulled(owner_of("r2"), 1000, 0.7)), events.PullSequence)
    [pull] = kinds(handle(state, events.StepFinished((SampledToken(8),)), now=2.0), events.PullSequence)
    assert (pull.owner, pull.portion, pull.max_bytes) == (owner_of("r2"), 1, 952), "two wait beside one"
    [pull] = kinds(handle(state, events.StepFinished((SampledToken(8),)), now=3.0), events.PullSequence)
    assert pull.owner == owner_of("r3"), "a portion that does not come keeps nobody waiting"
    handle(state, events.PortionPulled(owner_of("r2"), 1, 0.1))
    commands = handle(state, events.CancelArrived(RequestId("r1"), 0))
    assert commands == [], "the step in flight still computes"
    [pull] = kinds(handle(state, events.StepFinished((SampledToken(8),)), now=4.0), events.PullSequence)
    assert pull.owner == owner_of("r2")


def test_a_portion_asked_for_while_idle_is_soon_over_when_a_step_begins() -> None:
    state = make_state(total_blocks=40, pulls=Pulls(PullBudget(share=0.2, least_bytes=10)))
    handle(state, events.TaskArrived(task_of("r0")))
    handle(state, events.PullFinished(owner_of("r0"), kv_bytes=1000, transfer_s=0.1))
    handle(state, events.CancelArrived(RequestId("r0"), 0))
    handle(state, events.StepFinished((SampledToken(8),)), now=1.0)
    [first] = kinds(handle(state, events.TaskArrived(task_of("r1"))), events.PullSequence)
    [second] = kinds(handle(state, events.TaskArrived(task_of("r2"))), events.PullSequence)
    assert (first.max_bytes, second.max_bytes) == (300, 150), "10 kB/s for 30 ms, and shared"
    [step] = kinds(handle(state, events.PullFinished(owner_of("r1")), now=2.0), events.RunStep)
    assert [row.owner for row in step.rows] == [owner_of("r1")]
    assert not handle(state, events.PortionPulled(owner_of("r2"), 150, 0.015), now=2.1)
    [pull] = kinds(handle(state, events.StepFinished((SampledToken(8),)), now=2.2), events.PullSequence)
    assert (pull.owner, pull.portion, pull.max_bytes) == (
        owner_of("r2"),
        1,
        state.pulls.budget.portion_bytes(state.pulls.budget.allowed_s(pulls=1, decoding=1)),
    )


def test_batches_that_take_turns_share_what_is_pulled_beside_them() -> None:
    state = make_state(total_blocks=40, lanes=2, pulls=Pulls(PullBudget(share=0.2, least_bytes=10)))
    start(state, "r1", "r2", max_tokens=50)
    handle(state, events.TaskArrived(task_of("r3")))
    handle(state, events.StepFinished((SampledToken(8),), 0), now=1.0)
    handle(state, events.PortionPulled(owner_of("r3"), 1000, 0.1))
    [pull] = kinds(handle(state, events.StepFinished((SampledToken(8),), 1), now=1.0), events.PullSequence)
    assert (pull.portion, pull.max_bytes) == (1, 1666), "two steps of a second allow 3333 together"


def test_what_steps_took_is_known_before_they_are_told_and_counts_once() -> None:
    """Of batches that take turns, in the order of their ends: the newest weigh most."""
    at_once, counted = Pulls(), Pulls()
    for pulls in (at_once, counted):
        for lane in (0, 1):
            pulls.step_began(lane, 0.0)
    for lane, steps, now in ((0, 3, 0.3), (1, 1, 0.4), (0, 2, 0.9)):
        at_once.step_ended(lane, now, steps)
        at_once.step_began(lane, now)
        counted.count_steps(lane, now, steps)
        assert counted.budget == at_once.budget
    at_once.step_ended(1, 1.7, 2)
    counted.step_ended(0, 0.9, 5)
    counted.step_ended(1, 1.7, 3)
    assert counted.budget == at_once.budget


def test_a_sequence_that_prefill_has_ended_leaves_without_a_word() -> None:
    withdrawn = events.OfferWithdrawn(owner_of(), PREFILL, LIFE)
    for is_withdrawn in (False, True):
        state = make_state()
        handle(state, events.TaskArrived(early_of()))
        if is_withdrawn:
            assert handle(state, withdrawn) == []
            assert state.blocks.free_blocks == 6
        assert handle(state, events.SequenceEnded(owner_of())) == []
        assert state.is_idle
        assert state.blocks.free_blocks == 8


def test_an_offer_is_withdrawn_by_who_made_it_and_only_before_it_runs() -> None:
    state = make_state(max_batch=1)
    start(state, "r1")
    handle(state, events.TaskArrived(early_of("r2")))
    for owner, life in ((owner_of("r1"), LIFE), (owner_of("r2"), Incarnation("i2")), (owner_of("r3"), LIFE)):
        assert handle(state, events.OfferWithdrawn(owner, PREFILL, life)) == []
        assert list(state.sequences) == [owner_of("r1"), owner_of("r2")]
    handle(state, events.OfferWithdrawn(owner_of("r2"), PREFILL, LIFE))
    assert list(state.sequences) == [owner_of("r1")]


def test_what_waits_for_the_kv_of_a_life_that_is_gone_goes_back_and_nothing_asks_there_again() -> None:
    state = make_state(total_blocks=9, max_batch=4, pulls=Pulls(PullBudget(least_bytes=10)))
    start(state, "r1")
    for request_id in ("between", "in the air", "waits"):
        handle(state, events.TaskArrived(task_of(request_id)))
    handle(state, events.StepFinished((SampledToken(8),)))
    handle(state, events.PortionPulled(owner_of("between"), 10, 0.1))
    handle(state, events.StepFinished((SampledToken(8),)))
    assert [each.phase for each in state.sequences.values()] == [
        DecodePhase.RUNNING,
        DecodePhase.PULLING,
        DecodePhase.PULLING,
        DecodePhase.WAITING,
    ]
    for life in ((InstanceId("prefill-1"), LIFE), (PREFILL, Incarnation("i2"))):
        assert handle(state, events.PrefillGone(*life)) == []
    first, second = (owner for owner in state.pulls.owners)
    resting = first if state.pulls.rests(first) else second
    failures = kinds(handle(state, events.PrefillGone(PREFILL, LIFE)), PublishFailure)
    assert {each.failure.request_id for each in failures} == {resting.request_id, RequestId("waits")}
    assert all(each.failure.can_continue for each in failures)
    assert {each.failure.lost_instance for each in failures} == {PREFILL}
    [in_the_air] = state.pulls.owners
    commands = handle(state, events.PortionPulled(in_the_air, 10, 0.1))
    [failure] = kinds(commands, PublishFailure)
    assert (failure.failure.lost_instance, kinds(commands, events.PullSequence)) == (PREFILL, [])
    assert list(state.sequences) == [owner_of("r1")]
    assert state.blocks.free_blocks == 7


def test_two_instances_that_offer_one_attempt_are_told_apart() -> None:
    state = make_state()
    handle(state, events.TaskArrived(task_of()))
    handle(state, events.TaskArrived(task_of()))
    other = DecodeTask(task_of().request, InstanceId("prefill-1"), LIFE, 4)
    with pytest.raises(HandoverFailed, match="another instance"):
        handle(state, events.TaskArrived(other))


def test_between_two_portions_a_cancelled_sequence_frees_its_blocks_at_once() -> None:
    state = make_state(max_batch=2)
    start(state, "r1")
    handle(state, events.TaskArrived(task_of("r2")))
    handle(state, events.CancelArrived(RequestId("r2"), 0))
    assert list(state.sequences) == [owner_of("r1")]
    assert state.blocks.free_blocks == 6


def test_what_is_pushed_is_asked_for_once_and_whole_whatever_is_computed() -> None:
    state = make_state(total_blocks=40, pulls=Pulls(PullBudget(least_bytes=10), is_pushed=True))
    start(state, "r1", max_tokens=50)
    asked = []
    for request_id in ("r2", "r3", "r4"):
        asked += kinds(handle(state, events.TaskArrived(task_of(request_id))), events.PullSequence)
    assert [(pull.owner, pull.portion, pull.max_bytes) for pull in asked] == [
        (owner_of(request_id), 0, None) for request_id in ("r2", "r3", "r4")
    ]
    assert not kinds(handle(state, events.StepFinished((SampledToken(8),)), now=1.0), events.PullSequence)
    handle(state, events.PullFinished(owner_of("r3"), kv_bytes=700, transfer_s=0.07))
    [step] = kinds(handle(state, events.StepFinished((SampledToken(8),)), now=2.0), events.RunStep)
    assert [row.owner for row in step.rows] == [owner_of("r1"), owner_of("r3")]
