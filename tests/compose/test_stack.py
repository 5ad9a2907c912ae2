"""The mesh in containers, from the published port to KV that crossed from one container to another.

One stack serves all tests, in the order of this file.
"""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.compose.conftest import PUBLISHED, Stack

pytestmark = pytest.mark.timeout(2400)

CLIENT = Path(__file__).with_name("client.py")
PROMPTS = tuple(f"What is the capital of {country}?" for country in ("France", "Japan", "Peru", "Kenya"))
ROLES = ("gateway", "scheduler", "prefill", "decode")
METRICS = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/metrics').read().decode())"


def ask(stack: Stack, *prompts: str) -> list[dict[str, object]]:
    answers: list[dict[str, object]] = json.loads(
        stack.run(sys.executable, str(CLIENT), f"http://{PUBLISHED}/v1", *prompts)
    )
    return answers


def metric(stack: Stack, container: str, sample: str) -> float:
    """The value of one sample, as the container itself serves it."""
    text = stack.run("docker", "exec", container, "python", "-c", METRICS)
    found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
    assert found is not None, f"no {sample} in:\n{text}"
    return float(found.group(1))


@pytest.fixture(scope="module")
def alone(stack: Stack) -> list[dict[str, object]]:
    """Every prompt's answer, asked one after the other of one prefill and one decode instance."""
    return [answer for prompt in PROMPTS for answer in ask(stack, prompt)]


def test_the_official_client_streams_through_the_published_port(alone: list[dict[str, object]]) -> None:
    assert "Paris" in str(alone[0]["text"])
    for answer in alone:
        assert answer["finish_reason"] in ("stop", "length")
        assert isinstance(answer["completion_tokens"], int)
        assert answer["completion_tokens"] > 1


def test_the_kv_crossed_between_containers_and_nothing_is_left_behind(
    stack: Stack, alone: list[dict[str, object]]
) -> None:
    assert alone
    (prefill,), (decode,) = stack.containers("prefill"), stack.containers("decode")
    assert metric(stack, prefill, "lamella_transfer_bytes_total") > 0
    assert metric(stack, prefill, "lamella_transfer_failures_total") == 0
    for instance in (prefill, decode):
        assert metric(stack, instance, 'lamella_kv_blocks{state="used"}') == 0


def test_more_decode_instances_share_the_work_and_say_the_same(
    stack: Stack, alone: list[dict[str, object]]
) -> None:
    stack.compose("up", "--detach", "--wait", "--no-recreate", "--scale", "decode=2")
    containers = stack.containers("decode")
    assert len(containers) == 2
    assert ask(stack, *PROMPTS) == alone
    for container in containers:
        assert metric(stack, container, "lamella_decode_tokens_total") > 0


def test_a_killed_instance_is_done_without_and_comes_back(
    stack: Stack, alone: list[dict[str, object]]
) -> None:
    killed = stack.containers("decode")[0]
    # Not `docker kill`, which counts as the operator's wish; init is the container's process 1.
    stack.run("docker", "exec", killed, "sh", "-c", "kill -9 $(cat /proc/1/task/1/children)")
    assert ask(stack, *PROMPTS) == alone
    stack.compose("up", "--detach", "--wait", "--no-recreate", "--scale", "decode=2")
    state = stack.run("docker", "inspect", "--format", "{{.RestartCount}} {{.State.Health.Status}}", killed)
    assert state.split() == ["1", "healthy"]
    assert ask(stack, *PROMPTS) == alone


@pytest.mark.parametrize("role", ROLES)
def test_a_container_is_nobody_and_cannot_write(stack: Stack, role: str) -> None:
    container = stack.containers(role)[0]
    script = "id -u; touch /opt/code/x 2>/dev/null && echo wrote; grep ^CapEff: /proc/1/status"
    assert stack.run("docker", "exec", container, "sh", "-c", script).split() == [
        "10001",
        "CapEff:",
        "0000000000000000",
    ]


def test_every_service_drains_and_ends_well(stack: Stack) -> None:
    stack.compose("stop")
    for role in ROLES:
        for container in stack.containers(role):
            status = stack.run("docker", "inspect", "--format", "{{.State.ExitCode}}", container)
            assert status.strip() == "0", f"{role} {container}"
