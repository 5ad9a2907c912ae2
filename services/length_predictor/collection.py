"""How long a target model's outputs are: asked over HTTP, and kept in a file as they come.

Prompts go as token ids to ``/v1/completions``, greedily, ``max_tokens`` at most. A run that is ended goes on
where it was: what is in the file is not asked again. The file is one that the oracle reads, too.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import aiohttp
import msgspec

from common.errors import ConfigError, LamellaError
from services.length_predictor.oracle import KnownLength, digest_of, read_lengths
from services.server_url import parse_url

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 900.0
TRIES = 20
"""Of one prompt, where the server is full."""
LONGEST_PAUSE_S = 10.0


class CollectionError(LamellaError):
    """The target does not answer as an OpenAI-compatible server does."""


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Choice(msgspec.Struct):
    finish_reason: str


class _Completion(msgspec.Struct):
    usage: _Usage
    choices: tuple[_Choice, ...]


class KnownLengths:
    """A file of lengths that grows. Used by one process at a time."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, KnownLength] = {}
        if file.exists():
            _drop_torn_line(file)
            lines = read_lengths(file, "--output")
            self._known = {known.prompt: known for known in lines if known.prompt is not None}

    def length_of(self, prompt_ids: Sequence[int], max_tokens: int) -> int | None:
        """As it would be with that bound; None where that is not known."""
        known = self._known.get(digest_of(prompt_ids))
        if known is None or (known.is_cut and known.output_tokens < max_tokens):
            return None
        return min(known.output_tokens, max_tokens)

    def add(self, known: KnownLength, out: BinaryIO) -> None:
        assert known.prompt is not None
        self._known[known.prompt] = known
        out.write(msgspec.json.encode(known) + b"\n")
        out.flush()

    def open(self) -> BinaryIO:
        """To be written behind what there is. Raises ConfigError."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            return self._file.open("ab")
        except OSError as exc:
            raise ConfigError(
                "--output", str(self._file.parent), f"cannot be written ({exc.strerror})"
            ) from exc


def _drop_torn_line(file: Path) -> None:
    """What a process that was killed amid a line has left of it."""
    data = file.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(file, whole)


async def collect_lengths(
    url: str,
    prompts: Sequence[tuple[int, ...]],
    known: KnownLengths,
    *,
    max_tokens: int,
    concurrency: int,
    on_done: Callable[[], None],
) -> int:
    """Asks for what is not known yet; how many prompts the target refused (too long for its context).

    Raises CollectionError; what came until then is kept.
    """
    asked = iter([each for each in prompts if known.length_of(each, max_tokens) is None])
    endpoint = parse_url(url).base_url + "/v1/completions"
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
    refused = 0

    async def ask_in_turn(session: aiohttp.ClientSession, out: BinaryIO) -> None:
        nonlocal refused
        for prompt_ids in asked:
            found = await _ask(session, endpoint, prompt_ids, max_tokens)
            if found is None:
                refused += 1
            else:
                known.add(found, out)
            on_done()

    with known.open() as out:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(concurrency):
                        tasks.create_task(ask_in_turn(session, out))
            except ExceptionGroup as group:
                raise group.exceptions[0] from group
    return refused


async def _ask(
    session: aiohttp.ClientSession, endpoint: str, prompt_ids: tuple[int, ...], max_tokens: int
) -> KnownLength | None:
    """None: the prompt is refused."""
    body = {
        "model": "default",
        "prompt": prompt_ids,
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    for _ in range(TRIES):
        try:
            async with session.post(endpoint, json=body) as response:
                content = await response.read()
                status, retry_after = response.status, response.headers.get("retry-after", "1")
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise CollectionError(f"{endpoint}: {exc or 'no answer in time'}") from exc
        if status == 200:
            return _known_of(endpoint, prompt_ids, content)
        if status in (400, 413, 422):
            return None
        if status not in (429, 503):
            raise CollectionError(f"{endpoint} answered with {status}: {content[:300]!r}")
        # The server says when to come back.
        await asyncio.sleep(min(LONGEST_PAUSE_S, float(retry_after) if retry_after.isdecimal() else 1.0))
    raise CollectionError(f"{endpoint} was full {TRIES} times in a row")


def _known_of(endpoint: str, prompt_ids: tuple[int, ...], content: bytes) -> KnownLength:
    try:
        answer = msgspec.json.decode(content, type=_Completion)
        is_cut = answer.choices[0].finish_reason == "length"
    except (msgspec.DecodeError, IndexError) as exc:
        raise CollectionError(f"{endpoint}: no completion: {content[:300]!r}") from exc
    return KnownLength(max(1, answer.usage.completion_tokens), digest_of(prompt_ids), is_cut)
