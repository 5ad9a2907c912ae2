"""The gateway in a mesh of emulated instances, as the official client sees it."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from services.launcher import embedded
from tests.e2e.meshes import Mesh, running_mesh
from tests.gateway.clients import PROMPT as ONE_PROMPT
from tests.gateway.conftest import gateway_config
from tests.gateway.processes import running_gateway, send
from tests.gateway.raw_http import raw_client
from tests.gateway.scripted import scripted_peer

CONFIG = """
[instance]
engine = "emulated"
block_size = 16
[emulation]
prefill_base_s = 0.05
decode_base_s = 0.01
total_blocks = 256
[scheduler]
max_requests_per_decode = 8
"""
PROMPT = list(range(100, 140))
# An emulated token may be any token, the end token too.
ON: dict[str, Any] = {"ignore_eos": True}


@pytest.fixture(scope="module")
def mesh(nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    directory = tmp_path_factory.mktemp("service") / "mesh"
    with running_mesh(directory, "--nats", nats_url, "--redis", redis_url, config=CONFIG) as mesh:
        yield mesh


@pytest.fixture
def client(mesh: Mesh) -> Iterator[openai.OpenAI]:
    """Afterwards nothing may be open, waiting or held, anywhere in the mesh."""
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client
    assert asyncio.run(mesh.left_over()) == {}


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_streamed_text_is_the_text_that_is_not_streamed(kind: str, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "default", "max_tokens": 30, "seed": 4, "extra_body": ON}
    if kind == "chat":
        options["messages"] = [{"role": "user", "content": "Hi"}]
        whole = client.chat.completions.create(**options).choices[0].message.content
        chunks = client.chat.completions.create(**options, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        options["prompt"] = PROMPT
        whole = client.completions.create(**options).choices[0].text
        streamed = "".join(
            chunk.choices[0].text for chunk in client.completions.create(**options, stream=True)
        )
    assert whole
    assert streamed == whole


def test_choices_have_seeds_of_their_own_and_usage_counts_them(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="default", prompt=PROMPT, n=3, max_tokens=12, seed=1, extra_body=ON
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 36)


def test_several_prompts_give_each_their_choices_in_order(client: openai.OpenAI) -> None:
    prompts = [PROMPT, PROMPT[:7]]
    options: dict[str, Any] = {"model": "default", "max_tokens": 8, "extra_body": ON}
    together = client.completions.create(prompt=prompts, seed=9, **options)
    alone = [
        client.completions.create(prompt=prompt, seed=9 + index, **options).choices[0].text
        for index, prompt in enumerate(prompts)
    ]
    assert [choice.text for choice in together.choices] == alone


def test_echo_puts_the_prompt_before_the_text(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "default", "prompt": "Once upon", "max_tokens": 5, "seed": 2}
    plain = client.completions.create(**options, extra_body=ON).choices[0].text
    assert (
        client.completions.create(**options, echo=True, extra_body=ON).choices[0].text == "Once upon" + plain
    )


def test_a_stop_string_ends_the_text_and_frees_the_mesh(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "default", "prompt": PROMPT, "max_tokens": 400, "seed": 3}
    start = client.completions.create(**{**options, "max_tokens": 20}, extra_body=ON).choices[0].text
    stop = start[5:9]
    answer = client.completions.create(**options, stop=stop, extra_body=ON).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.text == start[: start.index(stop)]


def test_a_sequence_that_no_instance_can_hold_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="default", prompt=PROMPT, max_tokens=256 * 16)
    assert caught.value.code == "context_length_exceeded"


def test_more_requests_than_the_mesh_takes_are_refused_and_the_others_served(client: openai.OpenAI) -> None:
    async def run() -> list[object]:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0) as many:
            calls = [
                many.completions.create(model="default", prompt=PROMPT, max_tokens=400, extra_body=ON)
                for _ in range(14)
            ]
            return list(await asyncio.gather(*calls, return_exceptions=True))

    results = asyncio.run(run())
    refused = [each for each in results if isinstance(each, openai.InternalServerError)]
    assert len(results) - len(refused) == 8
    for error in refused:
        assert (error.status_code, error.code) == (503, "overloaded")
        assert int(error.response.headers["retry-after"]) >= 1


def test_clients_that_leave_at_any_moment_leave_nothing(client: openai.OpenAI, mesh: Mesh) -> None:
    async def leave(index: int) -> None:
        port = int(mesh.url.rpartition(":")[2])
        async with raw_client(port) as raw:
            body = {"model": "default", "prompt": PROMPT, "max_tokens": 400, "stream": index % 2 == 0, **ON}
            await raw.post("/v1/completions", body)
            if index % 4 == 0:
                await raw.read_until(b"data: ")
            else:
                await asyncio.sleep(0.01 * index)

    async def run() -> None:
        await asyncio.gather(*(leave(index) for index in range(8)))

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/nowhere"])
def test_a_gateway_that_starts_says_so_instead_of_knowing_no_path(
    path: str, redis_url: str, tmp_path: Path
) -> None:
    """Its NATS takes connections and says nothing, so that it cannot get further."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = gateway_config(f"nats://127.0.0.1:{silent.getsockname()[1]}", redis_url)
        with running_gateway(config, tmp_path, until="service_listening") as gateway:
            answer = send(f"{gateway.url}{path}", None)
            assert (answer.status, answer.error["code"]) == (503, "no_instance_ready")
            assert answer.headers["retry-after"] == "1"
            assert send(f"{gateway.url}/health/live", None).status == 200
            assert send(f"{gateway.url}/health/ready", None).status == 503


