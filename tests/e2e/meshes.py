"""Starts a mesh as a user would, and looks into it from outside."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import openai

from common.bus import Bus
from common.config import MeshConfig
from common.config_file import load_config
from common.errors import StoreUnavailable
from common.messages import InstanceRecord, MemberRecord
from common.store import Store
from common.subjects import Subjects
from services.members import members_of
from tests.common.buses import connected

LAMELLA = (sys.executable, "-m", "services.cli")
ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 240
STORE_TIMEOUT_S = 30
SETTLE_TIMEOUT_S = 60.0
"""The KV of a lost instance is kept for 30 s, and a transfer's end is known after 48 s at the latest."""


@dataclass(frozen=True, slots=True)
class Mesh:
    state_dir: Path
    url: str

    @property
    def settings(self) -> MeshConfig:
        return load_config(self.state_dir / "mesh.toml", {}).mesh

    @property
    def subjects(self) -> Subjects:
        return Subjects(self.settings.namespace)

    def client(self) -> openai.AsyncOpenAI:
        """One that tries nothing again."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def bus(self) -> AbstractAsyncContextManager[Bus]:
        """To speak for somebody of the mesh."""
        return connected(self.settings.nats_url, self.settings.namespace, "test")

    @asynccontextmanager
    async def store(self) -> AsyncIterator[Store]:
        store = Store(self.settings.redis_url, self.settings.namespace)
        try:
            yield store
        finally:
            await store.close()

    def lamella(self, *arguments: str) -> str:
        """Runs a command against this mesh and returns what it printed."""
        return lamella(*arguments, "--state-dir", str(self.state_dir))

    def status(self) -> dict[str, list[dict[str, object]]]:
        answer: dict[str, list[dict[str, object]]] = json.loads(self.lamella("status", "--json"))
        return answer

    def pid_of(self, name: str) -> int:
        """Of the process with that id, or the first with that role. Asking takes a second, in which what is
        under way may end."""
        processes = self.status()["processes"]
        return next(int(str(each["pid"])) for each in processes if name in (each["id"], each["role"]))

    def log(self, role: str) -> str:
        """What the first process of that role has logged."""
        return (self.state_dir / "logs" / f"{role}-0.log").read_text()

    def logged(self, role: str, event: str) -> list[dict[str, str]]:
        """That event, whenever the first process of that role has logged it, with all its fields."""
        # The last line may still be on its way.
        lines = [line for line in self.log(role).splitlines(keepends=True) if line.endswith("}\n")]
        return [each for each in map(json.loads, lines) if each["event"] == event]

    async def members(self) -> list[MemberRecord]:
        """As soon as the store answers, which may be starting again."""
        async with asyncio.timeout(STORE_TIMEOUT_S):
            while True:
                with suppress(StoreUnavailable):
                    return await members_of(self.settings)

    async def prompt_tokens_computed(self) -> float:
        """By all prefill instances since they began."""
        return await self.metric("prefill", "lamella_prefill_tokens_total")

    async def metric(self, role: str, name: str) -> float:
        """The sum over all instances of that role."""
        return sum((await self.metric_by_instance(role, name)).values())

    async def metric_by_instance(self, role: str, name: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for member in await self.members():
            if isinstance(member, InstanceRecord) and member.role == role:
                text = get_text(f"{member.http_url}/metrics")
                values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
                found[member.instance_id] = sum(map(float, values))
        return found

    async def wait_ready(self, instances: int) -> None:
        """Until that many instances serve: whoever died has been restarted."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                found = self.status()["instances"]
                if len(found) == instances and all(each["state"] == "ready" for each in found):
                    return
                await asyncio.sleep(0.5)

    async def left_over(self) -> dict[str, float]:
        """Everything that should be zero when no request is open, by ``service metric``; waits for it."""
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            found: dict[str, float] = {}
            bindings = {"attention workers": 0.0, "instances": 0.0}
            for member in await self.members():
                name = member.instance_id if isinstance(member, InstanceRecord) else member.service_id
                try:
                    text = get_text(f"{member.http_url}/metrics")
                except OSError:
                    # A killed process is listed until its lease ends.
                    found[f"{name} does not answer"] = 1.0
                    continue
                for metric in LEFT_OVERS:
                    for labels, value in re.findall(rf"^{metric}(\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE):
                        if 'state="free"' not in labels and float(value) != 0:
                            found[f"{name} {metric}{labels}"] = float(value)
                side = "instances" if isinstance(member, InstanceRecord) else "attention workers"
                for value in re.findall(r"^lamella_attention_bindings (\S+)$", text, re.MULTILINE):
                    bindings[side] += float(value)
            if bindings["attention workers"] != bindings["instances"]:
                # Each is held by both of its sides, or by nobody.
                found |= {f"bindings held by {side}": count for side, count in bindings.items()}
            if not found or time.monotonic() > deadline_s:
                return found
            await asyncio.sleep(0.1)


LEFT_OVERS = (
    "lamella_kv_blocks",
    "lamella_requests_running",
    "lamella_batch_error",
    "lamella_requests_waiting",
    "lamella_pending_prefill_tokens",
    "lamella_open_requests",
    "lamella_requests_placed",
    "lamella_attention_bindings_unsettled",
    "lamella_attention_pools_kept",
    "lamella_kv_moves",
    "lamella_sequences_swapped",
    "lamella_host_kv_blocks",
    "lamella_transfers_open",
)


def get_text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        text: str = response.read().decode()
        return text


APART = Path(__file__).parent / "apart"
"""On the path of processes that take each other for processes of other hosts."""


def lamella(*arguments: str, timeout_s: float = START_TIMEOUT_S, is_apart: bool = False) -> str:
    """Runs one command of the CLI. Fails the test with what it said when it fails."""
    done = subprocess.run(
        [*LAMELLA, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment(*((APART,) if is_apart else ())),
        check=False,
    )
    assert done.returncode == 0, f"lamella {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout


def environment(*paths: Path) -> dict[str, str]:
    """``paths``: on which Python looks before its own."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *paths)))}


@contextmanager
def running_mesh(
    state_dir: Path, *arguments: str, config: str = "", is_apart: bool = False
) -> Iterator[Mesh]:
    """A mesh on a free port, up when this returns and down, with nothing left, at the end. ``is_apart``: each
    process takes the others for processes of other hosts."""
    state_dir.mkdir(parents=True, exist_ok=True)
    config_file = state_dir.parent / f"{state_dir.name}.toml"
    config_file.write_text(config)
    options = ("--state-dir", str(state_dir), "--config", str(config_file), "--port", "0")
    lamella("up", "--detach", *options, *arguments, is_apart=is_apart)
    try:
        answer = json.loads(lamella("status", "--json", "--state-dir", str(state_dir)))
        yield Mesh(state_dir, answer["url"])
    finally:
        lamella("down", "--state-dir", str(state_dir))


async def stream_text(
    client: openai.AsyncOpenAI,
    prompt: list[int],
    output_tokens: int,
    begun: asyncio.Event,
    begun_chunks: int = 1,
) -> str:
    """What a greedy stream says (emulated engines go by its seed) that no end-of-sequence token ends.
    ``begun`` is set with the ``begun_chunks``-th chunk."""
    stream = await client.completions.create(
        model="default",
        prompt=prompt,
        max_tokens=output_tokens,
        temperature=0,
        seed=0,
        stream=True,
        timeout=120,
        extra_body={"ignore_eos": True},
    )
    texts = []
    async for chunk in stream:
        texts.append(chunk.choices[0].text)
        if len(texts) == begun_chunks:
            begun.set()
    return "".join(texts)
