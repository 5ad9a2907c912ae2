"""Prompts that are to be decoded here, as a mixed instance's policy has them: events and commands."""

import pytest

from common.config import MixedPolicy
from common.ids import InstanceId
from common.kv.blocks import BlockOwner
from common.lengths import certain
from common.messages import PrefillTask, SampledToken
from prefill import events
from prefill.state import PrefillState
from tests.prefill.states import DECODE, EOS, LIFE, TOKEN, handle, make_state, owner_of
from tests.requests import make_request

HERE = InstanceId("prefill-0")
AWAY = BlockOwner("decode", owner_of("away").request_id, 0)


def mixed_state(
    policy: MixedPolicy, total_blocks: int = 100, chunk_tokens: int = 8, max_batch: int = 8
) -> PrefillState:
    """Blocks of 4 tokens, windows of 4 prompts."""
    state = make_state(total_blocks=total_blocks, chunk_tokens=chunk_tokens)
    state.mates.policy, state.mates.max_batch, state.mates.is_mixed = policy, max_batch, True
    return state


def arrive(
    state: PrefillState, name: str, prompt_tokens: int, max_tokens: int = 8, where: InstanceId = HERE
) -> list[events.PrefillCommand]:
    task = PrefillTask(make_request(name, prompt_tokens, max_tokens), where, LIFE)
    return handle(state, events.TaskArrived(task))


def pieces(commands: list[events.PrefillCommand]) -> list[tuple[str, int]]:
    """(name, tokens) of the next pass; none where nobody's turn has come."""
    return [
        (piece.owner.request_id, piece.tokens)
        for command in commands
        if isinstance(command, events.RunChunk)
        for piece in command.slices
    ]


def end_pass(state: PrefillState, ending: int = 0) -> list[tuple[str, int]]:
    """Of whole prompts, the first ``ending`` of which end with their first tokens. What stays is gone from
    here and, as the decode room is told of it, in the batch."""
    count = len(state.chunks.slices)
    tokens = [SampledToken(EOS)] * ending + [TOKEN] * (count - ending)
    commands = handle(state, events.ChunkFinished(tuple(tokens)))
    for command in commands:
        if isinstance(command, events.KeepHere):
            state.blocks.rename(command.held_by, BlockOwner("decode", command.held_by.request_id, 0))
            state.mates.decoding += 1
            state.mates.taken_slots += 1
    return pieces(commands)


def end_decode(state: PrefillState, *names: str) -> list[tuple[str, int]]:
    for name in names:
        state.blocks.release(BlockOwner("decode", owner_of(name).request_id, 0))
        state.mates.decoding -= 1
        state.mates.taken_slots -= 1
    return pieces(handle(state, events.BlocksFreed()))


def test_orca_takes_whole_prompts_in_order_as_far_as_a_pass_holds_them_beside_decodes() -> None:
    state = mixed_state("orca", chunk_tokens=12)
    assert pieces(arrive(state, "first", 6)) == [("first", 6)]
    for name, tokens in (("a", 5), ("b", 6), ("c", 2)):
        arrive(state, name, tokens)
    # One token of the pass is that of the first one, which is decoded by then; nobody overtakes.
    assert end_pass(state) == [("a", 5), ("b", 6)]
    assert end_pass(state) == [("c", 2)]


def test_orca_computes_a_prompt_that_is_longer_than_a_pass_at_once_and_alone() -> None:
    state = mixed_state("orca")
    arrive(state, "first", 6)
    arrive(state, "long", 30)
    arrive(state, "short", 1)
    assert end_pass(state) == [("long", 30)]
    assert end_pass(state) == [("short", 1)]


def test_orca_takes_no_more_prompts_than_the_batch_has_slots() -> None:
    state = mixed_state("orca", chunk_tokens=100, max_batch=3)
    arrive(state, "first", 2)
    for name in "abc":
        arrive(state, name, 2)
    assert end_pass(state) == [("a", 2), ("b", 2)]
    assert state.mates.wants_slot
    assert end_pass(state) == []
    assert end_decode(state, "first") == [("c", 2)]
    assert not state.mates.wants_slot


