"""Random walks over the decode room's legal events: whatever happens, nothing is lost or leaked."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import HandoverFailed, NoInstanceReady, RequestError
from common.ids import InstanceId, RequestId
from common.kv.blocks import BlockOwner, blocks_for
from common.lengths import certain
from common.lifecycle import DecodePhase
from common.messages import DecodeTask, ErrorReply, SampledToken
from common.sequences import PublishFailure
from decode import events
from decode.batches import Batches
from decode.outlook import Outlook
from decode.sequence import ROOM
from decode.state import DecodeState
from scheduler.policy.decode_admission import ADMISSIONS
from tests.decode.states import (
    EOS,
    FAILED,
    LIFE,
    PREFILL,
    early_of,
    handle,
    make_state,
    resumed_of,
    task_of,
)
from tests.decode.test_departures import HOME
from tests.requests import GATEWAY

WALKS = (
    st.integers(0, 1 << 32),
    st.sampled_from([1, 3, 16]),
    st.integers(1, 6),
    st.integers(0, 20),
    st.integers(1, 3),
)
"""A seed, tokens of a block, sequences of a batch, blocks beyond what the longest one needs, and lanes."""


@settings(max_examples=200, deadline=None)
@given(*WALKS)
def test_whatever_happens_nothing_is_lost_or_leaked(
    seed: int, block_size: int, max_batch: int, spare_blocks: int, lanes: int
) -> None:
    """A random walk over legal events in a pool that is often too small, then everything ends."""
    chance = random.Random(seed)
    admission = chance.choice(sorted(ADMISSIONS))
    blocks = 40 // block_size + 1 + spare_blocks
    host_blocks = chance.choice([0, 1, 2 * blocks])
    state = make_state(
        blocks, block_size, max_batch, lanes=lanes, admission=admission, host_blocks=host_blocks
    )
    walk = Walk(state, chance, flips=True)
    for _ in range(150):
        walk.act()
    walk.finish()
    assert state.is_idle
    assert state.blocks.free_blocks == state.blocks.total_blocks
    assert state.swapping.host.free_blocks == host_blocks
    assert walk.ended == walk.arrived


@settings(max_examples=150, deadline=None)
@given(*WALKS)
def test_rows_that_are_kept_are_those_that_would_be_found_anew(
    seed: int, block_size: int, max_batch: int, spare_blocks: int, lanes: int
) -> None:
    """The same walk over two states, of which one keeps nothing: the same commands, block by block."""
    blocks = 40 // block_size + 1 + spare_blocks
    told = []
    for batches in (Batches(lanes), KeepingNothing(lanes)):
        chance = random.Random(seed)
        admission = chance.choice(sorted(ADMISSIONS))
        state = make_state(blocks, block_size, max_batch, lanes=lanes, admission=admission)
        state.batches = batches
        object.__setattr__(state.held, "batches", batches)  # frozen, and made by the state itself
        walk = Walk(state, chance, flips=chance.random() < 0.3)
        for _ in range(400):
            walk.act()
        walk.finish()
        told.append(walk.told)
    assert told[0] == told[1]


class KeepingNothing(Batches):
    """Every step's rows are found anew."""

    def keep(self, lane: int, outlook: Outlook, steps: int, gone: list[int]) -> None:
        self.let_go(outlook)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([1, 3, 16]), st.integers(0, 3))
