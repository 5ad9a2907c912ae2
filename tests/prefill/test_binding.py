"""A prompt whose decode instance is asked for when it is computed, and not before."""

import pytest

from common.errors import HandoverFailed, Overloaded
from common.messages import ErrorReply, Placement, PrefillTask
from common.sequences import PublishFailure
from prefill import events
from prefill.state import PrefillState
from tests.prefill.states import DECODE, HOME, LIFE, TOKEN, handle, make_state, only, owner_of
from tests.requests import make_request

SILENT = ErrorReply(HandoverFailed.code, "the scheduler did not answer")


def arrive_unbound(state: PrefillState, prompt_tokens: int = 6) -> list[events.PrefillCommand]:
    task = PrefillTask(make_request("r1", prompt_tokens), DECODE, LIFE, is_bound_late=True)
    return handle(state, events.TaskArrived(task))


def compute(state: PrefillState) -> events.SeekDecode:
    published, seek = handle(state, events.ChunkFinished((TOKEN,)))
    assert isinstance(published, events.PublishToken), "the first token waits for nothing"
    assert isinstance(seek, events.SeekDecode)
    return seek


def test_it_is_asked_for_with_the_first_token_and_the_sequence_offered_where_it_is_said() -> None:
    state = make_state()
    arrive_unbound(state)
    seek = compute(state)
    assert (seek.request.output_ids, seek.refused, seek.wanted) == ((TOKEN.token_id,), None, None)
    offer = only(handle(state, events.DecodeFound(owner_of("r1"), HOME)), events.OfferSequence)
    assert offer.decode_instance == HOME.decode_instance


def test_a_long_prompt_is_not_handed_over_layer_by_layer_to_whom_nobody_knows_yet() -> None:
    state = make_state(layerwise_min_tokens=1)
    [run] = arrive_unbound(state)
    assert isinstance(run, events.RunChunk)
    assert run.report_every is None


@pytest.mark.parametrize("is_here", [False, True], ids=["as before", "here"])
def test_it_may_be_the_one_of_the_placement_or_this_instance(is_here: bool) -> None:
    state = make_state()
    arrive_unbound(state)
    compute(state)
    here = (HOME.prefill_instance, HOME.prefill_incarnation)
    placement = Placement(*here, *(here if is_here else (DECODE, LIFE)))
    commands = handle(state, events.DecodeFound(owner_of("r1"), placement))
    if is_here:
        assert only(commands, events.KeepHere)
    else:
        assert only(commands, events.OfferSequence).decode_instance == DECODE


def test_where_nobody_answers_it_is_the_one_of_the_placement_and_nothing_is_computed_again() -> None:
    state = make_state()
    arrive_unbound(state)
    compute(state)
    [offer] = handle(state, events.DecodeNotFound(owner_of("r1"), SILENT))
    assert isinstance(offer, events.OfferSequence)
    assert offer.decode_instance == DECODE
    full = ErrorReply(Overloaded.code, "full")
    seek = only(handle(state, events.OfferRefused(owner_of("r1"), full)), events.SeekDecode)
    assert seek.refused == DECODE
    assert only(handle(state, events.DecodeNotFound(owner_of("r1"), SILENT)), PublishFailure)
    assert state.is_idle
