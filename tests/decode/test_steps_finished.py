"""Many steps in one event decide what as many events of one step each do."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv.blocks import BlockOwner
from common.lengths import certain
from common.messages import SampledToken
from common.sequences import PublishFailure
from decode import events
from decode.forecast import least_spare_s, make_forecast
from decode.state import DecodeState
from scheduler.policy.decode_admission import ADMISSIONS
from tests.decode.states import EOS, handle, kinds, make_state, owner_of, start, task_of

DRAWN = SampledToken(8)
STEP_S = 0.25


class Pair:
    """Two states that are told the same, one of many steps at once. ``step_s``: of every step."""

    def __init__(self, singly: DecodeState, at_once: DecodeState, step_s: float = STEP_S) -> None:
        self.step_s = step_s
        self.singly = singly
        self.at_once = at_once
        self.now = 0.0
        self.pulls: list[BlockOwner] = []
        self.swaps: list[BlockOwner] = []
        self.moves: list[BlockOwner] = []
        self.skipped = 0

    def tell(self, event: events.DecodeEvent) -> None:
        one, other = handle(self.singly, event, self.now), handle(self.at_once, event, self.now)
        assert without_rows(one) == without_rows(other)
        self.note(one)
        self.compare()

    def step(self, chance: random.Random) -> None:
        """Up to as many as follow on one another, of a lane."""
        lane = chance.choice(list(self.singly.batches.steps))
        most = self.at_once.steps_ahead(lane)
        steps = chance.choice([1, most, chance.randint(1, most)])
        rows = self.singly.batches.steps[lane]
        last = tuple(SampledToken(chance.choice([EOS, 8, 8, 8])) for _ in rows)
        commands: list[events.DecodeCommand] = []
        for step in range(steps):
            self.now += self.step_s
            tokens = last if step == steps - 1 else (DRAWN,) * len(rows)
            commands = handle(self.singly, events.StepFinished(tokens, lane), self.now)
            if step < steps - 1:
                assert [type(each) for each in commands] == [events.PublishTokens, events.RunStep]
                assert ends_of(commands) == []
                self.compare_untold({lane: step + 1})
        skipped = handle(self.at_once, events.StepsFinished(steps, last, DRAWN, lane), self.now)
        assert (
            ends_of(commands)
            == ends_of(skipped)
            == [event for each in kinds(skipped, events.PublishTokens) for event in each.events]
        )
        assert without_rows(commands) == without_rows(skipped)
        self.skipped += steps - 1
        self.note(commands)
        self.compare()

    def compare_untold(self, ended: dict[int, int]) -> None:
        """What is reported of steps, by lane, that only one of the two was told of."""
        singly, at_once = self.singly, self.at_once
        steps = tuple(ended.get(lane, 0) for lane in range(at_once.lanes))
        untold = at_once.untold(steps)
        assert singly.sequences.staying() == at_once.sequences.staying(untold)
        assert singly.sequences.tokens == at_once.sequences.tokens + untold.tokens
        taken = sum(at_once.blocks_taken(each, lane) for lane, each in enumerate(steps))
        assert singly.blocks.free_blocks == at_once.blocks.free_blocks - taken
        spare = [
            least_spare_s(singly.sequences.values(), lambda _: STEP_S, self.now),
            least_spare_s(at_once.sequences.values(), lambda _: STEP_S, self.now, untold),
        ]
        assert spare[0] == spare[1]
        size, capacity = singly.block_size, singly.blocks.total_blocks * singly.block_size
        forecast = make_forecast(singly.sequences, (), tuple, size, capacity, can_hand_on=True)
        assert forecast == make_forecast(
            at_once.sequences, (), tuple, size, capacity, can_hand_on=True, untold=untold
        )

    def note(self, commands: list[events.DecodeCommand]) -> None:
        self.pulls += [each.owner for each in kinds(commands, events.PullSequence)]
        self.swaps += [each.owner for each in commands if isinstance(each, events.SwapOut | events.SwapIn)]
        self.moves += [each.owner for each in kinds(commands, events.MoveSequence)]

    def compare(self) -> None:
        one, other = self.singly, self.at_once
        assert list(one.sequences) == list(other.sequences)
        for owner, sequence in one.sequences.items():
            assert sequence == other.sequences[owner]
        owners = one.blocks.owners()
        assert owners == other.blocks.owners()
        assert all(one.blocks.block_table(each) == other.blocks.block_table(each) for each in owners)
        assert one.batches.steps == other.batches.steps
        assert one.mates == other.mates
        ones, others = one.pulls.budget, other.pulls.budget
        allowed_s = ones.allowed_s()
        assert allowed_s == pytest.approx(others.allowed_s())
        assert ones.portion_bytes(allowed_s) == others.portion_bytes(allowed_s)


def without_rows(commands: list[events.DecodeCommand]) -> list[events.DecodeCommand]:
    """But for tokens, of which the one tells all and the other those that end."""
    return [each for each in commands if not isinstance(each, events.PublishTokens)]


def ends_of(commands: list[events.DecodeCommand]) -> list[object]:
    published = kinds(commands, events.PublishTokens)
    return [event for each in published for event in each.events if event.finish_reason]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([1, 3, 16]), st.integers(1, 6), st.integers(0, 40))
def test_many_steps_at_once_decide_what_single_steps_do(
    seed: int, block_size: int, max_batch: int, spare_blocks: int
) -> None:
    """Whatever comes in between, in pools that are often too small."""
    chance = random.Random(seed)
    admission = chance.choice(sorted(ADMISSIONS))
    blocks = 80 // block_size + 1 + spare_blocks
    host_blocks = chance.choice([0, blocks])
    context = chance.choice([None, None, 1, 30, 90])
    singly, at_once = (
        make_state(
            blocks, block_size, max_batch, admission=admission, host_blocks=host_blocks, most_context=context
        )
        for _ in range(2)
    )
    pair = Pair(singly, at_once)
    walk(pair, chance)
    assert pair.at_once.blocks.free_blocks == blocks


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([1, 3, 16]), st.integers(1, 6), st.integers(0, 40))
def test_so_they_do_where_batches_take_turns_over_several_pools(
    seed: int, block_size: int, max_batch: int, spare_blocks: int
) -> None:
    """Whose sequences change lanes, and move from one pool to another."""
    chance = random.Random(seed)
    blocks = 80 // block_size + 1 + spare_blocks
    lanes, pools, max_moves = chance.randint(1, 3), chance.randint(1, 3), chance.randint(0, 1)
    context = chance.choice([None, None, 1, 30, 90])
    # A lane's first step would have begun before the other lanes' last ones: all take no time.
    singly, at_once = (
        make_state(blocks, block_size, max_batch, lanes=lanes, max_moves=max_moves, most_context=context)
        for _ in range(2)
    )
    pair = Pair(singly, at_once, step_s=0.0)
    for _ in range(pools - 1):
        pair.tell(events.PoolAdded(blocks))
    walk(pair, chance)
    assert pair.at_once.blocks.free_blocks == pools * blocks


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([1, 3, 16]), st.integers(0, 40))
def test_what_is_told_later_of_several_batches_is_counted_of_each(
    seed: int, block_size: int, spare_blocks: int
) -> None:
    """Their steps end in turns, in any order, before a batch may change."""
    chance = random.Random(seed)
    blocks = 160 // block_size + 1 + spare_blocks
    singly, at_once = (make_state(blocks, block_size, 6, lanes=3) for _ in range(2))
    pair = Pair(singly, at_once, step_s=0.0)
    for number in range(8):
        task = task_of(f"r{number}", chance.randint(1, 25), chance.randint(2, 50))
        lengths = chance.choice([None, certain(chance.randint(1, 50))])
        take_in_turns(pair, events.TaskArrived(msgspec.structs.replace(task, lengths=lengths)))
    while not singly.is_idle:
        end_in_turns(pair, chance)
        lane = chance.choice(list(singly.batches.steps))
        take_in_turns(pair, events.StepFinished((DRAWN,) * len(singly.batches.steps[lane]), lane))
    assert at_once.is_idle


def take_in_turns(pair: Pair, event: events.DecodeEvent) -> None:
    """KV comes at once. Which blocks are given to whom hangs on whose steps are told first."""
    for state in (pair.singly, pair.at_once):
        pulls = kinds(handle(state, event), events.PullSequence)
        while pulls:
            pulls += kinds(handle(state, events.PullFinished(pulls.pop().owner)), events.PullSequence)
    assert pair.singly.blocks.free_blocks == pair.at_once.blocks.free_blocks


def end_in_turns(pair: Pair, chance: random.Random) -> None:
    most = {lane: pair.at_once.steps_ahead(lane) for lane in pair.singly.batches.steps}
    ended = dict.fromkeys(most, 0)
    for lane in chance.choices(list(most), k=3 * len(most)):
        if ended[lane] + 1 < most[lane]:
            tokens = (DRAWN,) * len(pair.singly.batches.steps[lane])
            handle(pair.singly, events.StepFinished(tokens, lane))
            ended[lane] += 1
            pair.compare_untold(ended)
    for lane in chance.sample(list(most), len(most)):
        if ended[lane]:
            tokens = (DRAWN,) * len(pair.singly.batches.steps[lane])
            pair.at_once.handle(events.StepsFinished(ended[lane], tokens, DRAWN, lane), 0.0)
    pair.at_once.check()


def walk(pair: Pair, chance: random.Random) -> None:
    for number in range(60):
        act(pair, chance, number)
    while not pair.singly.is_idle:
        act_to_end(pair, chance)
    assert pair.at_once.is_idle


def act(pair: Pair, chance: random.Random, number: int) -> None:
    choice = chance.random()
    if choice < 0.3:
        task = task_of(f"r{number}", chance.randint(1, 25), chance.randint(2, 50))
        lengths = chance.choice([None, certain(chance.randint(1, 50))])
        pair.tell(events.TaskArrived(msgspec.structs.replace(task, lengths=lengths)))
    elif choice < 0.4 and pair.singly.sequences:
        owner = chance.choice(list(pair.singly.sequences))
        pair.tell(events.CancelArrived(owner.request_id, 0))
    else:
        act_to_end(pair, chance)


def act_to_end(pair: Pair, chance: random.Random) -> None:
    choice = chance.random()
    if pair.pulls and choice < 0.6:
        owner = pair.pulls.pop(0)
        is_over = chance.random() < 0.6
        pair.tell(events.PullFinished(owner) if is_over else events.PortionPulled(owner, 1 << 20, 0.1))
    elif pair.moves and choice < 0.7:
        pair.tell(events.MoveFinished(pair.moves.pop(0)))
    elif pair.swaps and choice < 0.8:
        pair.tell(events.SwapFinished(pair.swaps.pop(0), 1, 0.1))
    elif pair.singly.batches.is_computing:
        pair.step(chance)


def test_who_runs_alone_runs_to_its_end_in_one_event() -> None:
    state = make_state(total_blocks=20)
    start(state, "r1", max_tokens=40)
    assert state.steps_ahead() == 39
    commands = handle(state, events.StepsFinished(39, (DRAWN,), DRAWN))
    [published] = kinds(commands, events.PublishTokens)
    assert [(each.index, each.finish_reason) for each in published.events] == [(39, "length")]
    assert state.is_idle


def test_steps_do_not_run_on_past_who_waits_for_one_to_end() -> None:
    state = make_state(total_blocks=40)
    start(state, "r1", max_tokens=40)
    handle(state, events.TaskArrived(task_of("r2")))
    assert state.steps_ahead() == 1, "r2 asks for its KV when a step ends"
    handle(state, events.StepsFinished(1, (DRAWN,), DRAWN))
    assert state.steps_ahead() == 38
    handle(state, events.PullFinished(owner_of("r2")))
    assert state.steps_ahead() == 1, "r2 joins"


def test_steps_run_on_only_as_far_as_there_is_memory() -> None:
    state = make_state(total_blocks=4, block_size=4)
    start(state, "r1", prompt_tokens=4, max_tokens=12)
    assert (state.steps_ahead(), state.blocks.free_blocks) == (8, 2)


def test_a_lane_runs_on_beside_another_as_far_as_both_have_memory() -> None:
    state = make_state(total_blocks=20, block_size=4, lanes=2)
    start(state, "r1", "r2", prompt_tokens=4, max_tokens=40)
    assert {lane: len(rows) for lane, rows in state.batches.steps.items()} == {0: 1, 1: 1}
    assert [state.steps_ahead(lane) for lane in (0, 1)] == [32, 32], "16 blocks are free for both"
    handle(state, events.StepsFinished(32, (DRAWN,), DRAWN, lane=0))
    assert [state.steps_ahead(lane) for lane in (0, 1)] == [7, 16]


def test_a_lane_with_more_than_another_stops_after_a_step_to_give_some_away() -> None:
    state = make_state(total_blocks=40, lanes=2)
    start(state, "r1", "r2", "r3", "r4", max_tokens=40)
    handle(state, events.StepsFinished(1, (DRAWN,), DRAWN, lane=0))
    handle(state, events.StepsFinished(1, (DRAWN,), DRAWN, lane=1))
    rows = {lane: len(rows) for lane, rows in state.batches.steps.items()}
    assert sum(rows.values()) == 4
    for row in state.batches.steps[0]:
        handle(state, events.CancelArrived(row.owner.request_id, 0))
    handle(state, events.StepsFinished(1, (DRAWN,) * rows[0], DRAWN, lane=0))
    assert 0 not in state.batches.steps
    assert state.steps_ahead(1) == 1


def test_steps_over_two_pools_run_on_until_somebody_may_move() -> None:
    still, moving = (make_state(total_blocks=40, max_moves=moves) for moves in (0, 1))
    for state in (still, moving):
        handle(state, events.PoolAdded(40))
        start(state, "r1", "r2", prompt_tokens=40, max_tokens=40)
        handle(state, events.StepsFinished(1, (DRAWN,), DRAWN))
    assert (still.steps_ahead(), moving.steps_ahead()) == (38, 15)


@pytest.mark.parametrize(
    ("steps", "before", "rows", "why"),
    [(0, 8, 1, "0 steps"), (40, 8, 1, "40 steps"), (2, EOS, 1, "ends a sequence"), (1, 8, 2, "2 rows")],
)
def test_steps_that_cannot_have_been_raise_and_change_nothing(
    steps: int, before: int, rows: int, why: str
) -> None:
    state = make_state(total_blocks=20)
    start(state, "r1", max_tokens=40)
    with pytest.raises(ValueError, match=why):
        handle(state, events.StepsFinished(steps, (DRAWN,) * rows, SampledToken(before)))
    state.check()
    assert state.steps_ahead() == 39
    assert not kinds(handle(state, events.StepsFinished(1, (DRAWN,), DRAWN)), PublishFailure)
