"""What prompts hold, or are owed, counts in what an instance says that it will come to need."""

from common.ids import InstanceId
from common.lengths import LengthDistribution, certain
from common.messages import PrefillTask
from prefill import events
from prefill.forecast import needs_of_prompts
from prefill.state import PrefillState
from scheduler.policy.decode_admission import Growing
from scheduler.policy.decode_rebalancing import LEAST_STEPS
from tests.prefill.states import DECODE, LIFE, TOKEN, arrive, handle, make_state
from tests.requests import make_request

HERE = InstanceId("prefill-0")


def needs(state: PrefillState) -> list[Growing]:
    return needs_of_prompts(state.sequences.values(), HERE)


def arrive_to_stay(state: PrefillState, name: str, lengths: LengthDistribution | None) -> None:
    request = make_request(name, 6, max_tokens=300)
    handle(state, events.TaskArrived(PrefillTask(request, HERE, LIFE, lengths)))


def test_a_prompt_that_stays_counts_with_what_it_will_draw_be_it_that_it_still_waits_for_memory() -> None:
    state = make_state(total_blocks=2)
    for name in ("computed", "waits"):
        arrive_to_stay(state, name, certain(200))
    assert needs(state) == [Growing(6, 200)] * 2
    handle(state, events.ChunkFinished((TOKEN,)))
    assert needs(state) == [Growing(6, 200)], "the other room counts it now"


def test_as_in_the_decode_room_short_predictions_are_not_trusted_and_none_means_all_that_may_come() -> None:
    state = make_state()
    arrive_to_stay(state, "r1", certain(2))
    arrive_to_stay(state, "r2", None)
    assert needs(state) == [Growing(6, LEAST_STEPS), Growing(6, 300)]


def test_a_prompt_for_another_instance_holds_its_memory_until_its_kv_is_there_and_does_not_grow() -> None:
    state = make_state()
    arrive(state, "r1", 6, max_tokens=300)
    assert needs(state) == [Growing(6, 1)]
    handle(state, events.ChunkFinished((TOKEN,)))
    assert needs(state) == [Growing(6, 1)], "nobody has pulled it yet"
    handle(state, events.DecodeInstanceGone(DECODE, LIFE))
    assert needs(state) == []