def test_a_gateway_that_drains_finishes_its_streams_and_takes_no_more(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = gateway_config(nats_url, redis_url)
    directory = tmp_path_factory.mktemp("drain")

    async def run() -> None:
        async with (
            scripted_peer(gateway) as peer,
            openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
        ):
            call = asyncio.create_task(client.completions.create(**ONE_PROMPT, stream=True))
            request = await peer.next_request()
            peer.tokens(request, [1000])
            stream = await call
            first = await anext(aiter(stream))
            gateway.popen.send_signal(signal.SIGTERM)
            refusal = await wait_refused(client)
            peer.tokens(request, [1001, 1002], start=1, finish="length")
            rest = [chunk.choices[0] async for chunk in stream]
        assert (refusal.status_code, refusal.code) == (503, "no_instance_ready")
        assert "draining" in refusal.message
        assert int(refusal.response.headers["retry-after"]) >= 1
        assert first.choices[0].text
        assert rest[-1].finish_reason == "length"

    with running_gateway(config, directory) as gateway:
        asyncio.run(run())
        assert gateway.popen.wait(10) == 0


def test_streams_that_outlive_the_drain_end_with_an_error(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = gateway_config(nats_url, redis_url)
    config = msgspec.structs.replace(config, mesh=msgspec.structs.replace(config.mesh, drain_timeout_s=0.3))

    async def run() -> None:
        async with scripted_peer(gateway) as peer, raw_client(gateway.port) as client:
            await client.post("/v1/completions", {**ONE_PROMPT, "stream": True})
            request = await peer.next_request()
            peer.tokens(request, [1000])
            await client.read_until(b"data: ")
            gateway.popen.send_signal(signal.SIGTERM)
            rest = await client.read_to_end()
            assert b'data: {"error":' in rest
            assert b"[DONE]" not in rest
            await peer.wait_cancelled(request)
            assert await peer.next_ended() == request.request_id

    with running_gateway(config, tmp_path_factory.mktemp("outlived")) as gateway:
        asyncio.run(run())
        assert gateway.popen.wait(10) == 0


def test_streams_do_not_wait_for_ever_for_a_bus_that_hangs(redis_url: str, tmp_path: Path) -> None:
    server = embedded.prepare_nats(tmp_path)
    nats = embedded.start(server)
    config = gateway_config(server.url, redis_url)
    patient = msgspec.structs.replace(config.gateway, token_timeout_s=60.0, bus_timeout_s=0.5)
    config = msgspec.structs.replace(config, gateway=patient)

    async def run() -> None:
        async with scripted_peer(gateway) as peer, raw_client(gateway.port) as client:
            await client.post("/v1/completions", {**ONE_PROMPT, "stream": True})
            peer.tokens(await peer.next_request(), [1000])
            await client.read_until(b"data: {")
            os.kill(nats.pid, signal.SIGSTOP)
            try:
                rest = await client.read_until(b"0\r\n\r\n")
            finally:
                os.kill(nats.pid, signal.SIGCONT)
            assert b"the mesh has not answered for 0.5 s" in rest
            assert b"[DONE]" not in rest

    try:
        with running_gateway(config, tmp_path / "gateway") as gateway:
            asyncio.run(run())
    finally:
        embedded.stop(nats)


async def wait_refused(client: openai.AsyncOpenAI) -> openai.InternalServerError:
    """The refusal, once the gateway drains; a request that is still taken waits, and is given up."""
    async with asyncio.timeout(10):
        while True:
            try:
                await client.completions.create(**ONE_PROMPT, timeout=0.2)
            except openai.APITimeoutError:
                continue
            except openai.InternalServerError as error:
                return error