def test_orca_needs_no_slot_for_a_prompt_that_is_decoded_elsewhere() -> None:
    state = mixed_state("orca", max_batch=1)
    arrive(state, "first", 2)
    arrive(state, "other", 2, where=DECODE)
    assert end_pass(state) == [("other", 2)]


@pytest.mark.parametrize("now", [0.5, 2.0])
def test_orca_leaves_the_last_slot_to_who_has_waited_for_one_long_enough(now: float) -> None:
    state = mixed_state("orca", max_batch=2)
    state.mates.taken_slots, state.mates.max_wait_s = 1, 1.0
    state.mates.note_away(AWAY, 1, 0.0)
    task = PrefillTask(make_request("r1", 2, 8), HERE, LIFE)
    is_owed = now >= 1.0
    assert pieces(handle(state, events.TaskArrived(task), now)) == ([] if is_owed else [("r1", 2)])
    assert state.mates.wants_slot == is_owed
    assert state.mates.reserved_slots(now) == 0, "whom it is owed may take it"
    state.mates.note_away(None, 0, now)
    assert not is_owed or pieces(handle(state, events.BlocksFreed(), now)) == [("r1", 2)]


def test_where_an_instance_is_not_mixed_its_prompts_come_in_chunks() -> None:
    for policy in ("orca", "static"):
        state = mixed_state(policy)
        state.mates.is_mixed = False
        assert pieces(arrive(state, "long", 30)) == [("long", 8)]


def test_a_static_batch_is_taken_at_once_computed_whole_and_joined_by_nobody_until_it_has_ended() -> None:
    state = mixed_state("static", chunk_tokens=10, max_batch=6)
    assert pieces(arrive(state, "first", 8)) == [("first", 8)]
    for number in range(8):
        arrive(state, f"r{number}", 4)
    assert end_pass(state) == [], "who came while the first was computed waits for its end"
    # Six slots, and more than one window of four; each pass takes as many whole prompts as it holds.
    assert end_decode(state, "first") == [("r0", 4), ("r1", 4)]
    arrive(state, "later", 1)
    assert end_pass(state) == [("r2", 4), ("r3", 4)]
    assert end_pass(state) == [("r4", 4), ("r5", 4)]
    assert end_pass(state) == []
    assert end_decode(state, "r0", "r1", "r2", "r3", "r4") == []
    assert end_decode(state, "r5") == [("r6", 4), ("r7", 4), ("later", 1)]


def test_a_static_batch_has_memory_for_all_that_it_may_draw() -> None:
    """Of 18 blocks of 4 tokens two sequences of up to 8 + 24 come to need 16: a third waits for their end."""
    state = mixed_state("static", total_blocks=18, chunk_tokens=100)
    arrive(state, "first", 1)
    for name in "abc":
        arrive(state, name, 8, max_tokens=24)
    assert end_pass(state, ending=1) == [("a", 8), ("b", 8)]
    assert state.mates.wanted_blocks == 0, "nobody gives way"
    end_pass(state)
    assert end_decode(state, "a") == []
    assert end_decode(state, "b") == [("c", 8)]


def test_who_could_never_have_all_that_it_may_draw_is_a_static_batch_of_its_own() -> None:
    state = mixed_state("static", total_blocks=10, chunk_tokens=100)
    arrive(state, "first", 1)
    arrive(state, "greedy", 8, max_tokens=400)
    arrive(state, "next", 4, max_tokens=4)
    assert end_pass(state, ending=1) == [("greedy", 8)]


