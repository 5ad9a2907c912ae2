"""Nothing that a user wrote, or was answered, stands in any log of a mesh, whatever goes wrong meanwhile."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from common.errors import InvalidRequest
from common.ids import GatewayId, Incarnation, InstanceId, new_request_id
from common.messages import Acknowledged, GenerationRequest, PrefillTask, SamplingParams
from common.model.default_model import default_model_directory
from common.model.tokens import Tokenizer
from tests.e2e.meshes import Mesh, running_mesh
from tests.gateway.processes import send

SECRET = "xylophone quokka zeppelin"
MARKED = {"x-request-id": "Marked.by-its_client"}
CONFIG = """
[mesh]
heartbeat_s = 0.5
lease_s = 1.0
[instance]
engine = "emulated"
block_size = 16
[emulation]
decode_base_s = 0.01
total_blocks = 512
context_length = 2048
"""
LONG_STREAM_TOKENS = 400
GLOG_LINE = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+:\d+\] ")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    directory = tmp_path_factory.mktemp("logs") / "mesh"
    with running_mesh(directory, "--decode", "2", config=CONFIG) as mesh:
        yield mesh


def log_lines(mesh: Mesh) -> list[dict[str, object]]:
    """Of all services, each line of which is JSON but for what Mooncake says there by itself, as glog writes
    it; the servers' own logs are none of ours."""
    lines: list[dict[str, object]] = []
    for file in sorted((mesh.state_dir / "logs").glob("*-?.log")):
        own = [line for line in file.read_text().splitlines() if not GLOG_LINE.match(line)]
        lines += map(json.loads, own)
    return lines


def what_users_wrote() -> list[str]:
    """The secret as a text, as a template or JSON writes it, and as tokens."""
    tokenizer = Tokenizer(default_model_directory(Path("~/.cache/lamella")))
    ids = tokenizer.encode(SECRET)
    as_token_ids = [separator.join(map(str, ids[1:4])) for separator in (", ", ",", " ")]
    return [*SECRET.split(), *as_token_ids]


class Malformed(msgspec.Struct, tag="prefill"):
    """A PrefillTask whose request is a text."""

    request: str


async def whole_stream(mesh: Mesh, tokens: int, begun: asyncio.Event | None = None) -> tuple[str, str]:
    """The id and the text of the answer."""
    async with mesh.client() as client:
        stream = await client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": SECRET}],
            max_tokens=tokens,
            stream=True,
            extra_headers=MARKED,
            extra_body={"ignore_eos": True},
        )
        texts, answer_id = [], ""
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content or "")
            answer_id = chunk.id
            if begun is not None:
                begun.set()
        return answer_id, "".join(texts)


async def leave_amid(mesh: Mesh) -> None:
    begun = asyncio.Event()
    stream = asyncio.create_task(whole_stream(mesh, LONG_STREAM_TOKENS, begun))
    await begun.wait()
    stream.cancel()


async def outlive_a_death(mesh: Mesh) -> None:
    """Streams on both decode instances, one of which is killed."""
    decode_pid = mesh.pid_of("decode")
    begun = [asyncio.Event() for _ in range(4)]
    streams = [asyncio.create_task(whole_stream(mesh, LONG_STREAM_TOKENS, event)) for event in begun]
    for event in begun:
        await event.wait()
    os.kill(decode_pid, signal.SIGKILL)
    await asyncio.gather(*streams)


async def send_what_is_malformed(mesh: Mesh) -> None:
    """To an instance: a message of another shape, and one that its state did not expect."""
    calls = mesh.subjects.instance_calls(InstanceId("prefill-0"))
    async with mesh.bus() as bus:
        with pytest.raises(InvalidRequest, match="malformed"):
            await bus.call(calls, Malformed(SECRET), Acknowledged, 5.0)
        tokenizer = Tokenizer(default_model_directory(Path("~/.cache/lamella")))
        request = GenerationRequest(
            request_id=new_request_id(),
            gateway_id=GatewayId("nobody"),
            prompt_ids=tuple(tokenizer.encode(SECRET)),
            sampling=SamplingParams(max_tokens=4),
        )
        task = PrefillTask(request, InstanceId("nobody"), Incarnation("none"))
        await bus.call(calls, task, Acknowledged, 5.0)


def ask_wrongly(mesh: Mesh) -> list[int]:
    """The statuses of what cannot be served, each with the secret in it."""
    chat, text = f"{mesh.url}/v1/chat/completions", f"{mesh.url}/v1/completions"
    message = {"role": "user", "content": SECRET}
    answers = [
        send(chat, f'{{"messages": ["{SECRET}'.encode()),
        send(chat, {"model": "default", "messages": SECRET}),
        send(chat, {"model": SECRET, "messages": [message]}),
        send(chat, {"model": "default", "messages": [message], "stop": [SECRET * 20]}),
        send(text, {"model": "default", "prompt": SECRET * 2000}),
        send(f"{mesh.url}/{SECRET.split()[0]}", None),
        send(f"{mesh.url}/tokenize", {"model": "default", "prompt": SECRET}),
        send(text, {"model": "default", "prompt": SECRET, "echo": True, "max_tokens": 3, "stop": SECRET}),
    ]
    return [answer.status for answer in answers]


def test_nothing_that_a_user_wrote_or_was_answered_stands_in_a_log(mesh: Mesh) -> None:
    answer_id, answer = asyncio.run(whole_stream(mesh, 20))
    assert ask_wrongly(mesh) == [400, 400, 404, 400, 400, 404, 200, 200]
    asyncio.run(leave_amid(mesh))
    asyncio.run(send_what_is_malformed(mesh))
    asyncio.run(outlive_a_death(mesh))
    asyncio.run(mesh.wait_ready(3))

    lines = log_lines(mesh)
    told = {str(line["event"]) for line in lines}
    assert told >= {"call_ended", "sequence_continued", "bus_malformed_message", "offer_refused"}, told
    everything = "".join(file.read_text(errors="replace") for file in (mesh.state_dir / "logs").iterdir())
    found = [secret for secret in [*what_users_wrote(), answer[:20]] if secret in everything]
    assert found == []

    calls = [line for line in lines if line["event"] == "call_ended"]
    [first, *_] = [line for line in calls if line["http_request"] == MARKED["x-request-id"]]
    assert first["requests"] == [answer_id.removeprefix("chatcmpl-")]
    known = {request for line in calls for request in list_of(line["requests"])}
    continued = [line["request"] for line in lines if line["event"] == "sequence_continued"]
    assert continued
    assert set(continued) <= known


def list_of(value: object) -> list[object]:
    assert isinstance(value, list)
    return value
