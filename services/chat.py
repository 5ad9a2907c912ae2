"""`lamella chat`: a conversation in the terminal, streamed from any OpenAI-compatible server."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
from rich.console import Console

from common.errors import LamellaError

CONNECT_TIMEOUT_S = 5.0


class ChatError(LamellaError):
    """The server refused, or broke off."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    url: str
    model: str = "default"
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None


@dataclass(slots=True)
class Conversation:
    """What was said so far; every answer is added, so the next question has its context."""

    options: ChatOptions
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.options.system is not None:
            self.messages.append({"role": "system", "content": self.options.system})

    async def ask(self, client: httpx.AsyncClient, question: str) -> AsyncIterator[str]:
        """Yields the answer's text as it comes. Raises ChatError; a failed turn leaves no trace."""
        turn = [*self.messages, {"role": "user", "content": question}]
        answer: list[str] = []
        async for text in _stream(client, self.options, turn):
            answer.append(text)
            yield text
        self.messages = [*turn, {"role": "assistant", "content": "".join(answer)}]


async def _stream(
    client: httpx.AsyncClient, options: ChatOptions, messages: list[dict[str, str]]
) -> AsyncIterator[str]:
    body: dict[str, object] = {"model": options.model, "messages": messages, "stream": True}
    for name in ("max_tokens", "temperature", "seed"):
        if (value := getattr(options, name)) is not None:
            body[name] = value
    url = options.url.rstrip("/") + "/v1/chat/completions"
    try:
        async with client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                raise ChatError(_error_text((await response.aread()).decode(), response.status_code))
            is_done = False
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    is_done = True
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ChatError(event["error"]["message"])
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""
            if not is_done:
                raise ChatError("the answer broke off")
    except httpx.HTTPError as exc:
        raise ChatError(f"{url}: {exc}") from exc


def _error_text(body: str, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}: {body[:200]}"


async def chat(options: ChatOptions, question: str | None, console: Console) -> None:
    """Answers one ``question``, or talks until end of input (Ctrl-D). Ctrl-C stops an answer's stream."""
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    conversation = Conversation(options)
    async with httpx.AsyncClient(timeout=timeout) as client:
        if question is not None:
            await _answer(conversation, client, question, console)
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
                await _answer(conversation, client, line, console)
            except ChatError as exc:
                console.print(f"[red]{exc}[/red]")


async def _answer(
    conversation: Conversation, client: httpx.AsyncClient, question: str, console: Console
) -> None:
    async for text in conversation.ask(client, question):
        console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
    console.print()
