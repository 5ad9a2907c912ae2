"""`lamella chat`: a conversation in the terminal, streamed from any OpenAI-compatible server."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
from rich.console import Console

from common.errors import LamellaError
from services.server_url import parse_url

CONNECT_TIMEOUT_S = 5.0


class ChatError(LamellaError):
    """The server refused, or broke off."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """``api_key``: for a server that wants one."""

    url: str
    model: str = "default"
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    api_key: str | None = None


@dataclass(slots=True)
class Conversation:
    """What was said so far; every answer is added, so the next question has its context."""

    options: ChatOptions
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.options.system is not None:
            self.messages.append({"role": "system", "content": self.options.system})

    async def ask(self, session: aiohttp.ClientSession, question: str) -> AsyncIterator[str]:
        """Yields the answer's text as it comes. Raises ChatError; a failed turn leaves no trace."""
        turn = [*self.messages, {"role": "user", "content": question}]
        answer: list[str] = []
        async for text in _stream(session, self.options, turn):
            answer.append(text)
            yield text
        self.messages = [*turn, {"role": "assistant", "content": "".join(answer)}]


async def _stream(
    session: aiohttp.ClientSession, options: ChatOptions, messages: list[dict[str, str]]
) -> AsyncIterator[str]:
    body: dict[str, object] = {"model": options.model, "messages": messages, "stream": True}
    for name in ("max_tokens", "temperature", "seed"):
        if (value := getattr(options, name)) is not None:
            body[name] = value
    url = parse_url(options.url).base_url + "/v1/chat/completions"
    headers = {} if options.api_key is None else {"authorization": f"Bearer {options.api_key}"}
    try:
        async with session.post(url, json=body, headers=headers) as response:
            if response.status != 200:
                raise ChatError(_error_text(await response.text(), response.status))
            if response.content_type != "text/event-stream":
                raise ChatError(f"{url} answers with {response.content_type}, not with a stream of events")
            is_done = False
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    is_done = True
                    continue
                yield _text_of(line[6:])
            if not is_done:
                raise ChatError("the answer broke off")
    except aiohttp.ClientError as exc:
        raise ChatError(f"{url}: {exc}") from exc


def _text_of(event: bytes) -> str:
    """What a chunk adds to the answer. Raises ChatError for an error event, or one that is no chunk."""
    try:
        content = json.loads(event)
        if "error" in content:
            raise ChatError(str(content["error"]["message"]))
        return "".join(choice["delta"].get("content") or "" for choice in content["choices"])
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ChatError(f"no chunk of a chat completion: {event[:200]!r}") from exc


def _error_text(body: str, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}: {body[:200]}"


async def chat(options: ChatOptions, question: str | None, console: Console) -> None:
    """Answers one ``question``, or talks until end of input (Ctrl-D). Ctrl-C stops an answer's stream."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    conversation = Conversation(options)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        if question is not None:
            await _answer(conversation, session, question, console)
            return
        console.print("[dim]Ctrl-D ends the conversation.[/dim]")
        while True:
            try:
                line = console.input("[bold cyan]you[/bold cyan] › ").strip()
            except EOFError:
                console.print()
                return
            if not line:
                continue
            try:
                await _answer(conversation, session, line, console)
            except ChatError as exc:
                console.print(f"[red]{exc}[/red]")


async def _answer(
    conversation: Conversation, session: aiohttp.ClientSession, question: str, console: Console
) -> None:
    async for text in conversation.ask(session, question):
        console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
    console.print()
