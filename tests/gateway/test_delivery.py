"""What reaches the client, byte for byte, of tokens that the test speaks for."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import openai
import pytest

from common.messages import FinishReason, SampledToken
from common.model.tokens import Tokenizer
from gateway.protocol import MAX_HEADER_BYTES
from tests.gateway.clients import PROMPT, TEXT, client_of, complete, in_background, whole, with_peer
from tests.gateway.processes import GatewayProcess, send
from tests.gateway.raw_http import RawClient, raw_client
from tests.gateway.scripted import ScriptedPeer

CHAT: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "Hi"}]}


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The JSON of a stream's events, read from a chunked body."""
    lines = [line for line in body.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def test_a_queued_stream_is_told_that_we_live_and_then_gets_its_text(
    gateway: GatewayProcess, tokenizer: Tokenizer
) -> None:
    async def script(peer: ScriptedPeer) -> None:
        async with raw_client(gateway.port) as client:
            await client.post("/v1/chat/completions", {**CHAT, "stream": True})
            request = await peer.next_request()
            head = await client.read_until(b": waiting\n\n")
            assert head.startswith(b"HTTP/1.1 200")
            await client.read_until(b": waiting\n\n")
            peer.tokens(request, tokenizer.encode(TEXT), finish="stop")
            rest = await client.read_until(b"data: [DONE]\n\n")
        deltas = [event["choices"][0]["delta"] for event in events_of(head + rest)]
        assert deltas[0]["role"] == "assistant"
        # The last token is the end token, which is no text.
        text = "".join(delta.get("content") or "" for delta in deltas)
        assert text == tokenizer.decode(tokenizer.encode(TEXT)[:-1])

    with_peer(gateway, script)


@pytest.mark.parametrize("stream", [True, False])
def test_silence_for_too_long_ends_the_request(stream: bool, gateway: GatewayProcess) -> None:
    async def script(peer: ScriptedPeer) -> None:
        answer = complete(gateway) if stream else whole(gateway)
        with pytest.raises(openai.APIError, match="token_timeout_s") as caught:
            await answer
        assert caught.value.code == "deadline_exceeded"
        if isinstance(caught.value, openai.APIStatusError):
            assert caught.value.status_code == 408
        await peer.wait_cancelled(await peer.next_request())

    with_peer(gateway, script)


def test_no_event_shows_half_a_character(gateway: GatewayProcess, tokenizer: Tokenizer) -> None:
    text = "日本語 and 👩‍👩‍👧 together"

    async def script(peer: ScriptedPeer) -> None:
        async with client_of(gateway) as client:
            call = asyncio.create_task(client.completions.create(**PROMPT, stream=True))
            request = await peer.next_request()
            peer.tokens(request, tokenizer.encode(text), finish="length")
            pieces = [chunk.choices[0].text async for chunk in await call]
        assert "".join(pieces) == text
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)

    with_peer(gateway, script)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_across_tokens_ends_the_text(
    stream: bool, include: bool, gateway: GatewayProcess, tokenizer: Tokenizer
) -> None:
    """``x jum`` lies across three tokens, of which the first ends a word."""

    async def script(peer: ScriptedPeer) -> None:
        options: dict[str, Any] = {"stop": ["x jum"], "extra_body": {"include_stop_str_in_output": include}}
        if stream:
            answer = in_background(complete(gateway, **options))
        else:
            answer = in_background(whole(gateway, **options))
        request = await peer.next_request()
        peer.tokens(request, tokenizer.encode(TEXT))
        assert await answer == ("The quick brown fox jum" if include else "The quick brown fo")
        await peer.wait_cancelled(request)

    with_peer(gateway, script)


