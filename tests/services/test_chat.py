"""A conversation over a real socket, also with servers that misbehave."""

import io

import pytest
from rich.console import Console

from common.errors import ConfigError
from services.chat import ChatError, ChatOptions, chat
from tests.services.bench.local_server import Behaviour, LocalServer

pytestmark = pytest.mark.anyio


async def say(url: str) -> str:
    """The text of one answer of three tokens."""
    shown = io.StringIO()
    await chat(ChatOptions(url, max_tokens=3), "Hello?", Console(file=shown, width=200))
    return shown.getvalue()


@pytest.mark.parametrize("form", ["{0}", "{0}/", "{0}/v1", "{0}/v1/chat/completions", "127.0.0.1:{1}"])
async def test_an_answer_streams_from_any_form_of_the_address(form: str) -> None:
    async with LocalServer() as server:
        assert await say(form.format(server.url, server.port)) == " word word word\n"


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (Behaviour.OVERLOADED, "full"),
        (Behaviour.ERROR_EVENT, "lost"),
        (Behaviour.UNFINISHED, "broke off"),
        (Behaviour.BREAK_OFF, "127.0.0.1"),
        (Behaviour.MALFORMED_EVENT, "no chunk of a chat completion"),
        (Behaviour.NOT_A_STREAM, "not with a stream of events"),
        (Behaviour.NOT_HTTP, "127.0.0.1"),
    ],
)
async def test_whatever_a_server_does_the_reason_is_told(behaviour: Behaviour, message: str) -> None:
    async with LocalServer(behaviour) as server:
        with pytest.raises(ChatError, match=message):
            await say(server.url)


async def test_nobody_at_the_address_is_told_with_the_address(free_tcp_port: int) -> None:
    with pytest.raises(ChatError, match=f"127.0.0.1:{free_tcp_port}"):
        await say(f"127.0.0.1:{free_tcp_port}")


async def test_what_is_no_address_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ConfigError, match="--url"):
        await say("ftp://127.0.0.1")
