"""One engine for both rooms: what goes into a pass, under both policies, and that nobody waits for ever."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import MixedPolicy
from common.engine_thread import EngineThread
from common.messages import Phase, SampledToken
from common.performance import PassLoad
from common.room_mates import RoomMates
from common.shared_engine import MOST_GAP_S, Computed, Drawn, EngineWork, SharedEngine, drawn_by
from common.steps import LayerReports, SequenceStep
from scheduler.policy.mixed_batching import MAX_PASSED_OVER, PassChoice, prompt_tokens_beside

MAX_WAIT_S = 0.05
PASS_TOKENS = 4


class Recorder:
    """A Runner that keeps what each pass was of, by the steps' tokens; its passes wait for ``gate``."""

    def __init__(self) -> None:
        self.passes: list[list[int]] = []
        self.noted: list[PassLoad] = []
        self.waits_s: list[float] = []
        self.gaps_s: list[float] = []
        self.drawn: list[tuple[int, int]] = []
        self.tasks: list[asyncio.Future[None]] = []
        self.gate = threading.Event()
        self.gate.set()

    def note_gap(self, gap_s: float, decodes: int, prompts: int) -> None:
        self.gaps_s.append(gap_s)
        self.drawn.append((decodes, prompts))

    def run(
        self, batch: Sequence[SequenceStep], reports: LayerReports | None = None
    ) -> list[SampledToken | None]:
        self.gate.wait()
        self.passes.append([step.token_ids[0] for step in batch])
        if 13 in self.passes[-1]:
            raise RuntimeError("unlucky")
        return [SampledToken(step.token_ids[0]) for step in batch]


def engine_of(recorder: Recorder, policy: MixedPolicy) -> SharedEngine:
    return SharedEngine(
        recorder,
        EngineThread(),
        lambda work: recorder.tasks.append(asyncio.ensure_future(work)),
        RoomMates(policy),
        PassChoice(policy, PASS_TOKENS, MAX_WAIT_S),
        lambda load, _: recorder.noted.append(load),
        recorder.waits_s.append,
        recorder.note_gap,
    )


def work_of(*tokens: int) -> EngineWork:
    """Its load is told by the tokens: decodes' are over 2."""
    load = PassLoad(sequences=len(tokens)) if tokens[0] > 2 else PassLoad(chunk_tokens=len(tokens))
    return EngineWork(lambda: [SequenceStep((token,), 0, (), None) for token in tokens], lambda _: None, load)


async def keep_asking(engine: SharedEngine, phase: Phase, tokens: tuple[int, ...], times: int) -> None:
    """As a room does: the next work is there as soon as the last has been taken in."""
    for _ in range(times):
        computed = await engine.submit(phase, work_of(*tokens))
        assert computed.tokens == tuple(SampledToken(token) for token in tokens)


def test_chunked_takes_both_rooms_into_every_pass() -> None:
    async def work() -> None:
        recorder = Recorder()
        engine = engine_of(recorder, "chunked")
        both = keep_asking(engine, "prefill", (1, 2), 50), keep_asking(engine, "decode", (3,), 50)
        await asyncio.gather(*both)
        engine.thread.close()
        assert recorder.passes == [[1, 2, 3]] * 50
        assert recorder.noted == [PassLoad(chunk_tokens=2, sequences=1)] * 50

    asyncio.run(work())


@pytest.mark.parametrize(
    ("prompts", "decodes", "passes"),
    [
        ((1, 2), (3, 4), [[1, 2, 3, 4]] * 10),
        # Over the tokens of a pass: four chunks alone, then the step goes along whatever it is.
        ((1, 2), (3, 4, 5), [[1, 2]] * 4 + [[1, 2, 3, 4, 5]] + [[1, 2]] * 4 + [[1, 2, 3, 4, 5]]),
    ],
)
def test_splitwises_decodes_go_along_where_they_fit_beside_prompts_and_sit_out_four_passes_else(
    prompts: tuple[int, ...], decodes: tuple[int, ...], passes: list[list[int]]
) -> None:
    async def work() -> None:
        recorder = Recorder()
        engine = engine_of(recorder, "splitwise")
        both = keep_asking(engine, "prefill", prompts, 10), keep_asking(engine, "decode", decodes, 10)
        await asyncio.gather(*both)
        engine.thread.close()
        assert recorder.passes[: len(passes)] == passes
        assert set(map(tuple, recorder.passes[len(passes) :])) <= {decodes}, "prompts are over"

    asyncio.run(work())


