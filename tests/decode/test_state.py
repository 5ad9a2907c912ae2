"""The decode room's decisions, as events and commands."""

import random
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import HandoverFailed, NoInstanceReady, Overloaded, RequestCancelled
from common.ids import Incarnation, InstanceId, RequestId
from common.kv.blocks import BlockAllocator, BlockOwner
from common.lifecycle import DecodePhase
from common.messages import DecodeTask, ErrorReply, InstanceLife, ResumeTask, SampledToken
from decode import events
from decode.pulls import Pulls
from decode.sequence import ROOM
from decode.state import DecodeState
from scheduler.policy.pull_budget import PullBudget
from tests.requests import GATEWAY, make_request

PREFILL = InstanceId("prefill-0")
LIFE = Incarnation("i1")
"""The prefill instance's."""
FORMER = InstanceLife(InstanceId("decode-1"), Incarnation("i0"))
EOS = 2
FAILED = ErrorReply("handover_failed", "no")
Command = TypeVar("Command")


def make_state(
    total_blocks: int = 8,
    block_size: int = 4,
    max_batch: int = 8,
    max_waiting_requests: int = 100,
    lanes: int = 1,
    max_moves: int = 0,
    pulls: Pulls | None = None,
) -> DecodeState:
    return DecodeState(
        instance_id=InstanceId("decode-0"),
        blocks=BlockAllocator(total_blocks),
        block_size=block_size,
        eos_token_ids=(EOS,),
        max_batch=max_batch,
        max_waiting_requests=max_waiting_requests,
        lanes=lanes,
        max_moves=max_moves,
        min_move_gain_tokens=1,
        pulls=pulls or Pulls(),
    )


def handle(state: DecodeState, event: events.DecodeEvent, now: float = 0.0) -> list[events.DecodeCommand]:
    commands = state.handle(event, now)
    state.check()
    return commands


def task_of(
    request_id: str = "r1", prompt_tokens: int = 4, max_tokens: int = 8, attempt: int = 0
) -> DecodeTask:
    request = make_request(request_id, prompt_tokens, max_tokens, attempt=attempt, output_ids=(7,))
    return DecodeTask(request, PREFILL, LIFE, prompt_tokens)


def resumed_of(
    request_id: str = "r1", prompt_tokens: int = 4, max_tokens: int = 8, attempt: int = 1
) -> ResumeTask:
    request = make_request(request_id, prompt_tokens, max_tokens, attempt=attempt, output_ids=(7, 8))
    return ResumeTask(request, FORMER)


def owner_of(request_id: str = "r1", attempt: int = 0) -> BlockOwner:
    return BlockOwner(ROOM, RequestId(request_id), attempt)


def kinds(commands: list[events.DecodeCommand], kind: type[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, kind)]


def start(state: DecodeState, *request_ids: str, prompt_tokens: int = 4, max_tokens: int = 8) -> None:
    """Each is offered, pulled and in the batch; the first one's step is in flight."""
    for request_id in request_ids:
        handle(state, events.TaskArrived(task_of(request_id, prompt_tokens, max_tokens)))
    for request_id in request_ids:
        handle(state, events.PullFinished(owner_of(request_id)))


def test_a_sequence_is_pulled_then_runs_until_its_last_token() -> None:
    state = make_state()
    [pull] = kinds(handle(state, events.TaskArrived(task_of(max_tokens=3))), events.PullSequence)
    assert (pull.prefill_instance, len(pull.blocks)) == (PREFILL, 2)
    commands = handle(state, events.PullFinished(owner_of()), now=2.5)
    assert kinds(commands, events.ObserveAdmission) == [events.ObserveAdmission(2.5)]
    [step] = kinds(commands, events.RunStep)
    assert [(row.position, row.output_ids) for row in step.rows] == [(4, [7])]
    commands = handle(state, events.StepFinished((SampledToken(8),)))
    [published] = kinds(commands, events.PublishTokens)
    assert [(event.index, event.token.token_id) for event in published.events] == [(1, 8)]
    [published] = kinds(handle(state, events.StepFinished((SampledToken(9),))), events.PublishTokens)
    assert published.events[0].finish_reason == "length"
    assert state.is_idle
    assert state.blocks.free_blocks == 8


