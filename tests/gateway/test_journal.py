"""What a gateway does with its mesh's words: every fault here is spoken by the test, over the real bus."""

import asyncio
import json

import msgspec
import openai
import pytest

from common.errors import (
    ContextLengthExceeded,
    HandoverFailed,
    InternalError,
    Overloaded,
    RequestError,
)
from common.ids import new_request_id
from common.messages import CancelRequest, GenerationRequest, SampledToken, TokenBatch, TokenEvent
from common.model.tokens import Tokenizer
from tests.e2e.meshes import get_text
from tests.gateway.clients import PROMPT, TEXT, client_of, complete, in_background, with_peer, with_stream
from tests.gateway.processes import GatewayProcess, send
from tests.gateway.raw_http import raw_client
from tests.gateway.scripted import DECODE, ScriptedPeer


def test_a_finished_request_is_reported_once_and_never_cancelled(
    gateway: GatewayProcess, ids: list[int]
) -> None:
    async def script(peer: ScriptedPeer) -> None:
        async with client_of(gateway) as client:
            call = asyncio.create_task(client.completions.create(**PROMPT, stream=True))
            request = await peer.next_request()
            peer.tokens(request, ids[:1])
            stream = await call
            texts = [(await anext(aiter(stream))).choices[0].text]
            peer.tokens(request, ids[1:], start=1, finish="length")
            texts += [chunk.choices[0].text async for chunk in stream]
        assert "".join(texts) == TEXT
        assert await peer.next_ended() == request.request_id
        await peer.bus.flush()
        assert peer.cancels.empty()
        assert peer.ended.empty()

    with_peer(gateway, script)


def test_a_missing_token_is_computed_anew(gateway: GatewayProcess, ids: list[int]) -> None:
    async def script(peer: ScriptedPeer, first: GenerationRequest) -> None:
        peer.tokens(first, ids[:3])
        peer.tokens(first, ids[4:6], start=4)
        second = await peer.next_request()
        assert second.output_ids == tuple(ids[:3])
        await peer.wait_cancelled(first)
        peer.tokens(second, ids[3:], finish="length")

    before = gateway.metric("lamella_stream_gaps_total")
    with_stream(gateway, script)
    assert gateway.metric("lamella_stream_gaps_total") == before + 1


def test_repeated_and_superseded_tokens_change_nothing(gateway: GatewayProcess, ids: list[int]) -> None:
    async def script(peer: ScriptedPeer, first: GenerationRequest) -> None:
        peer.tokens(first, ids[:3])
        peer.tokens(first, ids[1:3], start=1)
        peer.fail(first, HandoverFailed("the link broke"), can_continue=True)
        second = await peer.next_request()
        peer.tokens(first, [7, 8], start=3)
        peer.fail(first, InternalError("late"), can_continue=False)
        peer.tokens(second, ids[3:], finish="length")

    with_stream(gateway, script)


def test_work_for_an_unknown_request_is_cancelled(gateway: GatewayProcess, ids: list[int]) -> None:
    async def script(peer: ScriptedPeer, request: GenerationRequest) -> None:
        unknown = msgspec.structs.replace(request, request_id=new_request_id())
        peer.tokens(unknown, [5])
        async with asyncio.timeout(5):
            assert await peer.cancels.get() == (DECODE, CancelRequest(unknown.request_id, 0))
        peer.tokens(request, ids, finish="length")

    with_stream(gateway, script)


def test_a_failure_for_good_after_the_first_token_is_an_event_without_done(
    gateway: GatewayProcess, tokenizer: Tokenizer
) -> None:
    async def script(peer: ScriptedPeer) -> None:
        async with raw_client(gateway.port) as client:
            await client.post("/v1/completions", {**PROMPT, "stream": True})
            request = await peer.next_request()
            peer.tokens(request, tokenizer.encode("Hello"))
            await client.read_until(b"Hello")
            peer.fail(request, InternalError("secret detail"), can_continue=False)
            rest = await client.read_until(b"0\r\n\r\n")
        assert b'data: {"error":{' in rest
        assert b"internal_error" in rest
        assert b"secret detail" not in rest
        assert b"[DONE]" not in rest

    with_peer(gateway, script)