def test_a_step_that_was_computed_alone_may_be_passed_over_four_times_again() -> None:
    async def work() -> None:
        recorder = Recorder()
        engine = engine_of(recorder, "splitwise")
        for _ in range(3):
            prompts = asyncio.create_task(keep_asking(engine, "prefill", (1, 2), 3))
            await asyncio.gather(prompts, keep_asking(engine, "decode", (3, 4, 5), 1))
        engine.thread.close()
        assert recorder.passes == [*[[1, 2]] * 3, [3, 4, 5]] * 3

    asyncio.run(work())


@pytest.mark.parametrize("first", get_args(Phase))
def test_a_passs_chunk_is_told_of_before_its_step_whoever_asked_first(first: Phase) -> None:
    """So a prompt's sequence is there when the next step is made."""
    told: list[Phase] = []

    async def ask(engine: SharedEngine, phase: Phase) -> None:
        for _ in range(10):
            await engine.submit(phase, work_of(1 if phase == "prefill" else 3))
            told.append(phase)

    async def work() -> None:
        engine = engine_of(Recorder(), "chunked")
        phases = sorted(get_args(Phase), key=lambda phase: phase != first)
        await asyncio.gather(*(ask(engine, phase) for phase in phases))
        engine.thread.close()

    asyncio.run(work())
    assert told == ["prefill", "decode"] * 10


def test_a_prompt_that_came_amid_a_step_is_computed_with_the_next_one() -> None:
    """Though a room asks for its next work from a task that it starts when the last one is told."""

    async def work() -> None:
        recorder = Recorder()
        engine = engine_of(recorder, "chunked")
        left: dict[Phase, int] = {"prefill": 3, "decode": 6}

        async def ask(tasks: asyncio.TaskGroup, phase: Phase) -> None:
            await engine.submit(phase, work_of(1 if phase == "prefill" else 3))
            left[phase] -= 1
            if left[phase]:
                tasks.create_task(ask(tasks, phase))

        recorder.gate.clear()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ask(tasks, "decode"))
            for _ in range(5):
                await asyncio.sleep(0)
            tasks.create_task(ask(tasks, "prefill"))
            await asyncio.sleep(0)
            recorder.gate.set()
        engine.thread.close()
        assert recorder.passes == [[3], [1, 3], [1, 3], [1, 3], [3], [3]]

    asyncio.run(work())


def test_who_gave_up_waiting_holds_nobody_up() -> None:
    async def work() -> None:
        recorder = Recorder()
        engine = engine_of(recorder, "chunked")
        recorder.gate.clear()
        given_up = engine.submit("prefill", work_of(1))
        other = engine.submit("decode", work_of(3))
        for _ in range(5):
            await asyncio.sleep(0)
        given_up.cancel()
        early = engine.submit("prefill", work_of(5))
        await asyncio.sleep(0)
        early.cancel()
        recorder.gate.set()
        assert (await other).tokens == (SampledToken(3),)
        assert (await engine.submit("prefill", work_of(2))).tokens == (SampledToken(2),)
        engine.thread.close()
        assert recorder.passes == [[1, 3], [2]], "who gave up before a pass began is not computed"

    asyncio.run(work())