def test_every_gateway_gets_one_message_a_step() -> None:
    state = make_state()
    start(state, "r1", "r2", "r3")
    handle(state, events.StepFinished((SampledToken(8),)))
    commands = handle(state, events.StepFinished(tuple(SampledToken(8) for _ in range(3))))
    assert [len(command.events) for command in kinds(commands, events.PublishTokens)] == [3]


def test_a_sequence_joins_at_the_next_step_without_waiting_for_the_batch_to_end() -> None:
    state = make_state()
    start(state, "r1")
    handle(state, events.StepFinished((SampledToken(8),)))
    handle(state, events.TaskArrived(task_of("r2")))
    assert not kinds(handle(state, events.PullFinished(owner_of("r2"))), events.RunStep)
    [step] = kinds(handle(state, events.StepFinished((SampledToken(8),))), events.RunStep)
    assert [row.owner.request_id for row in step.rows] == ["r1", "r2"]


def test_without_a_free_block_the_latest_arrival_is_given_up_and_can_continue() -> None:
    state = make_state(total_blocks=5, block_size=2)
    start(state, "old", "young", prompt_tokens=2, max_tokens=6)
    preempted: list[events.PublishFailure] = []
    while not preempted:
        rows = len(state._steps[0])
        preempted = kinds(
            handle(state, events.StepFinished(tuple(SampledToken(8) for _ in range(rows)))),
            events.PublishFailure,
        )
    assert [(each.failure.request_id, each.failure.can_continue) for each in preempted] == [("young", True)]
    assert state.preempted == 1
    assert list(state.sequences) == [owner_of("old")]


def test_no_more_are_given_up_than_memory_asks_for() -> None:
    """Three sequences lack a block at once: the last one's end gives two and needs none itself."""
    state = make_state(total_blocks=8, block_size=2)
    for request_id, prompt_tokens in (("old", 2), ("middle", 3), ("young", 1)):
        handle(state, events.TaskArrived(task_of(request_id, prompt_tokens, max_tokens=10)))
    for request_id in ("old", "middle", "young"):
        handle(state, events.PullFinished(owner_of(request_id)))
    handle(state, events.StepFinished((SampledToken(8),)))
    for _ in range(3):
        assert len(state.sequences) == 3
        handle(state, events.StepFinished((SampledToken(8),) * 3))
    assert list(state.sequences) == [owner_of("old"), owner_of("middle")]


def test_an_earlier_attempt_that_comes_late_is_refused() -> None:
    state = make_state()
    handle(state, events.TaskArrived(task_of(attempt=1)))
    with pytest.raises(RequestCancelled):
        handle(state, events.TaskArrived(task_of()))
    assert list(state.sequences) == [owner_of(attempt=1)]


def test_an_attempt_whose_blocks_rest_in_quarantine_is_not_taken_again() -> None:
    state = make_state()
    handle(state, events.TaskArrived(task_of()))
    handle(state, events.PullFailed(owner_of(), FAILED, is_drained=False))
    with pytest.raises(RequestCancelled):
        handle(state, events.TaskArrived(task_of()))
    assert state.is_idle


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
        events.PublishFailure,
    )
    assert failure.failure.can_continue
    assert failure.failure.lost_instance == PREFILL
    assert state.is_idle


def test_a_cancelled_sequence_frees_its_blocks_after_the_step_in_flight() -> None:
    state = make_state()
    start(state, "r1")
    handle(state, events.CancelArrived(RequestId("r1"), 0))
    assert state.blocks.free_blocks == 6
    assert not kinds(handle(state, events.StepFinished((SampledToken(8),))), events.PublishTokens)
    assert state.is_idle
    assert state.blocks.free_blocks == 8


