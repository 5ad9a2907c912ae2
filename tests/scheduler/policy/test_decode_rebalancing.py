"""Which sequences leave a decode instance that is about to run out of memory, and that this ends."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from common.ids import InstanceId, RequestId
from common.messages import MovableSequence
from scheduler.policy.decode_admission import Growing
from scheduler.policy.decode_rebalancing import (
    HORIZON_STEPS,
    DecodeWorker,
    choose_departures,
    peak_need,
)

FORMAT = ("m", "fp32", 1)


def worker(
    name: str, need_tokens: int, *movable: MovableSequence, capacity_tokens: int = 1000
) -> DecodeWorker:
    return DecodeWorker(InstanceId(name), FORMAT, capacity_tokens, need_tokens, True, movable)


def sequence(
    name: str, tokens: int = 100, coming_tokens: int = 100, *, has_begun: bool = True
) -> MovableSequence:
    return MovableSequence(RequestId(name), 0, tokens, coming_tokens, has_begun)


def names(workers: list[DecodeWorker]) -> list[tuple[str, str]]:
    return [(each.sequence.request_id, each.destination) for each in choose_departures(workers)]


def test_the_most_is_needed_when_somebody_ends() -> None:
    assert peak_need([Growing(10, 5), Growing(20, 50)], 1) == (70, 50)
    assert peak_need([Growing(10, 5), Growing(90, 2)], 1) == (104, 2)
    assert peak_need([Growing(10, 5)], 4) == (18, 5)
    assert peak_need([Growing(10, 10_000)], 1) == (10 + HORIZON_STEPS, HORIZON_STEPS)
    assert peak_need([], 1) == (0, 0)


def test_while_all_fit_nobody_leaves_however_uneven_they_are() -> None:
    assert names([worker("full", 1000, sequence("r1")), worker("empty", 0)]) == []


def test_no_more_leave_than_memory_asks_for_and_they_go_where_most_is_free() -> None:
    full = worker("full", 1250, *(sequence(f"r{number}") for number in range(5)))
    assert names([full, worker("empty", 100), worker("half", 500)]) == [("r0", "empty"), ("r1", "empty")]


def test_who_has_not_begun_goes_first_and_then_who_has_most_to_come_for_its_kv() -> None:
    movable = (
        sequence("long", tokens=300),
        sequence("short", tokens=10),
        sequence("waits", 400, has_begun=False),
    )
    full = worker("full", 1600, *movable)
    assert names([full, worker("empty", 0)]) == [("waits", "empty"), ("short", "empty")]


def test_nobody_goes_where_less_than_a_fifth_would_be_left_or_nobody_is_taken_or_kv_is_of_another_kind() -> (
    None
):
    full = worker("full", 1100, sequence("r1"))
    assert names([full, worker("busy", 601)]) == []
    assert names([full, worker("busy", 600)]) == [("r1", "busy")]
    assert names([full, replace(worker("leaving", 0), is_taking=False)]) == []
    assert names([full, replace(worker("other", 0), kv_format=("m", "bf16", 1))]) == []


def growing_lists() -> st.SearchStrategy[list[Growing]]:
    return st.lists(st.builds(Growing, st.integers(1, 300), st.integers(1, 300)), max_size=8)


@settings(max_examples=200, deadline=None)
@given(st.lists(growing_lists(), min_size=2, max_size=4), st.integers(300, 1500))
def test_every_move_lessens_what_is_too_much_so_moves_end(
    placed: list[list[Growing]], capacity_tokens: int
) -> None:
    """Each instance's sequences as its reports tell them, with nobody coming or ending meanwhile."""
    while True:
        workers = [as_worker(number, growing, capacity_tokens) for number, growing in enumerate(placed)]
        departures = choose_departures(workers)
        if not departures:
            return
        for departure in departures:
            before = too_much(placed, capacity_tokens)
            moved = Growing(departure.sequence.tokens, departure.sequence.coming_tokens)
            placed[int(departure.source)].remove(moved)
            placed[int(departure.destination)].append(moved)
            assert too_much(placed, capacity_tokens) < before


def as_worker(number: int, growing: list[Growing], capacity_tokens: int) -> DecodeWorker:
    need_tokens, step = peak_need(growing, 1)
    movable = tuple(
        MovableSequence(RequestId(f"{number}-{index}"), 0, each.tokens, each.coming_tokens, True)
        for index, each in enumerate(growing)
        if min(each.coming_tokens, HORIZON_STEPS) >= step and need_tokens > capacity_tokens
    )
    return worker(str(number), need_tokens, *movable, capacity_tokens=capacity_tokens)


def too_much(placed: list[list[Growing]], capacity_tokens: int) -> int:
    """KV over memory, summed over instances and steps."""
    return sum(
        max(
            0,
            sum(each.tokens + step for each in growing if min(each.coming_tokens, HORIZON_STEPS) >= step)
            - capacity_tokens,
        )
        for growing in placed
        for step in range(HORIZON_STEPS + 1)
    )