def test_who_waits_is_told_where_a_pass_is_cancelled_or_what_notes_it_fails() -> None:
    def fail(load: PassLoad, seconds: float) -> None:
        raise ZeroDivisionError

    async def work() -> None:
        recorder = Recorder()
        engine = engine_of(recorder, "chunked")
        engine.note_pass = fail
        with pytest.raises(ZeroDivisionError):
            await engine.submit("decode", work_of(3))
        recorder.gate.clear()
        waits = engine.submit("decode", work_of(4))
        for _ in range(5):
            await asyncio.sleep(0)
        recorder.tasks[-1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        recorder.gate.set()
        engine.thread.close()

    asyncio.run(work())


def test_prefill_first_lets_decodes_wait_but_not_for_ever_though_prompts_never_end() -> None:
    async def work() -> None:
        recorder = Recorder()
        engine = engine_of(recorder, "prefill_first")
        prompts = asyncio.create_task(keep_asking(engine, "prefill", (1,), 1 << 30))
        began_s = asyncio.get_running_loop().time()
        await keep_asking(engine, "decode", (3,), 4)
        waited_s = asyncio.get_running_loop().time() - began_s
        prompts.cancel()
        engine.thread.close()
        assert recorder.passes.count([3]) == 4
        assert recorder.passes.count([1]) > 4
        assert [1, 3] not in recorder.passes
        assert waited_s >= 3 * MAX_WAIT_S

    asyncio.run(work())


@pytest.mark.parametrize("policy", ["prefill_first", "chunked"])
def test_a_room_alone_has_the_engine_to_itself(policy: MixedPolicy) -> None:
    async def work() -> None:
        engine = engine_of(Recorder(), policy)
        for phase in ("prefill", "decode"):
            assert (await engine.submit(phase, work_of(1))).is_alone
        engine.thread.close()

    asyncio.run(work())


def test_where_a_pass_fails_only_the_room_fails_whose_work_fails_alone() -> None:
    async def work() -> None:
        recorder = Recorder()
        engine = engine_of(recorder, "chunked")
        both = engine.submit("prefill", work_of(13)), engine.submit("decode", work_of(3))
        failed, computed = await asyncio.gather(*both, return_exceptions=True)
        assert isinstance(failed, RuntimeError)
        assert isinstance(computed, Computed)
        assert computed.tokens == (SampledToken(3),)
        assert recorder.passes == [[13, 3], [13], [3]]
        assert recorder.noted == [PassLoad(sequences=1)]
        assert (await engine.submit("decode", work_of(3))).tokens == (SampledToken(3),)
        with pytest.raises(RuntimeError, match="unlucky"):
            await engine.submit("decode", work_of(13))
        engine.thread.close()

    asyncio.run(work())


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(get_args(MixedPolicy)),
    st.floats(0.1, 5.0),
    st.lists(st.tuples(st.floats(0.001, 2.0), st.floats(0.001, 0.1)), min_size=1, max_size=60),
)
def test_both_phases_go_on_however_long_chunks_and_steps_are(
    policy: MixedPolicy, max_wait_s: float, passes: list[tuple[float, float]]
) -> None:
    """Prompts and decodes are always there. ``passes``: how long a chunk and a step take each time."""
    now = decode_since_s = prompt_since_s = 0.0
    choice, passed_over = PassChoice(policy, PASS_TOKENS, max_wait_s), 0
    for chunk_s, step_s in passes:
        chosen = choice.choose(PASS_TOKENS, 1, decode_since_s, now)
        assert chosen
        passed_over = 0 if "decode" in chosen else passed_over + 1
        if policy == "splitwise":
            assert passed_over <= MAX_PASSED_OVER
            assert "prefill" in chosen
        elif "decode" in chosen:
            assert now - decode_since_s <= max_wait_s + 2.0
        else:
            assert now - decode_since_s < max_wait_s
        if "decode" in chosen:
            now += step_s
        if "prefill" in chosen:
            assert now - prompt_since_s <= 2 * 0.1
            now += chunk_s
            prompt_since_s = now
        if "decode" in chosen:
            decode_since_s = now


