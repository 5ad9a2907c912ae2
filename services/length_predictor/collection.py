"""How long a target model's outputs are: asked over HTTP, and kept in a file as they come.

Prompts go as token ids to ``/v1/completions``, ``max_tokens`` at most. A run that is ended goes on where it
was: what is in the file is not asked again. The file is one that the oracle reads, too.

They are asked at one temperature: small models that draw greedily fall into a circle, and their outputs are
as long as they may be. Each prompt has a seed of its own, so that asking again gives the same.
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
ANSWER_TIMEOUT_S = 3600.0
"""All prompts share the target, and on a busy machine one has waited for more than a quarter of an hour."""
TRIES = 20
"""Of one prompt, where the server is full."""
LONGEST_PAUSE_S = 10.0
SEED_DIGITS = 7
"""Of a digest, in hexadecimal: every server takes a seed of so many bits."""


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
    """A file of lengths that grows. Used by one process at a time; of what was drawn at another
    ``temperature`` it knows nothing."""

    def __init__(self, file: Path, temperature: float) -> None:
        self.temperature = temperature
        self._file = file
        self._known: dict[str, KnownLength] = {}
        if file.exists():
            _drop_torn_line(file)
            lines = read_lengths(file, "--output")
            self._known = {
                known.prompt: known
                for known in lines
                if known.prompt is not None and known.temperature == temperature
            }

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
            found = await _ask(session, endpoint, prompt_ids, max_tokens, known.temperature)
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
    session: aiohttp.ClientSession,
    endpoint: str,
    prompt_ids: tuple[int, ...],
    max_tokens: int,
    temperature: float,
) -> KnownLength | None:
    """None: the prompt is refused."""
    digest = digest_of(prompt_ids)
    body = {
        "model": "default",
        "prompt": prompt_ids,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": int(digest[:SEED_DIGITS], 16),
    }
    for _ in range(TRIES):
        try:
            async with session.post(endpoint, json=body) as response:
                content = await response.read()
                status, retry_after = response.status, response.headers.get("retry-after", "1")
        except TimeoutError as exc:
            raise CollectionError(f"{endpoint}: no answer in time") from exc
        except aiohttp.ClientError as exc:
            raise CollectionError(f"{endpoint}: {exc}") from exc
        if status == 200:
            output_tokens, is_cut = _read_completion(endpoint, content)
            return KnownLength(output_tokens, digest, is_cut, temperature)
        if status in (400, 413, 422):
            return None
        if status not in (429, 503):
            raise CollectionError(f"{endpoint} answered with {status}: {content[:300]!r}")
        # The server says when to come back.
        await asyncio.sleep(min(LONGEST_PAUSE_S, float(retry_after) if retry_after.isdecimal() else 1.0))
    raise CollectionError(f"{endpoint} was full {TRIES} times in a row")


def _read_completion(endpoint: str, content: bytes) -> tuple[int, bool]:
    """How long it is, and whether it was cut short there."""
    try:
        answer = msgspec.json.decode(content, type=_Completion)
        return max(1, answer.usage.completion_tokens), answer.choices[0].finish_reason == "length"
    except (msgspec.DecodeError, IndexError) as exc:
        raise CollectionError(f"{endpoint}: no completion: {content[:300]!r}") from exc
