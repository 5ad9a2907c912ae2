"""The private port of a mesh as `lamella up` starts it, with API keys: timelines, loads, links, flips."""

import asyncio
import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest

from common.laws import step_features
from common.messages import InstanceRecord
from common.performance import STEP_FEATURES, FittedTime
from tests.e2e.meshes import Mesh, running_mesh
from tests.gateway.processes import send

KEY = "a user's key"
CHUNK_TOKENS, PROMPT_TOKENS, OUTPUT_TOKENS = 64, 200, 40
STEP_S = 0.02
CHUNK_S = 0.02
WRITTEN_WITHIN_S = 20.0
CONFIG = f"""
[gateway]
api_keys_file = "KEYS"
[instance]
engine = "emulated"
block_size = 16
chunk_tokens = {CHUNK_TOKENS}
[emulation]
decode_base_s = {STEP_S}
prefill_base_s = {CHUNK_S}
total_blocks = 256
"""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    directory = tmp_path_factory.mktemp("private")
    keys = directory / "keys"
    keys.write_text(hashlib.sha256(KEY.encode()).hexdigest())
    config = CONFIG.replace("KEYS", str(keys))
    with running_mesh(directory / "mesh", "--decode", "2", config=config) as mesh:
        yield mesh


@cache
def private_url(mesh: Mesh) -> str:
    return str(mesh.status()["private_url"])


def admin(mesh: Mesh) -> dict[str, str]:
    """What a page sends once it was given the key."""
    key = Path(str(mesh.status()["admin_key_file"])).read_text().strip()
    return {"authorization": f"Bearer {key}"}


def get(mesh: Mesh, path: str) -> Any:
    answer = send(f"{private_url(mesh)}/api/{path}", None)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


async def complete(mesh: Mesh, output_tokens: int = OUTPUT_TOKENS) -> str:
    """The id of an answer to a long prompt."""
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key=KEY, max_retries=0) as client:
        answer = await client.completions.create(
            model="default",
            prompt=list(range(100, 100 + PROMPT_TOKENS)),
            max_tokens=output_tokens,
            extra_body={"ignore_eos": True},
        )
    return answer.id


def test_a_timeline_has_every_chunk_the_transfer_and_every_step(mesh: Mesh) -> None:
    name = asyncio.run(complete(mesh))
    timeline = get(mesh, f"requests/{name}")
    spans = timeline["spans"]
    chunks = [span for span in spans if span["kind"] == "prefill"]
    assert [span["tokens"] for span in chunks] == [64, 64, 64, 8]
    assert {span["instance"] for span in chunks} == {"prefill-0"}
    transfers = [span for span in spans if span["kind"] == "transfer"]
    decode = timeline["request"]["decode_instance"]
    assert {(span["peer"], span["instance"]) for span in transfers} == {("prefill-0", decode)}
    assert sum(span["kv_bytes"] for span in transfers) > 0
    [stay] = [span for span in spans if span["kind"] == "decode"]
    assert (stay["instance"], len(stay["step_ends_s"])) == (decode, OUTPUT_TOKENS - 1)
    assert stay["step_ends_s"] == sorted(stay["step_ends_s"])
    assert all(earlier["end_s"] <= later["end_s"] for earlier, later in pairwise(chunks))
    assert all(span["end_s"] - span["begin_s"] > 0.9 * CHUNK_S for span in chunks)
    took_s = timeline["request"]["age_s"]
    assert all(0 <= span["begin_s"] <= span["end_s"] <= took_s + 0.01 for span in spans)