def test_pools_come_and_go_and_every_sequence_ends(seed: int, block_size: int, max_moves: int) -> None:
    """Attention workers, with pools of any size, are bound, drained and lost at any time, and sequences move
    between them; at last one worker is there."""
    chance = random.Random(seed)
    admission = chance.choice(sorted(ADMISSIONS))
    state = make_state(0, block_size, 6, lanes=2, max_moves=max_moves, admission=admission)
    walk = PoolWalk(state, chance, 40 // block_size + 8)
    for _ in range(150):
        walk.act()
    if not state.blocks.open_pools:
        walk.add_pool(walk.most_blocks)
    walk.finish()
    assert state.is_idle
    assert state.blocks.free_blocks == sum(map(state.blocks.total_blocks_in, state.blocks.open_pools))
    assert state.blocks.used_blocks == state.blocks.quarantined_blocks == 0
    assert walk.ended == walk.arrived


class Walk:
    """Plays everybody around the state. ``ended`` are requests whose fate somebody was told or decided.
    ``flips``: the instance's role changes now and then."""

    def __init__(self, state: DecodeState, chance: random.Random, *, flips: bool = False) -> None:
        self.state = state
        self.flips = flips
        self.chance = chance
        self.steps: dict[int, tuple[events.StepRow, ...]] = {}
        self.pulls: list[BlockOwner] = []
        self.moves: list[BlockOwner] = []
        self.swaps: list[BlockOwner] = []
        self.drains: list[events.PullDrained | events.MoveDrained] = []
        self.portions: dict[BlockOwner, int] = {}
        self.sourceless: set[BlockOwner] = set()
        self.searches: list[BlockOwner] = []
        self.handed_on: list[BlockOwner] = []
        self.arrived: set[RequestId] = set()
        self.ended: set[RequestId] = set()
        self.told: list[str] = []
        """All commands, as they read when they came: rows grow."""

    def do(self, event: events.DecodeEvent) -> None:
        for command in handle(self.state, event):
            self.told.append(repr(command))
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
                case events.SwapOut(owner) | events.SwapIn(owner):
                    computed = {row.owner for step in self.steps.values() for row in step}
                    assert owner not in computed, "a sequence is copied amid a step"
                    assert owner not in self.swaps, "two copies of one sequence at once"
                    self.swaps.append(owner)
                case events.DeclineOffer(owner):
                    self.ended.add(owner.request_id)
                case events.SeekHome(owner):
                    self.searches.append(owner)
                case events.HandOn(owner, held_by, request):
                    computed = {row.owner for step in self.steps.values() for row in step}
                    assert owner not in computed, "a sequence left amid a step"
                    held = len(self.state.blocks.block_table(held_by)) * self.state.block_size
                    assert held >= request.tokens - 1, "KV was left behind"
                    self.handed_on.append(held_by)
                    self.ended.add(owner.request_id)
                case events.PublishTokens(_, tokens):
                    self.ended |= {event_.request_id for event_ in tokens if event_.finish_reason}
                case PublishFailure(_, failure):
                    self.ended.add(failure.request_id)

    def act(self) -> None:
        choice = self.chance.random()
        if self.flips and choice < 0.02:
            self.do(events.RoleChanged(is_decode=self.chance.random() < 0.5))
        elif choice < 0.1 and self.searches:
            self.end_search()
        elif choice < 0.12 and self.handed_on:
            self.let_go()
        elif self.flips and choice < 0.14 and self.arrived:
            owner = BlockOwner(ROOM, RequestId(self.chance.choice(sorted(self.arrived))), 0)
            self.do(events.LeaveAsked(owner, InstanceId("decode-1")))
        elif choice < 0.16 and self.swaps:
            self.end_swap()
        elif choice < 0.18 and self.flips:
            self.stay()
        elif choice < 0.25:
            request_id = RequestId(f"r{len(self.arrived)}")
            make_task = self.chance.choice([task_of, early_of])
            task = make_task(request_id, self.chance.randint(1, 25), self.chance.randint(2, 12))
            self.arrived.add(request_id)
            lengths = self.chance.choice([None, certain(self.chance.randint(1, 12))])
            self.do(events.TaskArrived(msgspec.structs.replace(task, lengths=lengths)))
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
            has_its_kv = sequence.phase not in (DecodePhase.WAITING, DecodePhase.PULLING)
            assert is_in_the_air or has_its_kv

    def stay(self) -> None:
        """A prompt was computed here, in as many blocks as its tokens need, where these are free."""
        request_id = RequestId(f"r{len(self.arrived)}")
        task = task_of(request_id, self.chance.randint(1, 25), self.chance.randint(2, 12))
        held_by = BlockOwner("kept", request_id, 0)
        needed = blocks_for(task.kv_tokens, self.state.block_size)
        if self.state.blocks.try_allocate(held_by, needed):
            self.arrived.add(request_id)
            self.do(events.SequenceStayed(held_by, task))

    def let_go(self) -> None:
        """The prefill room has handed a sequence over."""
        self.state.blocks.release(self.handed_on.pop())
        self.do(events.BlocksFreed())

    def end_search(self) -> None:
        owner = self.searches.pop(self.chance.randrange(len(self.searches)))
        if self.state.departures.is_sought(owner) or self.chance.random() < 0.5:
            self.do(events.HomeFound(owner, HOME))
        else:
            self.do(events.SearchEnded(owner))

    def withdraw(self) -> None:
        """The prefill instance ends what it still holds: it tells the gateway, and us."""
        here = list(self.state.sequences.values())
        if here and isinstance((sequence := self.chance.choice(here)).task, DecodeTask):
            if sequence.phase in (DecodePhase.WAITING, DecodePhase.PULLING):
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

    def end_swap(self) -> None:
        owner = self.swaps.pop(self.chance.randrange(len(self.swaps)))
        if self.chance.random() < 0.9:
            self.do(events.SwapFinished(owner, 1, 0.1))
        else:
            self.ended.add(owner.request_id)
            self.do(events.SwapFailed(owner))

    def end_move(self) -> None:
        owner = self.moves.pop(self.chance.randrange(len(self.moves)))
        if self.chance.random() < 0.8:
            self.do(events.MoveFinished(owner))
        else:
            self.drains.append(events.MoveDrained(owner))
            self.do(events.MoveFailed(owner))

    def finish(self) -> None:
        """Whatever is under way ends; a state that waits for nothing is a deadlock."""
        while not self.state.is_idle or self.drains or self.handed_on:
            is_under_way = (
                self.steps or self.pulls or self.moves or self.swaps or self.drains or self.handed_on
            )
            assert is_under_way, "sequences wait, and nothing is under way"
            if self.handed_on:
                self.let_go()
            elif self.steps:
                self.end_step()
            elif self.pulls:
                self.end_pull()
            elif self.moves:
                self.end_move()
            elif self.swaps:
                self.end_swap()
            else:
                self.do(self.drains.pop())


class PoolWalk(Walk):
    """Pools of at most ``most_blocks`` come, are closed, left and lost as well. Some hold only short
    sequences."""

    def __init__(self, state: DecodeState, chance: random.Random, most_blocks: int) -> None:
        super().__init__(state, chance)
        self.most_blocks = most_blocks
        self.lost: set[int] = set()
        self.add_pool(most_blocks)

    def do(self, event: events.DecodeEvent) -> None:
        refusal = self.refusal_of(event)
        if refusal is None:
            super().do(event)
            return
        assert isinstance(event, events.TaskArrived | events.ResumeArrived)
        self.arrived.discard(event.task.request.request_id)
        with pytest.raises(refusal):
            handle(self.state, event)

    def refusal_of(self, event: events.DecodeEvent) -> type[RequestError] | None:
        """Why nobody is taken in now."""
        blocks = self.state.blocks
        if not isinstance(event, events.TaskArrived | events.ResumeArrived):
            return None
        if not blocks.open_pools:
            return NoInstanceReady
        room = blocks.largest_pool_blocks
        if isinstance(event, events.ResumeArrived):
            room = blocks.total_blocks_in(event.pool) if event.pool in blocks.open_pools else 0
        needed = blocks_for(event.task.request.max_total_tokens, self.state.block_size)
        return HandoverFailed if needed > room else None

    def add_pool(self, total_blocks: int) -> None:
        self.do(events.PoolAdded(total_blocks))

    def act(self) -> None:
        choice = self.chance.random()
        blocks = self.state.blocks
        live = [pool for pool in blocks.pools if pool not in self.lost]
        if choice < 0.03:
            self.add_pool(self.chance.randint(1, self.most_blocks))
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
            self.arrived.add(request_id)
            self.do(events.ResumeArrived(task, pool))
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
