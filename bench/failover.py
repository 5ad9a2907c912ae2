"""For how long streams stand still when the instance that they run on dies.

    python bench/failover.py [--role decode] [--streams 4] [--times 5] [--signal KILL] [--apart]

A mesh of its own with two prefill and two decode instances of the default model, and for the role attention
two attention workers, started and ended here (``lamella up``). Each time ``--streams`` streams begin,
and once all of them have tokens one process of the role gets the signal (KILL ends it; STOP leaves it there
and silent, until its lease is over and its streams have ended). A stream's stall is its longest gap between
two tokens; those that did not run on that process say what gaps are otherwise. The prompt and what was drawn
are computed again in it. With ``--apart`` every process takes the others for those of other hosts: the kernel
tells nobody of another's end.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai

from common.latency import percentiles

CONFIG = "[mesh]\nlease_s = 3.0\n"
COUNTS = ("--prefill", "2", "--decode", "2")
ATTENTION = ("--attention", "2", "--partition", "requests")
APART = Path(__file__).resolve().parents[1] / "tests/e2e/apart"
TOKENS = 120


def lamella(*arguments: str, may_fail: bool = False, is_apart: bool = False) -> str:
    """What it printed: into a file, which a mesh that goes on does not keep open for us."""
    environment = dict(os.environ)
    if is_apart:
        paths = filter(None, (str(APART), os.environ.get("PYTHONPATH")))
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    with tempfile.TemporaryFile("w+") as output:
        command = (sys.executable, "-m", "services.cli", *arguments)
        subprocess.run(command, check=not may_fail, stdout=output, env=environment)
        output.seek(0)
        return output.read()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", choices=("prefill", "decode", "attention"), default="decode")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    parser.add_argument("--apart", action="store_true")
    options = parser.parse_args()
    counts = (*COUNTS, *ATTENTION) if options.role == "attention" else COUNTS
    with tempfile.TemporaryDirectory() as name:
        state, config = Path(name) / "mesh", Path(name) / "mesh.toml"
        config.write_text(CONFIG)
        place = ("--state-dir", str(state))
        up = ("up", "--detach", *place, "--config", str(config), "--port", "0", *counts)
        lamella(*up, is_apart=options.apart)
        try:
            for number in range(options.times):
                killed, gaps = asyncio.run(run_once(place, options, number))
                p50_s, longest_s = percentiles(gaps, (50.0, 100.0))
                print(f"{number + 1}: longest gaps p50 {1e3 * p50_s:.0f} ms, most {1e3 * longest_s:.0f} ms")
                wait_ready(place, killed if options.signal == "KILL" else None)
        finally:
            lamella("down", *place)


def status(place: tuple[str, ...]) -> dict[str, Any]:
    # Where an instance is away it says so by its exit status, too.
    found: dict[str, Any] = json.loads(lamella("status", "--json", *place, may_fail=True))
    return found


def wait_ready(place: tuple[str, ...], killed: int | None) -> None:
    """Until all instances are, and none is the process that was killed."""
    while True:
        mesh = status(place)
        is_gone = killed not in [each["pid"] for each in mesh["processes"]]
        if is_gone and all(each["state"] == "ready" for each in mesh["instances"]):
            return
        time.sleep(0.5)


async def run_once(place: tuple[str, ...], options: argparse.Namespace, seed: int) -> tuple[int, list[float]]:
    """The process that got the signal, and each stream's longest gap, in seconds."""
    mesh = status(place)
    pid = next(int(each["pid"]) for each in mesh["processes"] if each["role"] == options.role)
    begun = [asyncio.Event() for _ in range(options.streams)]
    async with openai.AsyncOpenAI(base_url=f"{mesh['url']}/v1", api_key="none", max_retries=0) as client:
        streams = [
            asyncio.create_task(times_of(client, 100 * seed + number, event))
            for number, event in enumerate(begun)
        ]
        await asyncio.gather(*(each.wait() for each in begun))
        os.kill(pid, signal.SIGKILL if options.signal == "KILL" else signal.SIGSTOP)
        try:
            times = await asyncio.gather(*streams)
        finally:
            if options.signal == "STOP":
                os.kill(pid, signal.SIGCONT)
    return pid, [max(later - earlier for earlier, later in pairwise(each)) for each in times]


async def times_of(client: openai.AsyncOpenAI, seed: int, begun: asyncio.Event) -> list[float]:
    """When each token came."""
    stream = await client.completions.create(
        model="default",
        prompt=list(range(100, 220)),
        max_tokens=TOKENS,
        seed=seed,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    found = []
    async for _ in stream:
        found.append(time.monotonic())
        if len(found) > 1:
            begun.set()
    return found


if __name__ == "__main__":
    main()