def test_choices_arrive_interleaved_and_usage_counts_them_all(
    gateway: GatewayProcess, tokenizer: Tokenizer
) -> None:
    texts = ["First choice.", "The second one."]

    async def script(peer: ScriptedPeer) -> None:
        async with client_of(gateway) as client:
            call = asyncio.create_task(
                client.chat.completions.create(
                    **CHAT, n=2, seed=3, stream=True, stream_options={"include_usage": True}
                )
            )
            requests = sorted(
                [await peer.next_request(), await peer.next_request()], key=lambda each: each.sampling.seed
            )
            rows = [tokenizer.encode(text) for text in texts]
            for place in range(max(map(len, rows))):
                for request, row in zip(requests, rows, strict=True):
                    if place < len(row):
                        is_last = place == len(row) - 1
                        finish: FinishReason | None = "length" if is_last else None
                        peer.tokens(request, [row[place]], start=place, finish=finish)
            chunks = [chunk async for chunk in await call]
        found = ["", ""]
        for chunk in chunks[:-1]:
            found[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert found == texts
        usage = chunks[-1].usage
        assert chunks[-1].choices == []
        assert usage is not None
        assert usage.completion_tokens == sum(map(len, rows))
        assert usage.prompt_tokens == len(requests[0].prompt_ids)
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

    with_peer(gateway, script)


@pytest.mark.parametrize("stream", [True, False])
def test_chat_logprobs_name_every_token_with_its_alternatives(
    stream: bool, gateway: GatewayProcess, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("Hello there")
    tokens = [SampledToken(each, -0.5, ((each, -0.5), (7, -2.0))) for each in ids]

    async def script(peer: ScriptedPeer) -> None:
        async with client_of(gateway) as client:
            options: dict[str, Any] = {**CHAT, "logprobs": True, "top_logprobs": 2, "stream": stream}
            call = asyncio.create_task(client.chat.completions.create(**options))
            request = await peer.next_request()
            assert request.sampling.logprobs == 2
            peer.sampled(request, tokens, finish="length")
            answer: Any = await call
            choices = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
        content = [each for choice in choices if choice.logprobs for each in choice.logprobs.content or []]
        assert [each.token for each in content] == [tokenizer.decode([token_id]) for token_id in ids]
        assert all(each.logprob == -0.5 for each in content)
        assert all([top.logprob for top in each.top_logprobs] == [-0.5, -2.0] for each in content)
        assert b"".join(bytes(each.bytes or []) for each in content) == b"Hello there"

    with_peer(gateway, script)


def test_completion_logprobs_are_parallel_lists(gateway: GatewayProcess, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello there")
    tokens = [SampledToken(each, -0.5, ((each, -0.5), (7, -2.0))) for each in ids]

    async def script(peer: ScriptedPeer) -> None:
        async with client_of(gateway) as client:
            call = asyncio.create_task(client.completions.create(**PROMPT, logprobs=2))
            request = await peer.next_request()
            peer.sampled(request, tokens, finish="length")
            logprobs = (await call).choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == [tokenizer.decode([token_id]) for token_id in ids]
        assert logprobs.token_logprobs == [-0.5] * len(ids)
        assert logprobs.text_offset == [0, len("Hello")]
        assert logprobs.top_logprobs is not None
        assert [len(each) for each in logprobs.top_logprobs] == [2] * len(ids)

    with_peer(gateway, script)


def test_a_client_that_reads_nothing_is_cut_and_its_request_ended(gateway: GatewayProcess) -> None:
    async def script(peer: ScriptedPeer) -> None:
        async with raw_client(gateway.port, receive_bytes=4096) as client:
            await client.post(
                "/v1/chat/completions",
                {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 20, "max_tokens": 5000},
            )
            request = await peer.next_request()
            top = tuple((token_id, -1.0) for token_id in range(1000, 1020))
            peer.sampled(request, [SampledToken(1000, -1.0, top)] * 2000)
            await peer.wait_cancelled(request)
            assert b"[DONE]" not in await client.read_to_end()

    with_peer(gateway, script)


def test_half_a_header_is_closed_after_its_time(gateway: GatewayProcess) -> None:
    async def run() -> bytes:
        async with raw_client(gateway.port) as client:
            await client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-half: ")
            return await client.read_to_end()

    assert b"200" not in asyncio.run(run())


@pytest.mark.parametrize("drips", [False, True])
@pytest.mark.parametrize(("path", "status"), [("/v1/completions", b"408"), ("/v1/nowhere", b"404")])
def test_half_a_body_is_given_up_after_its_time(
    path: str, status: bytes, drips: bool, gateway: GatewayProcess
) -> None:
    """Also where the answer did not wait for it, and though a byte comes now and then."""

    async def drip(client: RawClient) -> None:
        with suppress(ConnectionError):
            while drips:
                await asyncio.sleep(0.1)
                await client.send(b" ")

    async def run() -> bytes:
        async with raw_client(gateway.port) as client:
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            await client.send(f"{head}content-length: 1000\r\n\r\n{{".encode())
            dripping = asyncio.create_task(drip(client))
            answer = await client.read_to_end()
            dripping.cancel()
            return answer

    answer = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert (b"gateway.body_timeout_s = 3.5" in answer) == (status == b"408")
    gateway.wait_metric("lamella_open_requests", 0)


def test_bytes_that_begin_no_request_keep_no_connection_open(gateway: GatewayProcess) -> None:
    async def run() -> bytes:
        async with raw_client(gateway.port) as client:
            await client.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
            await client.read_until(b"}]}")
            await client.send(b"\r\n")
            return await client.read_to_end()

    assert asyncio.run(run()) == b""


def test_a_header_without_end_is_refused_before_its_time(gateway: GatewayProcess) -> None:
    """What the server did not read any more may turn its answer into a reset."""

    async def run() -> bytes:
        async with raw_client(gateway.port) as client:
            await client.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-long: ")
            with suppress(ConnectionError):
                await client.send(b"a" * (8 * MAX_HEADER_BYTES))
            return await client.read_to_end()

    answer = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 400 ") or answer.endswith(b"<reset>")
    assert send(f"{gateway.url}/v1/models", None, {"x-long": "a" * 30_000}).status == 200


@pytest.mark.parametrize("place", ["path", "value", "names"])
def test_a_long_header_that_comes_at_once_is_refused_as_any_request_is(
    place: str, gateway: GatewayProcess
) -> None:
    long = "a" * (MAX_HEADER_BYTES + 1)
    path = f"/v1/models?{long}" if place == "path" else "/v1/models"
    lines = {
        "path": "",
        "value": f"x-long: {long}\r\n",
        "names": "x-much: more\r\n" * (MAX_HEADER_BYTES // 10),
    }
    answer = asyncio.run(refusal(gateway, f"GET {path} HTTP/1.1\r\nhost: x\r\n{lines[place]}\r\n"))
    assert answer == {
        "message": f"The header is over {MAX_HEADER_BYTES} bytes.",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


def test_what_is_no_http_is_refused_as_any_request_is(gateway: GatewayProcess) -> None:
    answer = asyncio.run(refusal(gateway, "this is no HTTP\r\n\r\n"))
    assert answer["message"] == "Invalid HTTP request received."


async def refusal(gateway: GatewayProcess, request: str) -> dict[str, object]:
    """The error in the answer, a 400 of JSON and the connection's last."""
    async with raw_client(gateway.port) as client:
        await client.send(request.encode())
        head, _, body = (await client.read_to_end()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head
    error: dict[str, object] = json.loads(body)["error"]
    return error


def test_finished_choices_and_responses_are_counted(gateway: GatewayProcess, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    names = {
        "lamella_request_success_total": 1,
        "lamella_generation_tokens_total": len(ids),
        "lamella_prompt_tokens_total": 3,
        "lamella_http_responses_total": 1,
        "lamella_client_disconnects_total": 0,
        "lamella_requests_refused_total": 0,
        "lamella_request_prompt_tokens_sum": 3,
        "lamella_request_generation_tokens_sum": len(ids),
        "lamella_decode_time_seconds_count": 1,
        "lamella_end_to_end_seconds_count": 1,
    }
    before = {name: gateway.metric(name) for name in names}

    async def script(peer: ScriptedPeer) -> None:
        answer = in_background(whole(gateway))
        peer.tokens(await peer.next_request(), ids, finish="length")
        assert await answer == TEXT

    with_peer(gateway, script)
    assert {name: gateway.metric(name) - before[name] for name in names} == names


@pytest.mark.parametrize(("headers", "judged"), [({}, 1), ({"x-lamella-probe": "1"}, 0)])
def test_a_probe_says_nothing_about_what_users_were_promised(
    headers: dict[str, str], judged: int, gateway: GatewayProcess, tokenizer: Tokenizer
) -> None:
    """`lamella status` told a new mesh's user of a request that the launcher had made."""
    before = gateway.metric("lamella_requests_judged_total")

    async def script(peer: ScriptedPeer) -> None:
        answer = in_background(whole(gateway, extra_headers=headers))
        peer.tokens(await peer.next_request(), tokenizer.encode(TEXT), finish="length")
        assert await answer == TEXT

    with_peer(gateway, script)
    assert gateway.metric("lamella_requests_judged_total") - before == judged


def test_too_many_open_requests_are_refused_with_a_time_to_come_back(gateway: GatewayProcess) -> None:
    limit = gateway.config.gateway.max_open_requests

    def refused() -> float:
        return gateway.metric("lamella_requests_refused_total", 'reason="overloaded"')

    async def script(peer: ScriptedPeer) -> None:
        async with client_of(gateway) as client:
            held = asyncio.create_task(client.completions.create(**PROMPT, n=limit))
            requests = [await peer.next_request() for _ in range(limit)]
            with pytest.raises(openai.InternalServerError) as caught:
                await client.completions.create(**PROMPT)
            assert (caught.value.status_code, caught.value.code) == (503, "overloaded")
            assert int(caught.value.response.headers["retry-after"]) >= 1
            for request in requests:
                peer.tokens(request, [1000], finish="length")
            assert len((await held).choices) == limit

    before = refused()
    with_peer(gateway, script)
    assert refused() == before + 1


def test_a_burst_is_admitted_up_to_the_limit(gateway: GatewayProcess) -> None:
    limit = gateway.config.gateway.max_open_requests

    async def script(peer: ScriptedPeer) -> None:
        async with client_of(gateway) as client:
            calls = [asyncio.create_task(client.completions.create(**PROMPT)) for _ in range(3 * limit)]
            for _ in range(limit):
                await peer.next_request()
            refusals = await first_done(calls, 2 * limit)
            assert {error.status_code for error in refusals} == {503}
            assert peer.submissions.empty()
            for call in calls:
                call.cancel()

    with_peer(gateway, script)


async def first_done(calls: Sequence[asyncio.Task[Any]], count: int) -> list[openai.APIStatusError]:
    """The refusals of the first ``count`` calls that end; they must be refusals."""
    errors: list[openai.APIStatusError] = []
    for ended in asyncio.as_completed(calls):
        with pytest.raises(openai.APIStatusError) as caught:
            await ended
        errors.append(caught.value)
        if len(errors) == count:
            break
    return errors
