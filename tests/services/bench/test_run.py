"""Whole runs against a server on a real socket, well-behaved and not."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.latency import ServiceObjectives
from services.bench.config import BackgroundLoad, BenchConfig, BenchError
from services.bench.lengths import FixedLength, UniformLength
from services.bench.run import BenchRun, Progress, run_bench
from services.bench.traces import PREFIX_BLOCK_TOKENS
from tests.services.bench.local_server import Behaviour, LocalServer

pytestmark = pytest.mark.anyio

GENEROUS_S = 30.0
"""Nothing here is timed; this only keeps a hung test from hanging the suite."""


def closed(server: LocalServer, **changes: Any) -> BenchConfig:
    small = BenchConfig(server.url, concurrency=2, requests=6, prompt=FixedLength(16), output=FixedLength(5))
    return replace(small, **changes)


async def run(config: BenchConfig, **options: Any) -> BenchRun:
    async with asyncio.timeout(GENEROUS_S):
        return await run_bench(config, **options)


async def until(condition: Callable[[], bool]) -> None:
    """Give the loop turns until ``condition`` holds."""
    async with asyncio.timeout(GENEROUS_S):
        for _ in count():
            if condition():
                return
            await asyncio.sleep(0)


async def test_a_closed_loop_keeps_so_many_requests_in_flight_and_serves_them_all() -> None:
    async with LocalServer() as server:
        done = await run(closed(server, objectives=ServiceObjectives(ttft_s=60.0, tpot_s=60.0)))
    load = done.result.loads[0]
    assert (load.requests, load.served, load.failed, load.cut) == (6, 6, 0, 0)
    assert server.most_in_flight == 2
    # One connection for the model's name and one user, one for the other.
    assert server.connections == 2
    assert done.result.model == "words"
    assert (load.output_tokens, load.prompt_tokens) == (30, 96)
    assert [len(one.token_times_s) for one in done.outcomes] == [5] * 6
    assert load.tbt is not None
    assert load.tbt.count == 6 * 4
    assert load.attainment is not None
    assert load.attainment.share == 1.0
    assert load.goodput_per_s == pytest.approx(load.requests_per_s)
    assert all(len(body["prompt"]) == 16 and body["ignore_eos"] for body in server.bodies)
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 6


async def test_an_open_loop_sends_when_due_whatever_became_of_the_requests_before() -> None:
    async with LocalServer() as server:
        server.gate.clear()
        config = closed(server, concurrency=None, rate_per_s=1000.0, arrivals="fixed", requests=40)
        running = asyncio.create_task(run(config))
        # No answer has been given to anyone, and yet all of them have arrived.
        await until(lambda: server.in_flight == 40)
        assert not running.done()
        server.gate.set()
        done = await running
    assert done.result.loads[0].served == 40
    due_s = [one.due_s for one in done.outcomes]
    first_s = min(due_s)
    expected_s = [index / 1000.0 for index in range(40)]
    assert sorted(moment_s - first_s for moment_s in due_s) == pytest.approx(expected_s)
    assert all(one.arrival_s <= one.sent_s for one in done.outcomes)


async def test_arrivals_beyond_the_limit_in_flight_are_counted_as_failed() -> None:
    async with LocalServer() as server:
        server.gate.clear()
        config = closed(server, concurrency=None, rate_per_s=1000.0, requests=20, most_in_flight=8)
        progress: list[Progress] = []
        running = asyncio.create_task(run(config, on_start=progress.append))
        await until(lambda: bool(progress) and progress[0].foreground.failed == 12)
        server.gate.set()
        done = await running
    load = done.result.loads[0]
    assert (load.requests, load.served, load.failed) == (20, 8, 12)
    assert load.failures[0].kind == "client_limit"


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (Behaviour.OVERLOADED, "http_503"),
        (Behaviour.ERROR_EVENT, "error_event"),
        (Behaviour.MALFORMED_EVENT, "malformed_event"),
        (Behaviour.UNFINISHED, "truncated"),
        (Behaviour.BREAK_OFF, "connection"),
        (Behaviour.SHORT_OUTPUT, "wrong_token_count"),
        (Behaviour.NOT_A_STREAM, "not_a_stream"),
        (Behaviour.NOT_HTTP, "connection"),
    ],
)
async def test_a_broken_answer_fails_its_request_and_names_how(behaviour: Behaviour, kind: str) -> None:
    async with LocalServer(behaviour) as server:
        done = await run(closed(server, concurrency=None, rate_per_s=500.0, requests=4))
    load = done.result.loads[0]
    assert (load.served, load.failed) == (0, 4)
    assert [(failure.kind, failure.count) for failure in load.failures] == [(kind, 4)]
    assert load.failures[0].example
    assert load.ttft is None
    assert load.requests_per_s == 0.0


async def test_a_rejected_user_comes_back_after_the_time_the_server_names() -> None:
    async with LocalServer(Behaviour.OVERLOADED) as server:
        running = asyncio.create_task(run(closed(server, concurrency=1, requests=3)))
        await until(lambda: len(server.bodies) == 1)
        server.behaviour = Behaviour.SERVE
        done = await running
    assert [one.failure is None for one in done.outcomes] == [False, True, True]
    refusal = done.outcomes[0].failure
    assert refusal is not None
    assert refusal.retry_after_s == 0.05
    assert refusal.message == "over: full"


async def test_an_answer_that_does_not_come_is_a_timeout() -> None:
    async with LocalServer() as server:
        server.gate.clear()
        done = await run(closed(server, requests=2, request_timeout_s=3.0))
    assert [(failure.kind, failure.count) for failure in done.result.loads[0].failures] == [("timeout", 2)]


@pytest.mark.parametrize(
    "behaviour", [Behaviour.WITHOUT_DONE, Behaviour.CLOSE_AFTER_EACH, Behaviour.CLOSE_DELIMITED]
)
async def test_untidy_but_complete_answers_count_as_served(behaviour: Behaviour) -> None:
    async with LocalServer(behaviour) as server:
        done = await run(closed(server))
    load = done.result.loads[0]
    assert load.served == 6
    assert load.without_done == (6 if behaviour is Behaviour.WITHOUT_DONE else 0)


async def test_several_tokens_in_one_event_are_told() -> None:
    async with LocalServer(Behaviour.COALESCE) as server:
        done = await run(closed(server, output=FixedLength(8)))
    load = done.result.loads[0]
    assert load.tokens_per_event == 2.0
    assert load.output_tokens == 48


async def test_without_usage_events_are_counted() -> None:
    async with LocalServer(Behaviour.WITHOUT_USAGE) as server:
        done = await run(closed(server))
    load = done.result.loads[0]
    assert (load.served, load.without_usage, load.output_tokens) == (6, 6, 30)


async def test_a_short_answer_is_served_when_lengths_are_not_checked() -> None:
    async with LocalServer(Behaviour.SHORT_OUTPUT) as server:
        done = await run(closed(server, checks_tokens=False))
    assert done.result.loads[0].served == 6


async def test_the_background_decodes_before_the_foreground_starts_and_is_reported_apart() -> None:
    async with LocalServer() as server:
        background = BackgroundLoad(3, FixedLength(8), FixedLength(40))
        seen: list[int] = []

        def note_start(progress: Progress) -> None:
            seen.append(len(server.bodies))

        done = await run(
            closed(server, concurrency=1, requests=8, background=background), on_start=note_start
        )
    foreground, behind = done.result.loads
    assert seen[0] >= 3
    assert (foreground.name, foreground.served) == ("foreground", 8)
    assert (behind.name, behind.failed) == ("background", 0)
    assert behind.cut >= 1
    assert behind.tbt is not None
    assert behind.elapsed_s == foreground.elapsed_s
    # Prompts of the two never meet.
    prompts = {(len(body["prompt"]), tuple(body["prompt"])) for body in server.bodies}
    assert len(prompts) == len(server.bodies)


async def test_a_stopped_run_reports_what_it_has() -> None:
    async with LocalServer() as server:
        stop = asyncio.Event()
        progress: list[Progress] = []
        config = closed(server, requests=None, duration_s=GENEROUS_S)
        running = asyncio.create_task(run(config, stop=stop, on_start=progress.append))
        await until(lambda: bool(progress) and len(progress[0].foreground.outcomes) >= 5)
        server.gate.clear()
        # Both users are held by the gate: they are what gets cut.
        await until(lambda: server.in_flight == 2)
        stop.set()
        done = await running
        # The server sees its clients go away.
        server.gate.set()
        await until(lambda: server.in_flight == 0)
    load = done.result.loads[0]
    assert done.result.is_interrupted
    assert load.served >= 5
    assert load.cut == 2


async def test_warm_up_requests_are_sent_and_not_counted() -> None:
    async with LocalServer() as server:
        done = await run(closed(server, warmup=3))
    assert len(server.bodies) == 9
    assert done.result.loads[0].requests == 6


async def test_lengths_are_cut_to_the_context_the_server_names() -> None:
    async with LocalServer(context_tokens=20) as server:
        done = await run(closed(server, prompt=FixedLength(64), output=FixedLength(5)))
    load = done.result.loads[0]
    assert load.served == 6
    assert {len(body["prompt"]) for body in server.bodies} == {15}
    assert (load.truncated.requests, load.truncated.prompt_tokens) == (6, 6 * 49)


async def test_the_same_seed_sends_the_same_requests() -> None:
    bodies = []
    for seed in (7, 7, 8):
        async with LocalServer() as server:
            await run(closed(server, concurrency=1, seed=seed, prompt=UniformLength(4, 40)))
        bodies.append(server.bodies)
    assert bodies[0] == bodies[1]
    assert bodies[0] != bodies[2]


async def test_a_trace_is_replayed_with_its_shared_prefixes(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n'
        '{"timestamp": 20, "input_length": 700, "output_length": 2, "hash_ids": [1, 3]}\n'
    )
    async with LocalServer() as server:
        done = await run(BenchConfig(server.url, trace=trace, trace_scale=2.0))
    first, second = (body["prompt"] for body in sorted(server.bodies, key=lambda body: len(body["prompt"])))
    assert (len(first), len(second)) == (600, 700)
    assert first[:PREFIX_BLOCK_TOKENS] == second[:PREFIX_BLOCK_TOKENS]
    assert first[PREFIX_BLOCK_TOKENS:] != second[PREFIX_BLOCK_TOKENS:600]
    assert [one.output_tokens for one in done.outcomes] == [3, 2]
    assert done.outcomes[1].due_s - done.outcomes[0].due_s == pytest.approx(0.010)


async def test_no_server_is_an_error_that_names_its_address(free_tcp_port: int) -> None:
    with pytest.raises(BenchError, match=f"127.0.0.1:{free_tcp_port}"):
        await run(BenchConfig(f"http://127.0.0.1:{free_tcp_port}", concurrency=1))


async def test_a_server_that_wants_a_key_is_not_asked_for_a_models_name() -> None:
    async with LocalServer(Behaviour.UNAUTHORIZED) as server:
        with pytest.raises(BenchError, match="OPENAI_API_KEY"):
            await run(closed(server))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rate_per_s": 1.0, "concurrency": 1}, "--rate"),
        ({}, "--rate"),
        ({"concurrency": 0}, "--concurrency"),
        ({"rate_per_s": float("nan")}, "--rate"),
        ({"concurrency": 1, "endpoint": "chat"}, "--endpoint"),
        ({"concurrency": 1, "workload": "huge"}, "--workload"),
        ({"concurrency": 1, "url": "ftp://host"}, "--url"),
        ({"rate_per_s": 1.0, "arrivals": "bursts"}, "--arrivals"),
    ],
)
async def test_an_impossible_configuration_names_its_option(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await run(BenchConfig(**{"url": "http://127.0.0.1:9", **changes}))
    assert caught.value.key == key
