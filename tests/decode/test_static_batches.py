"""Who comes from elsewhere to a mixed instance whose batches are static, or full: events and commands."""

from common.lifecycle import DecodePhase
from decode import events
from decode.state import DecodeState
from tests.decode.states import end_step, handle, kinds, make_state, owner_of, start, task_of


def static_state(total_blocks: int = 40, host_blocks: int = 0) -> DecodeState:
    state = make_state(total_blocks=total_blocks, host_blocks=host_blocks)
    state.mates.policy, state.mates.is_mixed = "static", True
    return state


def phase(state: DecodeState, name: str) -> DecodePhase:
    return state.sequences[owner_of(name)].phase


def run_out(state: DecodeState, *names: str) -> None:
    while any(owner_of(name) in state.sequences for name in names):
        end_step(state)


def test_who_comes_while_a_static_batch_is_decoded_waits_for_its_end() -> None:
    state = static_state()
    start(state, "r1", max_tokens=4)
    for name in ("r2", "r3"):
        handle(state, events.TaskArrived(task_of(name)))
    assert phase(state, "r2") is DecodePhase.WAITING
    assert state.steps_ahead() == 3, "nothing changes before that"
    run_out(state, "r1")
    assert [phase(state, name) for name in ("r2", "r3")] == [DecodePhase.PULLING] * 2
    handle(state, events.TaskArrived(task_of("r4")))
    assert phase(state, "r4") is DecodePhase.PULLING, "it has not begun"
    handle(state, events.PullFinished(owner_of("r2")))
    handle(state, events.TaskArrived(task_of("r5")))
    assert phase(state, "r5") is DecodePhase.WAITING


def test_prompts_and_those_from_elsewhere_have_their_turns() -> None:
    state = static_state()
    state.mates.waiting_prompts = 1
    handle(state, events.TaskArrived(task_of("r1")))
    assert phase(state, "r1") is DecodePhase.WAITING
    state.mates.is_decodes_turn = state.mates.is_computing = True
    handle(state, events.BlocksFreed())
    assert phase(state, "r1") is DecodePhase.WAITING, "a batch of prompts is computed"
    state.mates.is_computing = False
    handle(state, events.BlocksFreed())
    assert phase(state, "r1") is DecodePhase.PULLING
    assert not state.mates.is_decodes_turn


def test_one_of_the_batch_comes_back_from_the_host_before_any_newcomer() -> None:
    state = static_state(total_blocks=7, host_blocks=8)
    start(state, "r1", "r2", prompt_tokens=8, max_tokens=12)
    handle(state, events.TaskArrived(task_of("r3")))
    swaps: list[events.SwapOut] = []
    while not swaps:
        swaps = kinds(end_step(state), events.SwapOut)
    assert swaps[0].owner == owner_of("r2")
    handle(state, events.SwapFinished(owner_of("r2"), 4, 0.1))
    run_out(state, "r1")
    assert phase(state, "r2") is DecodePhase.SWAPPING_IN
    assert phase(state, "r3") is DecodePhase.WAITING
    handle(state, events.SwapFinished(owner_of("r2"), 4, 0.1))
    run_out(state, "r2")
    assert phase(state, "r3") is DecodePhase.PULLING


def test_the_last_slot_is_left_to_a_prompt_that_wants_one_until_somebody_has_waited_long_enough() -> None:
    state = make_state(total_blocks=40, max_batch=2)
    state.mates.policy, state.mates.is_mixed, state.mates.max_wait_s = "orca", True, 1.0
    start(state, "r1", max_tokens=40)
    assert state.mates.taken_slots == 1
    state.mates.wants_slot = True
    handle(state, events.TaskArrived(task_of("r2")), now=5.0)
    assert phase(state, "r2") is DecodePhase.WAITING
    handle(state, events.BlocksFreed(), now=5.9)
    assert phase(state, "r2") is DecodePhase.WAITING
    handle(state, events.BlocksFreed(), now=6.0)
    assert phase(state, "r2") is DecodePhase.PULLING