@given(st.integers(1, 4096), st.integers(0, 512))
def test_a_chunk_and_the_decodes_fill_the_pass_together(chunk_tokens: int, decoding: int) -> None:
    alone: tuple[MixedPolicy, ...] = ("prefill_first", "splitwise", "static")
    together: tuple[MixedPolicy, ...] = ("chunked", "orca")
    for policy in together:
        beside = prompt_tokens_beside(policy, chunk_tokens, decoding)
        assert beside + decoding == chunk_tokens or (beside == 1 and decoding >= chunk_tokens)
    for policy in alone:
        assert prompt_tokens_beside(policy, chunk_tokens, decoding) == chunk_tokens


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine does between two passes is no pause."""
    monkeypatch.setattr("common.shared_engine.MOST_GAP_S", 60.0)


def test_gaps_are_told_between_passes_that_follow_on_one_another_and_not_of_pauses(
    patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        recorder = Recorder()
        engine = engine_of(recorder, "chunked")
        await keep_asking(engine, "decode", (3,), 50)
        assert len(recorder.gaps_s) == 49
        assert all(gap_s > 0 for gap_s in recorder.gaps_s)
        told = len(recorder.gaps_s)
        monkeypatch.setattr("common.shared_engine.MOST_GAP_S", MOST_GAP_S)
        await asyncio.sleep(2 * MOST_GAP_S)
        await keep_asking(engine, "decode", (3,), 1)
        with pytest.raises(RuntimeError, match="unlucky"):
            await engine.submit("decode", work_of(13))
        at_failure = len(recorder.gaps_s)
        await keep_asking(engine, "decode", (3,), 1)
        engine.thread.close()
        assert told == at_failure == len(recorder.gaps_s)

    asyncio.run(work())


def test_to_make_a_batch_is_part_of_the_gap(patient: None) -> None:
    def slowly() -> Sequence[SequenceStep]:
        time.sleep(MOST_GAP_S / 2)
        return [SequenceStep((3,), 0, (), None)]

    async def work() -> None:
        recorder = Recorder()
        engine = engine_of(recorder, "chunked")
        for _ in range(20):
            await engine.submit("decode", replace(work_of(3), batch=slowly))
        engine.thread.close()
        assert len(recorder.gaps_s) == 19
        assert all(gap_s >= MOST_GAP_S / 2 for gap_s in recorder.gaps_s)

    asyncio.run(work())


def test_what_passes_drew_is_told_by_phase_with_the_gap_after_them() -> None:
    async def work() -> None:
        recorder = Recorder()
        engine = engine_of(recorder, "chunked")
        both = keep_asking(engine, "prefill", (1, 2), 20), keep_asking(engine, "decode", (3, 4, 5), 20)
        await asyncio.gather(*both)
        engine.thread.close()
        assert set(recorder.drawn) == {(3, 2)}

    asyncio.run(work())


def test_a_chunk_amid_its_prompt_and_a_sequence_whose_kv_was_lost_have_drawn_nothing() -> None:
    token = SampledToken(7)
    assert drawn_by([work_of(3, 4, 5)], [(token, None, None)]) == Drawn(decodes=1)
    assert drawn_by([work_of(3)], [(None,)]) == Drawn()
    assert drawn_by([work_of(1, 2), work_of(3, 4)], [(None, token), (token, None)]) == Drawn(1, 1)


class Slow(Recorder):
    """Takes ``take`` for each pass."""

    def __init__(self, take: Callable[[], None]) -> None:
        super().__init__()
        self.take = take

    def run(
        self, batch: Sequence[SequenceStep], reports: LayerReports | None = None
    ) -> list[SampledToken | None]:
        self.take()
        return super().run(batch, reports)


def test_what_a_pass_waits_is_what_its_thread_did_not_run() -> None:
    """Of one that sleeps nearly all of it, of one that computes what it had no core for."""

    def compute() -> None:
        until_s = time.thread_time() + 0.05
        while time.thread_time() < until_s:
            pass

    async def waited_s(take: Callable[[], None]) -> float:
        recorder = Slow(take)
        engine = engine_of(recorder, "chunked")
        await engine.submit("decode", work_of(3))
        engine.thread.close()
        [waited_s] = recorder.waits_s
        return waited_s

    assert asyncio.run(waited_s(lambda: time.sleep(0.05))) >= 0.045
    began_s = time.perf_counter()
    waits_s = asyncio.run(waited_s(compute))
    assert 0 <= waits_s <= time.perf_counter() - began_s - 0.05


def test_what_becomes_due_amid_a_pass_or_as_its_room_is_told_is_asked_for_then() -> None:
    """The engine is left when nobody has anything to compute, after the rooms were told."""

    async def work() -> None:
        recorder = Recorder()
        engine = engine_of(recorder, "chunked")
        mates, asked = engine.mates, []

        def ask(phase: Phase) -> None:
            asked.append(phase)
            mates.step_due_s = None
            engine.submit(phase, work_of(3, 4))

        engine.ask_room = ask
        for is_due_amid in (True, False):
            recorder.gate.clear()
            computed = engine.submit("prefill", work_of(1))
            for _ in range(5):
                await asyncio.sleep(0)
            assert (mates.is_engine_taken, mates.under_way) == (True, ("prefill",))
            if is_due_amid:
                mates.step_due_s = 0.0
            recorder.gate.set()
            await computed
            assert mates.under_way == ("prefill",), "nothing is chosen before the rooms have been told"
            if not is_due_amid:
                mates.step_due_s = 0.0
            await recorder.tasks[-1]
            assert not mates.is_engine_taken
        engine.thread.close()
        assert asked == ["decode", "decode"]
        assert recorder.passes == [[1], [3, 4]] * 2

    asyncio.run(work())