def test_draining_gives_back_what_waits_and_finishes_what_runs() -> None:
    state = make_state(max_batch=1)
    start(state, "r1")
    handle(state, events.TaskArrived(task_of("r2")))
    [given_back] = kinds(handle(state, events.DrainStarted()), events.PublishFailure)
    assert (given_back.failure.request_id, given_back.failure.can_continue) == ("r2", True)
    with pytest.raises(NoInstanceReady):
        handle(state, events.TaskArrived(task_of("r3")))
    [given_back] = kinds(handle(state, events.DrainExpired()), events.PublishFailure)
    assert given_back.failure.request_id == "r1"
    handle(state, events.StepFinished((SampledToken(8),)))
    assert state.is_idle


def test_bounds_are_kept_with_typed_errors() -> None:
    state = make_state(max_batch=1, max_waiting_requests=1)
    start(state, "r1")
    handle(state, events.TaskArrived(task_of("r2")))
    with pytest.raises(Overloaded, match=r"instance\.max_waiting_requests"):
        handle(state, events.TaskArrived(task_of("r3")))
    with pytest.raises(HandoverFailed, match="KV blocks"):
        handle(make_state(), events.TaskArrived(task_of("r4", 20, 20)))
    handle(state, events.CancelArrived(RequestId("r5"), 3))
    with pytest.raises(RequestCancelled):
        handle(state, events.TaskArrived(task_of("r5", attempt=3)))