def test_static_batches_are_taken_by_turns_from_prompts_and_from_those_that_come_from_elsewhere() -> None:
    state = mixed_state("static")
    arrive(state, "first", 4)
    arrive(state, "second", 4)
    end_pass(state)
    state.mates.note_away(AWAY, 1, 0.0)
    assert state.mates.is_decodes_turn
    assert end_decode(state, "first") == [], "prompts were the last batch"
    state.mates.is_decodes_turn = False
    state.mates.taken_slots = 1
    assert pieces(handle(state, events.TimePassed())) == [], "theirs is decoded now"
    state.mates.taken_slots = 0
    assert pieces(handle(state, events.BlocksFreed())) == [("second", 4)]


def test_a_prompt_that_stays_is_admitted_by_what_all_will_need() -> None:
    """19 blocks of 4 tokens. One that is decoded holds 2 and will hold 10 at its end, when the newcomer does,
    too; at its own that holds 16."""
    state = mixed_state("chunked", total_blocks=19, chunk_tokens=100)
    state.mates.admission = "reserve_peak"
    state.blocks.try_allocate(AWAY, 2)
    state.mates.decoded = lambda: [(8, 32)]
    task = PrefillTask(make_request("long", 8, 56), HERE, LIFE, certain(56))
    assert pieces(handle(state, events.TaskArrived(task))) == [], "together they need 20 blocks"
    assert (state.mates.wanted_blocks, state.mates.entry_blocks) == (0, 18)
    state.mates.decoded = lambda: [(8, 28)]
    assert pieces(handle(state, events.BlocksFreed())) == [("long", 8)]
    assert state.mates.entry_blocks == 0


def test_while_the_other_room_s_pass_runs_prompts_are_due_and_those_that_come_share_a_chunk() -> None:
    state = mixed_state("chunked", chunk_tokens=12)
    mates = state.mates
    mates.decoding = 2
    mates.take_engine("decode")
    assert pieces(arrive(state, "a", 3)) == pieces(arrive(state, "b", 4)) == []
    assert mates.is_chunk_due
    assert pieces(handle(state, events.PassDue())) == [("a", 3), ("b", 4)]
    assert not mates.is_chunk_due
    # With a chunk in flight nothing is due, and after it only with decodes beside it.
    mates.take_engine("prefill", "decode")
    assert pieces(arrive(state, "c", 5)) == []
    assert not mates.is_chunk_due
    assert end_pass(state) == []
    assert mates.is_chunk_due
    mates.leave_engine()
    assert pieces(handle(state, events.BlocksFreed())) == [("c", 5)], "the engine is free"


def test_prompts_alone_wait_for_nobody_s_word() -> None:
    state = mixed_state("chunked", chunk_tokens=12)
    state.mates.take_engine("prefill")
    assert pieces(arrive(state, "a", 3)) == [("a", 3)]
    arrive(state, "b", 4, where=DECODE)
    assert end_pass(state, ending=1) == [("b", 4)]


def test_what_was_due_and_is_cancelled_is_due_no_more() -> None:
    state = mixed_state("chunked")
    state.mates.decoding = 1
    state.mates.take_engine("decode")
    arrive(state, "a", 3)
    handle(state, events.CancelArrived(owner_of("a").request_id, 0))
    assert not state.mates.is_chunk_due
    assert handle(state, events.PassDue()) == []


@pytest.mark.parametrize(("policy", "drawn"), [("prefill_first", 1), ("chunked", 0), ("orca", 0)])
def test_decodes_next_step_finds_a_prompt_with_its_first_token_where_they_wait_for_it(
    policy: MixedPolicy, drawn: int
) -> None:
    state = mixed_state(policy)
    arrive(state, "a", 6, max_tokens=5)
    [(tokens, coming)] = state.mates.begun()
    assert (tokens, coming) == (6 + drawn, 5 - drawn)


def test_a_lone_prompt_of_one_token_that_fills_the_memory_is_taken_in() -> None:
    state = mixed_state("prefill_first", total_blocks=2)
    state.mates.admission = "reserve_peak"
    assert pieces(arrive(state, "a", 8, max_tokens=1)) == [("a", 8)]
