"""An instance that computes and answers, but whose KV hardly gets anywhere: its requests go on elsewhere, and
others are not placed there."""

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.messages import ServiceRecord
from tests.e2e.meshes import LAMELLA, Mesh, environment, get_text, running_mesh, stream_text

CUT_OFF = "prefill-cut-off"
CONFIG = """
[mesh]
heartbeat_s = 0.5
[instance]
engine = "emulated"
block_size = 16
[emulation]
decode_base_s = 0.005
total_blocks = 256
[transfer]
suspect_after_s = 0.5
"""
LATE_S = 15.0
NOTICED_WITHIN_S = 60.0
REASON = re.compile(f"KV did not get from {CUT_OFF} to .*, and has not since")
PROMPTS = [[100 + number] * 40 for number in range(6)]
OUTPUT_TOKENS = 20


def test_who_cannot_hand_over_kv_costs_no_token_and_is_not_given_more(tmp_path: Path) -> None:
    with running_mesh(tmp_path / "mesh", config=CONFIG) as mesh:
        undisturbed = asyncio.run(complete(mesh))
        with cut_off_instance(mesh):
            asyncio.run(mesh.wait_ready(3))
            assert asyncio.run(complete_while_some_wait(mesh)) == [undisturbed, undisturbed]
            decisions = json.loads(mesh.lamella("explain", "--newest", "100", "--json"))
    prefills = [each["choices"][0] for each in decisions]
    assert CUT_OFF in {choice["taken"] for choice in prefills}, "it was never tried"
    barred = {(each["instance_id"], each["reason"]) for choice in prefills for each in choice["barred"]}
    assert any(name == CUT_OFF and REASON.fullmatch(reason) for name, reason in barred), barred


async def complete_while_some_wait(mesh: Mesh) -> list[list[str]]:
    """For KV that is on its way. The others come once that is known to take long."""
    waiting = asyncio.create_task(complete(mesh))
    await wait_noticed(mesh)
    others = await complete(mesh)
    return [others, await waiting]


async def complete(mesh: Mesh) -> list[str]:
    async with mesh.client() as client:
        streams = (stream_text(client, prompt, OUTPUT_TOKENS, asyncio.Event()) for prompt in PROMPTS)
        return await asyncio.gather(*streams)


async def wait_noticed(mesh: Mesh) -> None:
    async with asyncio.timeout(NOTICED_WITHIN_S):
        while True:
            if await broken_links(mesh):
                return
            await asyncio.sleep(0.1)


async def broken_links(mesh: Mesh) -> float:
    found = 0.0
    for member in await mesh.members():
        if isinstance(member, ServiceRecord) and member.kind == "scheduler":
            text = get_text(f"{member.http_url}/metrics")
            [value] = re.findall(r"^lamella_kv_links_broken (\S+)$", text, re.MULTILINE)
            found += float(value)
    return found


@contextmanager
def cut_off_instance(mesh: Mesh) -> Iterator[None]:
    """One more prefill instance, with a link of its own."""
    settings = (mesh.state_dir / "mesh.toml").read_text()
    file = mesh.state_dir / "cut-off.toml"
    assert "emulated_latency_s = 0.0" in settings
    file.write_text(settings.replace("emulated_latency_s = 0.0", f"emulated_latency_s = {LATE_S}"))
    process = subprocess.Popen(
        [*LAMELLA, "serve", "prefill", "--config", str(file)],
        env={**environment(), "LAMELLA_SERVICE_ID": CUT_OFF, "LAMELLA_PORT": "0"},
        stdout=(mesh.state_dir / "logs" / "cut-off.log").open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)
