"""What a hand-over costs a stream: the time from its first token to its second, layer by layer or serialized.

Starts a mesh of one prefill and one decode instance with the default model, sends prompts one after the
other, then again beside streams that are being decoded, and says what these streams' time between tokens is.

    python bench/hand_over.py [--layerwise-min-tokens 512] [--bandwidth 2e8] [--pull-share 0.2] [--rounds 7]
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
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

PROMPT_TOKENS = (1024, 2000)
OUTPUT_TOKENS = 6
STREAMS = 2
STREAM_PROMPT_TOKENS = 64
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


def gaps_s(url: str, prompt_tokens: int, rounds: int) -> tuple[list[float], list[float]]:
    """Of every round, how long the first token took, and how long the second one after it."""
    chance = random.Random(prompt_tokens)
    first, second = [], []
    for _ in range(rounds):
        prompt = [chance.randrange(100, 40_000) for _ in range(prompt_tokens)]
        sent, one, two, *_ = token_times_s(url, prompt, OUTPUT_TOKENS)
        first.append(one - sent)
        second.append(two - one)
    return first, second


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


def measure(url: str, rounds: int) -> None:
    token_times_s(url, list(range(100, 700)), 4)
    for prompt_tokens in PROMPT_TOKENS:
        first, second = gaps_s(url, prompt_tokens, rounds)
        say(f"{prompt_tokens} tokens alone, first token", first)
        say(f"{prompt_tokens} tokens alone, first to second", second)
    stop = threading.Event()
    times: list[list[float]] = []
    streams = [
        threading.Thread(
            target=lambda: times.append(
                token_times_s(url, list(range(100, 100 + STREAM_PROMPT_TOKENS)), 4000, stop)
            )
        )
        for _ in range(STREAMS)
    ]
    for stream in streams:
        stream.start()
    time.sleep(2.0)
    quiet_s = time.monotonic()
    time.sleep(4.0)
    begin_s = time.monotonic()
    _, second = gaps_s(url, PROMPT_TOKENS[-1], rounds)
    end_s = time.monotonic()
    stop.set()
    for stream in streams:
        stream.join()
    say(f"{PROMPT_TOKENS[-1]} tokens beside {STREAMS} streams, first to second", second)
    say("the streams between tokens, alone", between_tokens_s(times, quiet_s, begin_s))
    say("the streams between tokens, beside prompts", between_tokens_s(times, begin_s, end_s))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--layerwise-min-tokens", type=int, default=512)
    arguments.add_argument("--bandwidth", type=float, help="bytes per second of an emulated link")
    arguments.add_argument("--pull-share", type=float, default=0.2)
    arguments.add_argument("--rounds", type=int, default=7)
    given = arguments.parse_args()
    # Whoever ends this ends the mesh.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    lines = [
        "[transfer]",
        f"layerwise_min_tokens = {given.layerwise_min_tokens}",
        f"pull_share = {given.pull_share}",
    ]
    if given.bandwidth is not None:
        lines.append(f"emulated_bandwidth_bytes_per_s = {given.bandwidth}")
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "mesh.toml")
        config.write_text("\n".join(lines))
        options = ("--state-dir", str(Path(directory, "state")))
        up = ("up", "--detach", "--port", "0", "--config", str(config), *options)
        subprocess.run([*LAMELLA, *up], check=True, stdout=subprocess.DEVNULL)
        try:
            status = subprocess.run(
                [*LAMELLA, "status", "--json", *options], check=True, capture_output=True, text=True
            )
            measure(json.loads(status.stdout)["url"], given.rounds)
        finally:
            subprocess.run([*LAMELLA, "down", *options], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