def test_the_mesh_shows_its_instances_loads_and_the_link_that_kv_goes_over(mesh: Mesh) -> None:
    async def look_while_it_runs() -> tuple[dict[str, Any], set[tuple[str, str]], int]:
        streams = [asyncio.create_task(complete(mesh, 5 * OUTPUT_TOKENS)) for _ in range(4)]
        links: set[tuple[str, str]] = set()
        running = 0
        while not all(each.done() for each in streams):
            view = await asyncio.to_thread(get, mesh, "mesh")
            links |= {(each["source"], each["target"]) for each in view["links"] if each["bytes_per_s"] > 0}
            running = max(running, *(each["running"] for each in view["instances"]))
        await asyncio.gather(*streams)
        return view, links, running

    view, links, running = asyncio.run(look_while_it_runs())
    assert running >= 1
    assert links
    assert links <= {("prefill-0", "decode-0"), ("prefill-0", "decode-1")}
    assert [each["id"] for each in view["instances"]] == ["decode-0", "decode-1", "prefill-0"]
    assert [each["state"] for each in view["instances"]] == ["ready"] * 3
    assert all(each["kv_total_tokens"] == 256 * 16 for each in view["instances"])
    assert (view["schedulers"], view["leader"]["id"]) == (["scheduler-0"], "scheduler-0")


def test_what_an_instance_has_learned_of_its_speed_stands_in_the_store_and_is_shown(mesh: Mesh) -> None:
    asyncio.run(complete(mesh))

    async def learned() -> FittedTime:
        deadline_s = time.monotonic() + WRITTEN_WITHIN_S
        while True:
            members = [each for each in await mesh.members() if isinstance(each, InstanceRecord)]
            times = [each.step_time for each in members if each.step_time and each.step_time.samples]
            if times:
                return times[0]
            assert time.monotonic() < deadline_s, members
            await asyncio.sleep(0.1)

    assert asyncio.run(learned()).seconds(step_features(1, PROMPT_TOKENS)) == pytest.approx(STEP_S, rel=1.0)
    laws = [each["step_law"] for each in get(mesh, "mesh")["instances"] if each["role"] == "decode"]
    assert any(law["samples"] and set(law["seconds"]) == set(STEP_FEATURES) for law in laws if law)


def test_decisions_are_the_schedulers_own(mesh: Mesh) -> None:
    name = asyncio.run(complete(mesh))
    [newest] = get(mesh, "decisions?newest=1")
    assert f"cmpl-{newest['request_id']}" == name
    assert {choice["phase"] for choice in newest["choices"]} == {"prefill", "decode"}


def test_an_instance_is_flipped_by_who_has_the_key(mesh: Mesh) -> None:
    url, key = f"{private_url(mesh)}/api/flip", admin(mesh)
    assert send(url, {"instance": "decode-1", "role": "prefill"}).status == 401
    assert send(url, {"instance": "prefill-0", "role": "decode"}, key).status == 409
    flipped = send(url, {"instance": "decode-1", "role": "prefill"}, key)
    assert (flipped.status, json.loads(flipped.body)["left"]) == (202, 0)
    [view] = [each for each in get(mesh, "mesh")["instances"] if each["id"] == "decode-1"]
    assert (view["role"], view["state"]) == ("prefill", "ready")
    assert send(url, {"instance": "decode-1", "role": "decode"}, key).status == 202


def test_status_shows_what_was_promised_though_the_public_port_wants_a_key(mesh: Mesh) -> None:
    asyncio.run(complete(mesh))
    assert sum(int(str(each["requests"])) for each in mesh.status()["service_levels"]) >= 1


def test_the_command_line_sends_the_key_that_its_environment_has(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(AssertionError, match="a valid key is needed"):
        mesh.lamella("chat", "Hello?", "--max-tokens", "3")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    mesh.lamella("chat", "Hello?", "--max-tokens", "3")


def test_the_private_port_is_where_it_was_after_its_gateway_has_died(mesh: Mesh) -> None:
    """The last test here: nobody else is to wait for the gateway's return."""
    before, url = mesh.pid_of("gateway"), private_url(mesh)
    os.kill(before, signal.SIGKILL)
    deadline_s = time.monotonic() + WRITTEN_WITHIN_S
    while True:
        [gateway] = [each for each in mesh.status()["processes"] if each["role"] == "gateway"]
        if gateway["pid"] not in (None, before) and gateway["url"] is not None:
            break
        assert time.monotonic() < deadline_s, gateway
        time.sleep(0.1)
    assert (gateway["url"], str(mesh.status()["private_url"])) == (mesh.url, url)
    assert get(mesh, "requests") == {"running": [], "ended": []}
