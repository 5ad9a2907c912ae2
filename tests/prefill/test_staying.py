"""Prompts of sequences that are to be decoded here: their blocks change rooms, and nothing is sent."""

from common.errors import Overloaded
from common.ids import Incarnation, InstanceId, RequestId
from common.kv.blocks import BlockOwner
from common.messages import ErrorReply, Placement, PrefillTask, SampledToken
from prefill import events
from prefill.sequence import KEPT_ROOM
from prefill.state import PrefillState
from tests.prefill.states import EOS, LIFE, TOKEN, handle, make_state, offered, only, owner_of
from tests.requests import make_request

HERE = InstanceId("prefill-0")


def arrive_to_stay(state: PrefillState, prompt_tokens: int = 6) -> list[events.PrefillCommand]:
    request = make_request("r1", prompt_tokens)
    return handle(state, events.TaskArrived(PrefillTask(request, HERE, LIFE)))


def test_a_computed_prompt_gives_its_blocks_and_its_first_token_to_the_other_room() -> None:
    state = make_state()
    arrive_to_stay(state)
    held = list(state.blocks.block_table(owner_of("r1")))
    assert state.staying == 1
    commands = handle(state, events.ChunkFinished((TOKEN,)))
    assert [type(command) for command in commands] == [events.PublishToken, events.KeepHere]
    kept = only(commands, events.KeepHere)
    assert kept.held_by == BlockOwner(KEPT_ROOM, owner_of("r1").request_id, 0)
    assert state.blocks.block_table(kept.held_by) == held
    assert (kept.task.request.output_ids, kept.task.kv_tokens) == ((TOKEN.token_id,), 6)
    assert state.is_idle
    assert state.staying == state.handovers_waiting == 0


def test_a_long_prompt_that_stays_is_offered_to_nobody() -> None:
    state = make_state(layerwise_min_tokens=1)
    run = only(arrive_to_stay(state, 20), events.RunChunk)
    assert run.report_every is None
    for tokens in (None, None):
        assert only(handle(state, events.ChunkFinished((tokens,))), events.RunChunk).report_every is None
    commands = handle(state, events.ChunkFinished((TOKEN,)))
    assert [type(command) for command in commands] == [events.PublishToken, events.KeepHere]


def test_the_next_chunk_leaves_room_for_the_token_of_one_that_stays() -> None:
    """It is decoded beside that chunk, before the decode room has counted it."""
    state = make_state(chunk_tokens=8)
    arrive_to_stay(state)
    handle(state, events.TaskArrived(PrefillTask(make_request("r2", 20), HERE, LIFE)))
    run = only(handle(state, events.ChunkFinished((TOKEN,))), events.RunChunk)
    assert [piece.tokens for piece in run.slices] == [7]
    state.mates.decoding = 1
    run = only(handle(state, events.ChunkFinished((None,))), events.RunChunk)
    assert [piece.tokens for piece in run.slices] == [7]


def test_a_sequence_that_ends_with_its_first_token_stays_nowhere() -> None:
    state = make_state()
    arrive_to_stay(state)
    commands = handle(state, events.ChunkFinished((SampledToken(EOS),)))
    assert [type(command) for command in commands] == [events.PublishToken]
    assert state.blocks.free_blocks == state.blocks.total_blocks


def test_a_sequence_that_is_refused_elsewhere_may_be_placed_here_after_all() -> None:
    state = make_state()
    offered(state, "r1")
    full = ErrorReply(Overloaded.code, "full")
    assert only(handle(state, events.OfferRefused(owner_of("r1"), full)), events.SeekDecode)
    home = Placement(HERE, Incarnation("i1"), HERE, Incarnation("i1"))
    commands = handle(state, events.DecodeFound(owner_of("r1"), home))
    assert [type(command) for command in commands] == [events.PublishMove, events.KeepHere]
    assert only(commands, events.KeepHere).task.request.output_ids == (TOKEN.token_id,)
    assert state.is_idle


def test_a_prompt_says_what_memory_it_wants_and_leaves_what_is_owed() -> None:
    state = make_state(total_blocks=4)
    waiting = owner_of("r9")
    state.mates.note_away(waiting, 3, 0.0)
    arrive_to_stay(state, 8)
    assert state.chunks.is_computing
    handle(state, events.ChunkFinished((TOKEN,)), now=0.5)
    assert state.blocks.free_blocks == 2
    request = make_request("r2", 4)
    handle(state, events.TaskArrived(PrefillTask(request, HERE, LIFE)), now=state.mates.max_wait_s)
    assert not state.chunks.is_computing
    assert state.mates.wanted_blocks == 0
    state.mates.note_away(None, 0, 2.0)
    handle(state, events.BlocksFreed(), now=2.0)
    assert state.chunks.is_computing
    handle(state, events.ChunkFinished((TOKEN,)), now=2.0)
    handle(state, events.TaskArrived(PrefillTask(make_request("r3", 9), HERE, LIFE)), now=2.0)
    assert state.mates.wanted_blocks == 3


def test_a_prompt_that_is_cancelled_amid_a_chunk_wants_nothing_any_more() -> None:
    state = make_state(total_blocks=5)
    arrive_to_stay(state, 4)
    for number, tokens in (("r2", 12), ("r4", 9)):
        handle(state, events.TaskArrived(PrefillTask(make_request(number, tokens), HERE, LIFE)))
    for token in (TOKEN, None):
        handle(state, events.ChunkFinished((token,)))
    assert state.chunks.is_computing
    wanted = state.mates.wanted_blocks
    assert wanted
    handle(state, events.TaskArrived(PrefillTask(make_request("r3", 9), HERE, LIFE)))
    handle(state, events.CancelArrived(RequestId("r3"), 0))
    assert state.mates.wanted_blocks == wanted, "another one's"
    handle(state, events.CancelArrived(RequestId("r4"), 0))
    assert (state.chunks.is_computing, state.mates.wanted_blocks) == (True, 0)
