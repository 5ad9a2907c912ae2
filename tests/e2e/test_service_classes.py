"""Two classes of service over a whole mesh: who was served as promised, and why requests went where."""

import asyncio
import json
import time
from collections.abc import Iterator

import openai
import pytest

from common.messages import ServiceRecord
from scheduler.policy.dispatch import DECODE_POLICIES, PREFILL_POLICIES
from tests.e2e.meshes import Mesh, get_text, running_mesh

CONFIG = """
[instance]
engine = "emulated"
# Of chunks far from full nothing is predicted.
chunk_tokens = 4
[emulation]
prefill_base_s = 0.01
decode_base_s = 0.01
[service_classes.patient]
ttft_s = 60.0
tpot_s = 10.0
[service_classes.hopeless]
ttft_s = 1e-6
tpot_s = 1e-6
"""
REQUESTS, TOKENS = 6, 8
TOLD_WITHIN_S = 10.0
"""An answer may be read a moment before its end is counted."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    directory = tmp_path_factory.mktemp("classes") / "mesh"
    with running_mesh(directory, "--prefill", "2", "--decode", "2", config=CONFIG) as mesh:
        yield mesh


def test_each_class_attains_its_own_and_placements_are_explained_with_what_came_of_them(
    mesh: Mesh,
) -> None:
    calls = {tier: [complete(mesh, tier) for _ in range(REQUESTS)] for tier in ("patient", "hopeless")}
    with pytest.raises(openai.BadRequestError, match="there are default, patient, hopeless"):
        complete(mesh, "gold")

    deadline_s = time.monotonic() + TOLD_WITHIN_S
    # The default class has the request by which `lamella up` tries the mesh.
    while any(levels(mesh)[tier][0] < REQUESTS for tier in calls):
        assert time.monotonic() < deadline_s
    found = levels(mesh)
    assert {tier: found[tier] for tier in calls} == {
        "patient": (REQUESTS, REQUESTS, REQUESTS * TOKENS),
        "hopeless": (REQUESTS, 0, 0),
    }

    [url] = [
        member.http_url
        for member in asyncio.run(mesh.members())
        if isinstance(member, ServiceRecord) and member.kind == "scheduler"
    ]
    call = calls["patient"][-1]
    [decision] = json.loads(get_text(f"{url}/decisions/{call.removeprefix('cmpl-')}"))
    assert (decision["service_class"], decision["output_tokens"]) == ("patient", TOKENS)
    assert decision["ttft_s"] > 0
    assert decision["tpot_s"] > 0
    for phase, choice in zip(("prefill", "decode"), decision["choices"], strict=True):
        assert choice["phase"] == phase
        assert {each["instance_id"] for each in choice["candidates"]} == {f"{phase}-0", f"{phase}-1"}
        assert choice["predicted_s"] > 0
    newest = json.loads(get_text(f"{url}/decisions?class=hopeless&instance=decode-0&newest=100"))
    assert {f"cmpl-{each['request_id']}" for each in newest} == set(calls["hopeless"])

    regret = json.loads(mesh.lamella("explain", "--policies", "--json"))
    judged = {(each["phase"], each["policy"]): each for each in regret["policies"]}
    assert {policy for phase, policy in judged if phase == "prefill"} == set(PREFILL_POLICIES)
    assert {policy for phase, policy in judged if phase == "decode"} == set(DECODE_POLICIES)
    assert all(each["regret_s"] >= 0 for each in judged.values())
    assert {each["phase"]: each["requests"] > 0 for each in regret["hindsight"]} == {
        "prefill": True,
        "decode": True,
    }
    assert 'lamella_policy_regret_seconds_count{phase="decode",policy="best_fit"}' in get_text(
        f"{url}/metrics"
    )
    said = mesh.lamella("explain", call) + mesh.lamella("explain", "--policies") + mesh.lamella("status")
    for word in ("TTFT predicted", "TPOT measured", "regret", "least_outstanding", "patient", "100.0%"):
        assert word in " ".join(said.split())


def levels(mesh: Mesh) -> dict[str, tuple[int, int, int]]:
    """By class: how many requests ended, how many of them as promised, and these ones' tokens."""
    found: list[dict[str, int]] = json.loads(mesh.lamella("status", "--json"))["service_levels"]
    return {str(each["service_class"]): (each["requests"], each["met"], each["met_tokens"]) for each in found}


def complete(mesh: Mesh, tier: str) -> str:
    """The id of the answer."""
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        answer = client.completions.create(
            model="default",
            prompt=[10, 11, 12],
            max_tokens=TOKENS,
            extra_body={"service_tier": tier, "ignore_eos": True},
        )
    return answer.id
