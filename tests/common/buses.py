"""Buses of a test over a real nats-server, and what they say to each other."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec

from common.bus import Bus
from common.subjects import Subjects

Result = TypeVar("Result")
WAIT_S = 20.0


class Question(msgspec.Struct, frozen=True, tag="question"):
    text: str


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    text: str


def run(work: Awaitable[Result]) -> Result:
    async def bounded() -> Result:
        async with asyncio.timeout(WAIT_S):
            return await work

    return asyncio.run(bounded())


@asynccontextmanager
async def connected(url: str, namespace: str, name: str = "a") -> AsyncIterator[Bus]:
    bus = Bus(url, name=name, subjects=Subjects(namespace))
    await bus.connect(timeout_s=WAIT_S)
    try:
        yield bus
    finally:
        await bus.close()


@asynccontextmanager
async def pair(url: str, namespace: str) -> AsyncIterator[tuple[Bus, Bus]]:
    async with connected(url, namespace, "a") as one, connected(url, namespace, "b") as other:
        yield one, other


async def echo(question: Question) -> Answer:
    return Answer(question.text)


async def until(condition: Callable[[], Any], bus: Bus) -> None:
    """Lets the loop turn, by round trips to the server, until ``condition`` holds."""
    while not condition():
        await bus.flush()
