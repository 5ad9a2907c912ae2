"""What a gateway remembers of losses, and whom each of them concerns."""

import pytest

from common.ids import Incarnation, InstanceId
from common.messages import InstanceGone, InstanceLife, Placement
from gateway.losses import DECLARED_WITHIN_S, GONE_MEMORY_S, Losses, find_former, is_needed

LEASE_S = 3.0
LIFE = Incarnation("first")
PREFILL = InstanceGone(InstanceId("prefill-a"), LIFE)
DECODE = InstanceGone(InstanceId("decode-a"), LIFE)
PLACEMENT = Placement(PREFILL.instance_id, LIFE, DECODE.instance_id, LIFE)
RESUMED = Placement(DECODE.instance_id, LIFE, DECODE.instance_id, LIFE)


@pytest.mark.parametrize(
    ("gone", "attempt_tokens", "needed"),
    [(PREFILL, 0, True), (PREFILL, 1, True), (PREFILL, 2, False), (DECODE, 0, True), (DECODE, 9, True)],
)
def test_prefill_is_needed_until_the_second_token_and_decode_to_the_end(
    gone: InstanceGone, attempt_tokens: int, needed: bool
) -> None:
    assert is_needed(PLACEMENT, attempt_tokens, gone) is needed


def test_what_began_before_everybody_had_heard_that_a_gateway_is_gone_may_be_forgotten() -> None:
    losses = Losses(LEASE_S)
    assert not losses.is_forgotten(0.0, 100.0)
    losses.declared_gone_s = 10.0
    heard_s = 10.0 + DECLARED_WITHIN_S
    assert losses.is_forgotten(9.9, 10.1)
    assert not losses.is_forgotten(10.1, heard_s - 0.1)
    assert losses.is_forgotten(10.1, heard_s)
    assert not losses.is_forgotten(heard_s, heard_s + 1.0)


def test_another_life_of_an_instance_concerns_nobody() -> None:
    assert not is_needed(PLACEMENT, 0, InstanceGone(DECODE.instance_id, Incarnation("before")))


@pytest.mark.parametrize(
    ("placement", "attempt_tokens", "is_former"),
    [(PLACEMENT, 1, False), (PLACEMENT, 2, True), (RESUMED, 0, False), (RESUMED, 1, True)],
)
def test_a_lost_decode_instance_may_have_left_kv_once_it_drew_a_token(
    placement: Placement, attempt_tokens: int, is_former: bool
) -> None:
    former = find_former(placement, attempt_tokens, DECODE)
    assert former == (InstanceLife(DECODE.instance_id, LIFE) if is_former else None)
    assert find_former(PLACEMENT, attempt_tokens, PREFILL) is None


def test_a_loss_that_is_heard_of_before_the_placement_is_found_if_it_came_while_that_was_asked_for() -> None:
    losses = Losses(LEASE_S)
    losses.note_instance(DECODE, 10.0)
    assert losses.find_lost(PLACEMENT, 0, since_s=9.0) == DECODE
    assert losses.find_lost(PLACEMENT, 0, since_s=11.0) is None


def test_losses_of_instances_are_remembered_for_longer_than_any_submission_only() -> None:
    losses = Losses(LEASE_S)
    losses.note_instance(DECODE, 0.0)
    losses.note_instance(PREFILL, GONE_MEMORY_S)
    assert list(losses.instances_s) == [PREFILL]


def test_schedulers_that_fell_silent_are_remembered_for_a_lease_only() -> None:
    losses = Losses(LEASE_S)
    assert all(losses.note_scheduler(Incarnation(f"i{number}"), 0.0) for number in range(100))
    assert not losses.note_scheduler(Incarnation("i7"), LEASE_S - 0.1)
    # One of them had been stopped and woken, and falls silent again.
    assert losses.note_scheduler(Incarnation("i7"), LEASE_S)
    assert list(losses.schedulers_s) == ["i7"]
