"""What a hand-over costs a stream: the time from its first token to its second, layer by layer or serialized.

Two meshes of one prefill and one decode instance with the default model are asked in turn. With ``--streams``
each has streams that are being decoded meanwhile, and what becomes of their time between tokens is said, too.

    python bench/hand_over.py [--streams] [--layerwise-min-tokens 512] [--bandwidth 1e8] [--pull-share 0.2]
"""

import argparse
import http.client
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

PROMPT_TOKENS = (1024, 2000)
OUTPUT_TOKENS = 6
STREAMS = 2
STREAM_PROMPT_TOKENS = 64
STREAMS_START_S = 2.0
STREAMS_ALONE_S = 4.0
NEVER = 1 << 30
"""Tokens; no prompt is as long."""
LAMELLA = (sys.executable, "-m", "services.cli")


def token_times_s(
    url: str, prompt: list[int], max_tokens: int, stop: threading.Event | None = None
) -> list[float]:
    """When the request was sent, then when each of its tokens came."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    body = {
        "model": "default",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
    }
    times = [time.monotonic()]
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    with connection.getresponse() as response:
        if response.status != http.client.OK:
            raise RuntimeError(response.read().decode())
        for line in response:
            if stop is not None and stop.is_set():
                break
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
    connection.close()
    return times


def gaps_s(url: str, prompt_tokens: int, seed: int) -> tuple[float, float]:
    """How long the first token took, and how long the second one after it."""
    chance = random.Random(seed)
    prompt = [chance.randrange(100, 40_000) for _ in range(prompt_tokens)]
    sent, one, two, *_ = token_times_s(url, prompt, OUTPUT_TOKENS)
    return one - sent, two - one


def between_tokens_s(times: list[list[float]], begin: float, end: float) -> list[float]:
    """Of the tokens that came in that time."""
    return [
        later - earlier
        for each in times
        for earlier, later in pairwise(each[1:])
        if begin <= earlier and later <= end
    ]


def say(name: str, values_s: list[float]) -> None:
    ordered = sorted(values_s)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    median_ms, p95_ms = statistics.median(ordered) * 1e3, p95 * 1e3
    print(f"{name}: median {median_ms:.1f} ms, p95 {p95_ms:.1f} ms, of {len(ordered)}", flush=True)


def measure_alone(urls: dict[str, str], rounds: int) -> None:
    """Prompts one after the other, of both kinds in turn."""
    for url in urls.values():
        token_times_s(url, list(range(100, 700)), OUTPUT_TOKENS)
    for prompt_tokens in PROMPT_TOKENS:
        gaps: dict[str, list[tuple[float, float]]] = {name: [] for name in urls}
        for seed in range(rounds):
            for name, url in urls.items():
                gaps[name].append(gaps_s(url, prompt_tokens, seed))
        for name, values in gaps.items():
            say(f"{prompt_tokens} tokens {name}, first token", [first for first, _ in values])
            say(f"{prompt_tokens} tokens {name}, first to second", [second for _, second in values])


def measure_beside_streams(name: str, url: str, rounds: int) -> None:
    """The longest prompts beside streams that are decoded meanwhile, and these streams with and without."""
    stop = threading.Event()
    times: list[list[float]] = []
    prompt = list(range(100, 100 + STREAM_PROMPT_TOKENS))
    streams = [
        threading.Thread(target=lambda: times.append(token_times_s(url, prompt, 4000, stop)))
        for _ in range(STREAMS)
    ]
    for stream in streams:
        stream.start()
    time.sleep(STREAMS_START_S)
    quiet_s = time.monotonic()
    time.sleep(STREAMS_ALONE_S)
    begin_s = time.monotonic()
    seconds = [gaps_s(url, PROMPT_TOKENS[-1], seed)[1] for seed in range(rounds)]
    end_s = time.monotonic()
    stop.set()
    for stream in streams:
        stream.join()
    say(f"{PROMPT_TOKENS[-1]} tokens {name} beside {STREAMS} streams, first to second", seconds)
    say("  the streams between tokens, alone", between_tokens_s(times, quiet_s, begin_s))
    say("  the streams between tokens, beside prompts", between_tokens_s(times, begin_s, end_s))


@contextmanager
def running_mesh(directory: Path, settings: Mapping[str, float]) -> Iterator[str]:
    """Its URL."""
    directory.mkdir()
    config = directory / "mesh.toml"
    config.write_text("[transfer]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
    options = ("--state-dir", str(directory / "state"))
    subprocess.run(
        [*LAMELLA, "up", "--detach", "--port", "0", "--config", str(config), *options],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    try:
        status = subprocess.run(
            [*LAMELLA, "status", "--json", *options], check=True, capture_output=True, text=True
        )
        yield json.loads(status.stdout)["url"]
    finally:
        subprocess.run([*LAMELLA, "down", *options], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--layerwise-min-tokens", type=int, default=512)
    arguments.add_argument("--bandwidth", type=float, help="bytes per second of an emulated link")
    arguments.add_argument("--pull-share", type=float, default=0.2)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--streams", action="store_true", help="beside streams that are decoded")
    given = arguments.parse_args()
    # Whoever ends this ends the meshes.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    settings: dict[str, float] = {"pull_share": given.pull_share}
    if given.bandwidth is not None:
        settings["emulated_bandwidth_bytes_per_s"] = given.bandwidth
    kinds = {"serialized": NEVER, "layer by layer": given.layerwise_min_tokens}
    with ExitStack() as meshes:
        directory = Path(meshes.enter_context(tempfile.TemporaryDirectory()))
        urls = {
            name: meshes.enter_context(
                running_mesh(directory / str(number), {**settings, "layerwise_min_tokens": number})
            )
            for name, number in kinds.items()
        }
        if not given.streams:
            measure_alone(urls, given.rounds)
        else:
            for name, url in urls.items():
                measure_beside_streams(name, url, given.rounds)


if __name__ == "__main__":
    main()
