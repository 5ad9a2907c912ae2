"""Measures from how many tokens on a prompt's KV is best handed over layer by layer (Splitwise 4.4).

Two meshes of one prefill and one decode instance on this machine, one for either way, are asked in turn.
What counts is when the second token comes: it waits for the computation, which sending meanwhile may slow
down, and for what of the KV is still to be sent then.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack

import aiohttp
import msgspec

from common.config import Config, TransferConfig
from common.errors import ServiceError
from common.profile import HandOverTimes, link_of
from scheduler.policy.hand_over import layerwise_threshold
from services.bench.stream import CompletionStream
from services.launcher.passing_mesh import passing_mesh

PROMPT_TOKENS = (64, 128, 256, 512, 1024)
OUTPUT_TOKENS = 4
"""The last may show nothing: its bytes wait for the rest of a character."""
NEVER = 1 << 30
"""Tokens; no prompt is as long."""
ANSWER_TIMEOUT_S = 300.0
CONNECT_TIMEOUT_S = 5.0
VOCABULARY = range(100, 1000)
"""Tokens that every vocabulary has: which they are takes no time."""

Status = Callable[[str], AbstractContextManager[object]]


class HandOverError(ServiceError):
    """A mesh that was started to measure hand-overs did not answer as it should."""


def measure_hand_overs(
    config: Config, context_length: int, rounds: int, status: Status, progress: Callable[[int], None]
) -> HandOverTimes:
    """``progress``: prompts that have been measured. Raises HandOverError."""
    lengths = [tokens for tokens in PROMPT_TOKENS if tokens + OUTPUT_TOKENS <= context_length]
    with ExitStack() as meshes:
        urls = [
            meshes.enter_context(passing_mesh(_with_layerwise_from(config, tokens), status))
            for tokens in (NEVER, 1)
        ]
        taken = asyncio.run(_ask_in_turn(urls, lengths, rounds, progress))
    return times_of(taken, config.transfer)


def times_of(taken: Mapping[int, Sequence[Sequence[float]]], transfer: TransferConfig) -> HandOverTimes:
    """``taken``: seconds by a prompt's tokens, of every round, serialized and layer by layer."""
    medians = {
        tokens: (statistics.median(serialized), statistics.median(layerwise))
        for tokens, (serialized, layerwise) in taken.items()
    }
    return HandOverTimes(
        link=link_of(transfer),
        until_second_s=tuple((tokens, *both) for tokens, both in medians.items()),
        layerwise_min_tokens=layerwise_threshold(medians),
    )


def _with_layerwise_from(config: Config, tokens: int) -> Config:
    transfer = msgspec.structs.replace(config.transfer, layerwise_min_tokens=tokens)
    return msgspec.structs.replace(config, transfer=transfer)


async def _ask_in_turn(
    urls: Sequence[str], lengths: Sequence[int], rounds: int, progress: Callable[[int], None]
) -> dict[int, list[list[float]]]:
    taken: dict[int, list[list[float]]] = {tokens: [[] for _ in urls] for tokens in lengths}
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for url in urls:  # the first prompt touches memory and makes contact
            await _until_second_token_s(session, url, max(lengths), seed=-1)
        done = 0
        for seed in range(rounds):
            for tokens in lengths:
                for times, url in zip(taken[tokens], urls, strict=True):
                    times.append(await _until_second_token_s(session, url, tokens, seed))
                    done += 1
                    progress(done)
    return taken


async def _until_second_token_s(
    session: aiohttp.ClientSession, url: str, prompt_tokens: int, seed: int
) -> float:
    chance = random.Random(seed)
    body = {
        "model": "default",
        "prompt": [chance.choice(VOCABULARY) for _ in range(prompt_tokens)],
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    stream, sent_s = CompletionStream(), time.perf_counter()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            async for data in response.content.iter_any():
                stream.feed(data, time.perf_counter())
    except TimeoutError as exc:
        raise HandOverError(f"{url}: no answer in time") from exc
    except aiohttp.ClientError as exc:
        raise HandOverError(f"{url}: {exc}") from exc
    stream.finish()
    if len(stream.token_times_s) < 2:
        raise HandOverError(f"{url} answered with {response.status} {stream.error_message}")
    return stream.token_times_s[1] - sent_s
