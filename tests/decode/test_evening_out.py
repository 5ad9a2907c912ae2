"""Which sequences at rest change lanes, so that batches that take turns are alike."""

from hypothesis import given
from hypothesis import strategies as st

from decode.batches import Batches
from decode.sequence import DecodeSequence
from tests.decode.states import owner_of, task_of


@st.composite
def lanes_and_sequences(draw: st.DrawFn) -> tuple[int, list[DecodeSequence], list[DecodeSequence]]:
    """How many lanes, all sequences that run, and those of them at rest, both in the order of arrival."""
    lanes = draw(st.integers(1, 4))
    running = []
    for number in range(draw(st.integers(0, 24))):
        sequence = DecodeSequence(owner_of(f"r{number}"), task_of(f"r{number}"), 0.0, [])
        sequence.lane = draw(st.integers(0, lanes - 1))
        running.append(sequence)
    return lanes, running, [each for each in running if draw(st.booleans())]


@given(lanes_and_sequences())
def test_the_newest_leave_a_lane_that_has_two_more_than_another(
    made: tuple[int, list[DecodeSequence], list[DecodeSequence]],
) -> None:
    """Whoever is looked at, one by one, goes to the first of the lanes that have fewest."""
    lanes, running, resting = made
    expected = {id(each): each.lane for each in running}
    counts = [list(expected.values()).count(lane) for lane in range(lanes)]
    for each in reversed(resting):
        fewest = counts.index(min(counts))
        if counts[each.lane] - counts[fewest] > 1:
            counts[each.lane] -= 1
            counts[fewest] += 1
            expected[id(each)] = fewest
    before = {id(each): each.lane for each in running}
    Batches(lanes).even_out(running, resting)
    assert {id(each): each.lane for each in running} == expected
    moving = [each for each in running if each not in resting]
    assert all(each.lane == before[id(each)] for each in moving)
    if len(resting) == len(running):
        assert max(counts) - min(counts) <= 1