@pytest.mark.parametrize(
    ("refusal", "status", "code", "retry_after"),
    [
        (Overloaded("full", retry_after_s=2.5), 503, "overloaded", "3"),
        (ContextLengthExceeded("too long", param="max_tokens"), 400, "context_length_exceeded", None),
        (InternalError("secret"), 500, "internal_error", None),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_refused_placement_is_a_status(
    refusal: RequestError,
    status: int,
    code: str,
    retry_after: str | None,
    stream: bool,
    gateway: GatewayProcess,
) -> None:
    async def script(peer: ScriptedPeer) -> None:
        peer.refusals.append(refusal)
        async with client_of(gateway) as client:
            with pytest.raises(openai.APIStatusError) as caught:
                await client.completions.create(**PROMPT, stream=stream)
        error = caught.value
        assert (error.status_code, error.code) == (status, code)
        assert error.response.headers.get("retry-after") == retry_after
        assert "secret" not in error.message

    with_peer(gateway, script)


def test_one_refused_choice_refuses_the_call_and_cancels_the_other(gateway: GatewayProcess) -> None:
    async def script(peer: ScriptedPeer) -> None:
        peer.refusals.append(Overloaded("full", retry_after_s=1.0))
        async with client_of(gateway) as client:
            with pytest.raises(openai.APIStatusError, match="full"):
                await client.completions.create(**PROMPT, n=2)
        requests = (await peer.next_request(), await peer.next_request())
        ended = {await peer.next_ended()}
        (placed,) = (each for each in requests if each.request_id in ended)
        await peer.wait_cancelled(placed)

    with_peer(gateway, script)


def test_a_stop_string_ends_its_choice_in_the_mesh_while_the_other_goes_on(
    gateway: GatewayProcess, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXT)

    async def script(peer: ScriptedPeer) -> None:
        async with client_of(gateway) as client:
            call = asyncio.create_task(client.completions.create(**PROMPT, n=2, stop=["fox"], seed=1))
            requests = sorted(
                [await peer.next_request(), await peer.next_request()], key=lambda each: each.sampling.seed
            )
            peer.tokens(requests[0], ids)
            await peer.wait_cancelled(requests[0])
            assert await peer.next_ended() == requests[0].request_id
            peer.tokens(requests[1], tokenizer.encode("No stop"), finish="length")
            answer = await call
        assert [choice.text for choice in answer.choices] == ["The quick brown ", "No stop"]
        assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]

    with_peer(gateway, script)


def test_a_stop_string_that_overtakes_the_placement_ends_the_choice_once_it_is_placed(
    gateway: GatewayProcess, tokenizer: Tokenizer
) -> None:
    async def script(peer: ScriptedPeer) -> None:
        peer.gate.clear()
        async with client_of(gateway) as client:
            call = asyncio.create_task(client.completions.create(**PROMPT, n=2, stop=["fox"]))
            first, second = await peer.next_request(), await peer.next_request()
            taken = gateway.metric("lamella_generation_tokens_total")
            ids = tokenizer.encode("The quick brown fox")
            peer.tokens(first, ids)
            await asyncio.to_thread(gateway.wait_metric, "lamella_generation_tokens_total", taken + len(ids))
            peer.gate.set()
            await peer.wait_cancelled(first)
            assert await peer.next_ended() == first.request_id
            peer.tokens(second, tokenizer.encode("No stop"), finish="length")
            assert len((await call).choices) == 2

    with_peer(gateway, script)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens_before", [0, 3])
def test_a_client_that_leaves_ends_its_request_everywhere(
    tokens_before: int, stream: bool, gateway: GatewayProcess, ids: list[int]
) -> None:
    async def script(peer: ScriptedPeer) -> None:
        async with raw_client(gateway.port) as client:
            await client.post("/v1/completions", {**PROMPT, "stream": stream})
            request = await peer.next_request()
            peer.tokens(request, ids[:tokens_before])
            if stream and tokens_before:
                await client.read_until(b"quick")
            await client.leave()
        await peer.wait_cancelled(request)
        assert await peer.next_ended() == request.request_id

    before = gateway.metric("lamella_client_disconnects_total")
    with_peer(gateway, script)
    gateway.wait_metric("lamella_client_disconnects_total", before + 1)


def test_a_client_that_leaves_while_its_request_is_placed_is_ended_once_it_is(
    gateway: GatewayProcess,
) -> None:
    async def script(peer: ScriptedPeer) -> None:
        peer.gate.clear()
        async with raw_client(gateway.port) as client:
            await client.post("/v1/completions", PROMPT)
            request = await peer.next_request()
            await client.leave()
        await asyncio.to_thread(gateway.wait_metric, "lamella_open_requests", 0)
        assert peer.cancels.empty()
        peer.gate.set()
        await peer.wait_cancelled(request)
        assert await peer.next_ended() == request.request_id

    with_peer(gateway, script)


def test_without_a_scheduler_a_request_is_refused_at_once(gateway: GatewayProcess) -> None:
    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        client.completions.create(**PROMPT)
    assert (caught.value.status_code, caught.value.code) == (503, "no_instance_ready")
    assert caught.value.response.headers["retry-after"] == "1"


def test_a_batch_for_several_requests_reaches_each(gateway: GatewayProcess, tokenizer: Tokenizer) -> None:
    texts = ["one", "two", "three"]

    async def script(peer: ScriptedPeer) -> None:
        answers = [in_background(complete(gateway, prompt=[20 + index])) for index in range(3)]
        requests = [await peer.next_request() for _ in texts]
        events = []
        for request in requests:
            (token_id,) = tokenizer.encode(texts[request.prompt_ids[0] - 20])
            events.append(TokenEvent(request.request_id, 0, 0, SampledToken(token_id), "length"))
        peer.bus.publish(
            peer.subjects.gateway_events(requests[0].gateway_id), TokenBatch(DECODE, tuple(events))
        )
        assert [await answer for answer in answers] == texts

    with_peer(gateway, script)


def test_whoever_is_served_or_refused_is_judged_and_whose_client_left_is_not(
    gateway: GatewayProcess, tokenizer: Tokenizer
) -> None:
    before = gateway.metric("lamella_requests_judged_total")

    async def script(peer: ScriptedPeer) -> None:
        answer = in_background(complete(gateway))
        peer.tokens(await peer.next_request(), tokenizer.encode(TEXT), finish="length")
        assert await answer == TEXT
        peer.refusals.append(Overloaded("full"))
        with pytest.raises(openai.InternalServerError):
            await complete(gateway)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await complete(gateway)

    with_peer(gateway, script)
    assert gateway.metric("lamella_requests_judged_total") == before + 2


def test_a_class_travels_with_its_request_and_is_judged_by_its_own_objectives(
    gateway: GatewayProcess, tokenizer: Tokenizer
) -> None:
    async def script(peer: ScriptedPeer) -> None:
        body, header = {**PROMPT, "service_tier": "flex"}, {"x-lamella-class": "interactive"}
        async with asyncio.TaskGroup() as group:
            call = asyncio.to_thread(send, f"{gateway.url}/v1/completions", body, header)
            answer = group.create_task(call)
            request = await peer.next_request()
            assert (request.service_class, request.head_start_s) == ("interactive", 2.0)
            # Over the objective of the class, 0.5 s, and within that of the default one.
            await asyncio.sleep(0.6)
            peer.tokens(request, tokenizer.encode(TEXT), finish="length")
            answered = await answer
            assert answered.headers["x-lamella-class"] == "interactive"
            assert json.loads(answered.body)["service_tier"] == "priority"
        ended = await peer.next_end()
        assert ended.ttft_s is not None
        assert ended.ttft_s >= 0.6
        assert ended.tpot_s is not None

    with_peer(gateway, script)
    met = 'class="interactive",objective='
    assert gateway.metric("lamella_requests_judged_total", 'class="interactive"') == 1
    assert gateway.metric("lamella_requests_within_objectives_total", f'{met}"tpot"') == 1
    assert gateway.metric("lamella_requests_within_objectives_total", f'{met}"all"') == 0
    assert gateway.metric("lamella_time_to_first_token_seconds_count", 'class="interactive"') == 1
    levels = {each["service_class"]: each for each in json.loads(get_text(f"{gateway.url}/service-levels"))}
    assert (levels["interactive"]["requests"], levels["interactive"]["met"]) == (1, 0)
    assert list(levels) == ["default", "interactive", "batch"]


@pytest.mark.parametrize(("tier", "told"), [(None, None), ("auto", "default"), ("batch", "flex")])
def test_each_chunk_tells_who_named_a_tier_which_one_it_was(
    tier: str | None, told: str | None, gateway: GatewayProcess, tokenizer: Tokenizer
) -> None:
    async def chunks() -> list[dict[str, object]]:
        async with client_of(gateway) as client:
            stream = await client.chat.completions.create(
                model="default",
                messages=[{"role": "user", "content": "Hi"}],
                stream=True,
                extra_body={"service_tier": tier},
            )
            return [chunk.to_dict() async for chunk in stream]

    async def script(peer: ScriptedPeer) -> None:
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(chunks())
            peer.tokens(await peer.next_request(), tokenizer.encode(TEXT), finish="length")
        assert {chunk.get("service_tier") for chunk in answer.result()} == {told}
        assert all(("service_tier" in chunk) == (told is not None) for chunk in answer.result())

    with_peer(gateway, script)
