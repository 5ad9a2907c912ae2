"""Whose decode instance is asked for again when its prompt is computed."""

from common.ids import InstanceId
from scheduler.policy.decode_binding import is_bound_late

HERE, THERE = InstanceId("m0"), InstanceId("d0")


def test_only_where_it_is_configured_and_kv_has_to_move() -> None:
    assert is_bound_late("late", HERE, THERE)
    assert not is_bound_late("late", HERE, HERE)
    assert not is_bound_late("early", HERE, THERE)
