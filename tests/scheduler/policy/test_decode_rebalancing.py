"""Which sequences leave a decode instance that is about to run out of memory, and that this ends."""

from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class Resident:
    """``is_prompt``: of a mixed instance's other room, so it goes nowhere."""

    growing: Growing
    is_prompt: bool
    has_begun: bool

    @property
    def needs_at(self) -> range:
        """Steps."""
        return range(min(self.growing.coming_tokens, HORIZON_STEPS) + 1)


def instances() -> st.SearchStrategy[dict[str, Resident]]:
    growing = st.builds(Growing, st.integers(1, 300), st.integers(1, 300))
    residents = st.builds(Resident, growing, st.booleans(), st.booleans())
    return st.dictionaries(st.uuids().map(str), residents, max_size=8)


@settings(max_examples=200, deadline=None)
@given(st.lists(instances(), min_size=2, max_size=4), st.integers(300, 1500))
def test_every_move_lessens_what_is_too_much_so_moves_end_and_nobody_moves_twice(
    placed: list[dict[str, Resident]], capacity_tokens: int
) -> None:
    """As instances' reports tell of sequences and prompts, with nobody coming or ending meanwhile."""
    moved: set[str] = set()
    while True:
        workers = [as_worker(number, each, capacity_tokens) for number, each in enumerate(placed)]
        departures = choose_departures(workers)
        if not departures:
            return
        for departure in departures:
            before = too_much(placed, capacity_tokens)
            name = departure.sequence.request_id
            resident = placed[int(departure.source)].pop(name)
            placed[int(departure.destination)][name] = resident
            assert not resident.is_prompt
            assert too_much(placed, capacity_tokens) < before
            assert name not in moved, "to and fro"
            moved.add(name)


def as_worker(number: int, residents: dict[str, Resident], capacity_tokens: int) -> DecodeWorker:
    need_tokens, step = peak_need([each.growing for each in residents.values()], 1)
    movable = tuple(
        MovableSequence(RequestId(name), 0, each.growing.tokens, each.growing.coming_tokens, each.has_begun)
        for name, each in residents.items()
        if need_tokens > capacity_tokens and not each.is_prompt and step in each.needs_at
    )
    return worker(str(number), need_tokens, *movable, capacity_tokens=capacity_tokens)


def too_much(placed: list[dict[str, Resident]], capacity_tokens: int) -> int:
    """KV over memory, summed over instances and steps."""
    return sum(
        max(
            0,
            sum(each.growing.tokens + step for each in residents.values() if step in each.needs_at)
            - capacity_tokens,
        )
        for residents in placed
        for step in range(HORIZON_STEPS + 1)
    )