def test_an_illegal_event_raises_and_changes_nothing() -> None:
    state = make_state()
    start(state, "r1")
    for event in (events.StepFinished(()), events.PullFinished(owner_of()), events.PullDrained(owner_of())):
        with pytest.raises(ValueError, match=r"step|pulled|quarantine"):
            handle(state, event)
        state.check()
    assert kinds(handle(state, events.StepFinished((SampledToken(8),))), events.RunStep)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from([1, 3, 16]),
    st.integers(1, 6),
    st.integers(0, 20),
    st.integers(1, 3),
)
def test_whatever_happens_nothing_is_lost_or_leaked(
    seed: int, block_size: int, max_batch: int, spare_blocks: int, lanes: int
) -> None:
    """A random walk over legal events in a pool that is often too small, then everything ends."""
    chance = random.Random(seed)
    state = make_state(40 // block_size + 1 + spare_blocks, block_size, max_batch, lanes=lanes)
    walk = Walk(state, chance)
    for _ in range(150):
        walk.act()
    walk.finish()
    assert state.is_idle
    assert state.blocks.free_blocks == state.blocks.total_blocks
    assert walk.ended == walk.arrived


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([1, 3, 16]), st.integers(0, 3))
def test_pools_come_and_go_and_every_sequence_ends(seed: int, block_size: int, max_moves: int) -> None:
    """Attention workers are bound, drained and lost at any time, and sequences move between them; at last one
    worker is there."""
    chance = random.Random(seed)
    state = make_state(0, block_size, 6, lanes=2, max_moves=max_moves)
    walk = PoolWalk(state, chance, 40 // block_size + 8)
    for _ in range(150):
        walk.act()
    if not state.blocks.open_pools:
        walk.add_pool()
    walk.finish()
    assert state.is_idle
    assert state.blocks.free_blocks == sum(
        walk.pool_blocks for pool in state.blocks.pools if pool in state.blocks.open_pools
    )
    assert state.blocks.used_blocks == state.blocks.quarantined_blocks == 0
    assert walk.ended == walk.arrived


def test_without_a_pool_nothing_is_taken_in_and_a_lost_one_gives_its_sequences_back() -> None:
    state = make_state(total_blocks=0)
    with pytest.raises(NoInstanceReady, match="no attention worker"):
        handle(state, events.TaskArrived(task_of("r0")))
    handle(state, events.PoolAdded(8))
    start(state, "r1", "r2")
    commands = handle(state, events.PoolLost(0))
    assert [command.failure.request_id for command in kinds(commands, events.PublishFailure)] == ["r2"]
    commands = handle(state, events.StepFinished((None,)))
    [failed] = kinds(commands, events.PublishFailure)
    assert (failed.failure.request_id, failed.failure.can_continue) == ("r1", True)
    assert state.is_idle
    assert state.blocks.pools == []


def test_a_closed_pool_keeps_its_sequences_and_gets_no_new_ones() -> None:
    state = make_state(total_blocks=8)
    start(state, "r1")
    handle(state, events.PoolAdded(6))
    handle(state, events.PoolClosed(0))
    handle(state, events.TaskArrived(task_of("r2")))
    assert state.blocks.pool_of(owner_of("r2")) == 1
    with pytest.raises(ValueError, match="pool 0 is in use"):
        handle(state, events.PoolLeft(0))
    while state.running:
        handle(state, events.StepFinished((SampledToken(8),)))
    handle(state, events.PoolLeft(0))
    assert state.blocks.pools == [1]


def test_batches_that_take_turns_are_alike_and_share_no_sequence() -> None:
    state = make_state(total_blocks=40, lanes=2)
    start(state, *(f"r{index}" for index in range(5)))
    assert {lane: len(rows) for lane, rows in state._steps.items()} == {0: 1, 1: 1}
    for lane in (0, 1):
        handle(state, events.StepFinished((SampledToken(8),), lane))
    assert sorted(len(rows) for rows in state._steps.values()) == [2, 3]


def test_a_resumed_sequence_runs_where_its_kv_is_kept_and_draws_its_next_token() -> None:
    state = make_state(total_blocks=6)
    handle(state, events.PoolAdded(8))
    [inherit] = kinds(handle(state, events.ResumeArrived(resumed_of(), 0)), events.InheritSequence)
    # Six tokens, the last without KV; the second block holds its position, too.
    assert inherit == events.InheritSequence(owner_of(attempt=1), FORMER, 5, (0, 1))
    [step] = kinds(handle(state, events.PullFinished(owner_of(attempt=1))), events.RunStep)
    assert [(row.position, row.output_ids) for row in step.rows] == [(5, [7, 8])]
    [published] = kinds(handle(state, events.StepFinished((SampledToken(9),))), events.PublishTokens)
    assert [(event.attempt, event.index) for event in published.events] == [(1, 2)]


def test_a_resumed_sequence_of_whole_blocks_inherits_none_for_its_next_position() -> None:
    state = make_state(block_size=5)
    task = resumed_of(prompt_tokens=4)
    [inherit] = kinds(handle(state, events.ResumeArrived(task, 0)), events.InheritSequence)
    assert (inherit.tokens, len(inherit.blocks), len(state.blocks.block_table(inherit.owner))) == (5, 1, 2)


def test_kv_that_is_not_kept_any_more_sends_the_sequence_back_and_frees_its_blocks() -> None:
    state = make_state()
    handle(state, events.ResumeArrived(resumed_of(), 0))
    commands = handle(state, events.PullFailed(owner_of(attempt=1), FAILED, is_drained=True))
    [failure] = kinds(commands, events.PublishFailure)
    assert (failure.failure.can_continue, failure.failure.lost_instance) == (True, None)
    assert state.is_idle
    assert state.blocks.free_blocks == 8


def test_a_resumed_sequence_waits_for_its_own_pool_and_goes_back_when_that_closes() -> None:
    state = make_state(total_blocks=4)
    handle(state, events.PoolAdded(8))
    handle(state, events.PoolClosed(1))
    start(state, "r0", prompt_tokens=8)
    handle(state, events.PoolAdded(8))
    assert not kinds(handle(state, events.ResumeArrived(resumed_of(), 0)), events.InheritSequence)
    [failure] = kinds(handle(state, events.PoolClosed(0)), events.PublishFailure)
    assert (failure.failure.request_id, failure.failure.can_continue) == ("r1", True)
    for pool, reason in ((0, "has 0 for it"), (1, "has 0 for it")):
        with pytest.raises(HandoverFailed, match=reason):
            handle(state, events.ResumeArrived(resumed_of("r2"), pool))
    with pytest.raises(HandoverFailed, match="may need 9 KV blocks; instance decode-0 has 8"):
        handle(state, events.ResumeArrived(resumed_of("r2", max_tokens=30), 2))
    assert list(state.sequences) == [owner_of("r0")]


def test_new_sequences_go_where_most_is_free() -> None:
    state = make_state(total_blocks=8)
    handle(state, events.PoolAdded(8))
    homes = []
    for index, prompt_tokens in enumerate((20, 4, 4, 4)):
        commands = handle(state, events.TaskArrived(task_of(f"r{index}", prompt_tokens)))
        homes.append(state.blocks.pool_of(kinds(commands, events.PullSequence)[0].owner))
    assert homes == [0, 1, 1, 1]


def early_of(request_id: str = "r1", prompt_tokens: int = 4, max_tokens: int = 8) -> DecodeTask:
    """Offered before its first token was drawn."""
    request = make_request(request_id, prompt_tokens, max_tokens)
    return DecodeTask(request, PREFILL, LIFE, prompt_tokens)


def test_an_early_offer_gets_room_for_its_first_token_which_comes_with_the_kv() -> None:
    state = make_state()
    [pull] = kinds(handle(state, events.TaskArrived(early_of())), events.PullSequence)
    assert (len(pull.blocks), pull.portion, pull.max_bytes) == (2, 0, None)
    [pull] = kinds(handle(state, events.PortionPulled(owner_of(), 100, 0.1)), events.PullSequence)
    assert pull.portion == 1
    with pytest.raises(ValueError, match="without the first token"):
        handle(state, events.PullFinished(owner_of()))
    [step] = kinds(handle(state, events.PullFinished(owner_of(), 7)), events.RunStep)
    assert [(row.position, row.output_ids) for row in step.rows] == [(4, [7])]


def test_while_steps_run_a_portion_a_step_is_pulled_as_large_as_its_share_allows() -> None:
    budget = PullBudget(share=0.2, least_bytes=10)
    state = make_state(total_blocks=40, pulls=Pulls(budget))
    start(state, "r1", max_tokens=50)
    handle(state, events.TaskArrived(task_of("r2")))
    handle(state, events.TaskArrived(early_of("r3")))
    [pull] = kinds(handle(state, events.StepFinished((SampledToken(8),)), now=1.0), events.PullSequence)
    assert (pull.owner, pull.portion, pull.max_bytes) == (owner_of("r2"), 0, 10)
    assert not kinds(handle(state, events.PortionPulled(owner_of("r2"), 1000, 0.1)), events.PullSequence)
    [pull] = kinds(handle(state, events.StepFinished((SampledToken(8),)), now=2.0), events.PullSequence)
    assert (pull.owner, pull.portion, pull.max_bytes) == (owner_of("r2"), 1, 2000)
    [pull] = kinds(handle(state, events.StepFinished((SampledToken(8),)), now=3.0), events.PullSequence)
    assert pull.owner == owner_of("r3"), "a portion that does not come keeps nobody waiting"
    handle(state, events.PortionPulled(owner_of("r2"), 1, 0.1))
    commands = handle(state, events.CancelArrived(RequestId("r1"), 0))
    assert commands == [], "the step in flight still computes"
    [pull] = kinds(handle(state, events.StepFinished((SampledToken(8),)), now=4.0), events.PullSequence)
    assert (pull.owner, pull.max_bytes) == (owner_of("r2"), None)


def test_batches_that_take_turns_share_what_is_pulled_beside_them() -> None:
    state = make_state(total_blocks=40, lanes=2, pulls=Pulls(PullBudget(share=0.2, least_bytes=10)))
    start(state, "r1", "r2", max_tokens=50)
    handle(state, events.TaskArrived(task_of("r3")))
    handle(state, events.StepFinished((SampledToken(8),), 0), now=1.0)
    handle(state, events.PortionPulled(owner_of("r3"), 1000, 0.1))
    [pull] = kinds(handle(state, events.StepFinished((SampledToken(8),), 1), now=1.0), events.PullSequence)
    assert (pull.portion, pull.max_bytes) == (1, 1000), "two steps of a second allow 2000 together"


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
    failures = kinds(handle(state, events.PrefillGone(PREFILL, LIFE)), events.PublishFailure)
    assert {each.failure.request_id for each in failures} == {resting.request_id, RequestId("waits")}
    assert all(each.failure.can_continue for each in failures)
    assert {each.failure.lost_instance for each in failures} == {PREFILL}
    [in_the_air] = state.pulls.owners
    commands = handle(state, events.PortionPulled(in_the_air, 10, 0.1))
    [failure] = kinds(commands, events.PublishFailure)
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


class Walk:
    """Plays everybody around the state. ``ended`` are requests whose fate somebody was told or decided."""

    def __init__(self, state: DecodeState, chance: random.Random) -> None:
        self.state = state
        self.chance = chance
        self.steps: dict[int, tuple[events.StepRow, ...]] = {}
        self.pulls: list[BlockOwner] = []
        self.moves: list[BlockOwner] = []
        self.drains: list[events.PullDrained | events.MoveDrained] = []
        self.portions: dict[BlockOwner, int] = {}
        self.sourceless: set[BlockOwner] = set()
        self.arrived: set[RequestId] = set()
        self.ended: set[RequestId] = set()

    def do(self, event: events.DecodeEvent) -> None:
        for command in handle(self.state, event):
            match command:
                case events.RunStep(rows, lane):
                    assert lane not in self.steps, "two steps at once"
                    assert 0 < len(rows) <= self.state.max_batch
                    self.steps[lane] = rows
                case events.PullSequence(owner, _, _, _, portion):
                    assert owner not in self.pulls, "two portions of one sequence at once"
                    assert portion == self.portions.get(owner, 0)
                    assert owner not in self.sourceless, "a life that is gone is asked"
                    self.pulls.append(owner)
                case events.InheritSequence(owner):
                    self.pulls.append(owner)
                case events.MoveSequence(owner):
                    self.moves.append(owner)
                case events.PublishTokens(_, tokens):
                    self.ended |= {event_.request_id for event_ in tokens if event_.finish_reason}
                case events.PublishFailure(_, failure):
                    self.ended.add(failure.request_id)

    def act(self) -> None:
        choice = self.chance.random()
        if choice < 0.25:
            request_id = RequestId(f"r{len(self.arrived)}")
            make_task = self.chance.choice([task_of, early_of])
            task = make_task(request_id, self.chance.randint(1, 25), self.chance.randint(2, 12))
            self.arrived.add(request_id)
            self.do(events.TaskArrived(task))
        elif choice < 0.65 and self.steps:
            self.end_step()
        elif choice < 0.85 and self.pulls:
            self.end_pull()
        elif choice < 0.9 and self.drains:
            self.do(self.drains.pop())
        elif choice < 0.97 and self.arrived:
            request_id = self.chance.choice(sorted(self.arrived))
            self.ended.add(request_id)
            self.do(events.CancelArrived(request_id, 0))
        elif choice < 0.975:
            self.ended |= self.arrived
            self.do(events.GatewayGone(GATEWAY))
        elif choice < 0.99:
            self.withdraw()
        else:
            self.lose_prefill()

    def lose_prefill(self) -> None:
        """Its next life may offer sequences under the same number: here every life has the same."""
        here = {owner for owner, each in self.state.sequences.items() if isinstance(each.task, DecodeTask)}
        self.sourceless |= here
        self.do(events.PrefillGone(PREFILL, LIFE))
        for owner in here & self.state.sequences.keys():
            sequence = self.state.sequences[owner]
            is_in_the_air = sequence.phase is DecodePhase.PULLING and not self.state.pulls.rests(owner)
            assert is_in_the_air or sequence.phase in (DecodePhase.RUNNING, DecodePhase.MOVING)

    def withdraw(self) -> None:
        """The prefill instance ends what it still holds: it tells the gateway, and us."""
        here = [each for each in self.state.sequences.values() if each.phase is not DecodePhase.RUNNING]
        if here and isinstance((sequence := self.chance.choice(here)).task, DecodeTask):
            self.ended.add(sequence.owner.request_id)
            self.do(events.OfferWithdrawn(sequence.owner, PREFILL, LIFE))

    def end_step(self) -> None:
        lane = self.chance.choice(sorted(self.steps))
        rows = self.steps.pop(lane)
        if self.chance.random() < 0.03:
            self.do(events.StepFailed(ErrorReply("internal_error", "broken"), lane=lane))
        else:
            self.do(events.StepFinished(tuple(self.token_of(row) for row in rows), lane))

    def token_of(self, row: events.StepRow) -> SampledToken | None:
        return SampledToken(self.chance.choice([EOS, 7, 8, 9]))

    def end_pull(self) -> None:
        owner = self.pulls.pop(self.chance.randrange(len(self.pulls)))
        choice, is_pulled = self.chance.random(), isinstance(self.state.sequences[owner].task, DecodeTask)
        if choice < 0.3 and is_pulled:
            self.portions[owner] = self.portions.get(owner, 0) + 1
            self.do(events.PortionPulled(owner, 1, 0.1))
            return
        if choice < 0.8:
            self.do(events.PullFinished(owner, 7 if is_pulled else None))
            return
        if choice < 0.85 and is_pulled:
            self.ended.add(owner.request_id)
            self.do(events.SequenceEnded(owner))
            return
        is_drained = self.chance.random() < 0.5
        self.ended.add(owner.request_id)
        if not is_drained:
            self.drains.append(events.PullDrained(owner))
        self.do(events.PullFailed(owner, FAILED, is_drained))

    def end_move(self) -> None:
        owner = self.moves.pop(self.chance.randrange(len(self.moves)))
        if self.chance.random() < 0.8:
            self.do(events.MoveFinished(owner))
        else:
            self.drains.append(events.MoveDrained(owner))
            self.do(events.MoveFailed(owner))

    def finish(self) -> None:
        """Whatever is under way ends; a state that waits for nothing is a deadlock."""
        while not self.state.is_idle or self.drains:
            is_under_way = self.steps or self.pulls or self.moves or self.drains
            assert is_under_way, "sequences wait, and nothing is under way"
            if self.steps:
                self.end_step()
            elif self.pulls:
                self.end_pull()
            elif self.moves:
                self.end_move()
            else:
                self.do(self.drains.pop())


class PoolWalk(Walk):
    """Pools of ``pool_blocks`` come, are closed, left and lost as well."""

    def __init__(self, state: DecodeState, chance: random.Random, pool_blocks: int) -> None:
        super().__init__(state, chance)
        self.pool_blocks = pool_blocks
        self.lost: set[int] = set()
        self.add_pool()

    def do(self, event: events.DecodeEvent) -> None:
        has_room = bool(self.state.blocks.open_pools)
        if isinstance(event, events.TaskArrived | events.ResumeArrived) and not has_room:
            self.arrived.discard(event.task.request.request_id)
            with pytest.raises(NoInstanceReady):
                handle(self.state, event)
        else:
            super().do(event)

    def add_pool(self) -> None:
        self.do(events.PoolAdded(self.pool_blocks))

    def act(self) -> None:
        choice = self.chance.random()
        blocks = self.state.blocks
        live = [pool for pool in blocks.pools if pool not in self.lost]
        if choice < 0.03:
            self.add_pool()
        elif choice < 0.05 and live:
            pool = self.chance.choice(live)
            self.lost.add(pool)
            self.do(events.PoolLost(pool))
        elif choice < 0.07 and live:
            self.do(events.PoolClosed(self.chance.choice(live)))
        elif choice < 0.2 and live:
            pool = self.chance.choice(live)
            request_id = RequestId(f"r{len(self.arrived)}")
            task = resumed_of(request_id, self.chance.randint(1, 25), self.chance.randint(3, 12), attempt=0)
            if pool in blocks.open_pools or not blocks.open_pools:
                self.arrived.add(request_id)
                self.do(events.ResumeArrived(task, pool))
            else:
                with pytest.raises(HandoverFailed, match="has 0 for it"):
                    handle(self.state, events.ResumeArrived(task, pool))
        elif choice < 0.23:
            for pool in live:
                if pool not in blocks.open_pools and blocks.is_unused(pool):
                    self.do(events.PoolLeft(pool))
        elif choice < 0.35 and self.moves:
            self.end_move()
        else:
            super().act()

    def token_of(self, row: events.StepRow) -> SampledToken | None:
        return None if self.state.blocks.is_lost(row.owner) else super().token_of(row)
