"""Which decodes give way to a prompt, and to whom prompts leave memory."""

from hypothesis import given
from hypothesis import strategies as st

from common.ids import RequestId
from common.kv.blocks import BlockOwner
from common.room_mates import RoomMates
from scheduler.policy.mixed_batching import MAX_PREEMPTIONS, choose_to_give_way

DECODES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), max_size=8)


def test_the_latest_give_way_until_there_is_room() -> None:
    assert choose_to_give_way([4, 4, 4, 4], [0, 0, 0, 0], 5) == [3, 2]
    assert choose_to_give_way([4, 4, 4, 4], [0, 0, 0, MAX_PREEMPTIONS], 4) == [2]
    assert choose_to_give_way([4, 4], [0, 0], 0) == []


@given(DECODES, st.integers(-5, 40))
def test_nobody_is_preempted_in_vain_too_often_or_as_the_oldest(
    decodes: list[tuple[int, int]], missing: int
) -> None:
    relief, ages = [held for held, _ in decodes], [age for _, age in decodes]
    victims = choose_to_give_way(relief, ages, missing)
    assert 0 not in victims
    assert all(ages[index] < MAX_PREEMPTIONS for index in victims)
    assert not victims or sum(relief[index] for index in victims) >= missing > 0


def test_who_is_first_to_wait_for_memory_is_owed_it_after_a_while() -> None:
    mates = RoomMates(max_wait_s=2.0)
    first, second = (BlockOwner("decode", RequestId(name), 0) for name in ("r1", "r2"))
    for now in (1.0, 2.5):
        mates.note_away(first, 5, now)
        assert mates.owed_blocks(now) == 0
    assert mates.owed_blocks(3.0) == 5
    mates.note_away(second, 7, 3.0)
    assert mates.owed_blocks(4.9) == 0
    mates.note_away(None, 0, 5.0)
    assert mates.owed_blocks(99.0) == 0
