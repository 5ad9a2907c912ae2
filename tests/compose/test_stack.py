"""The mesh in containers: answers through the published port, KV from one container to another, passwords,
scaling, and what is lost where a container or a network is.

One stack serves all tests, in the order of this file.
"""

import json
import sys
import time
from urllib.parse import urlsplit

import pytest

from tests.compose.questions import CAPITALS, PROMPTS, Answers, ask, asking, metric, wait_nothing_left
from tests.compose.stack import PRIVATE, PROJECT, Stack

pytestmark = pytest.mark.timeout(2400)

ROLES = ("gateway", "scheduler", "prefill", "decode")
PRIVATE_PAGES = f"""
import urllib.request as u
for path in ("/ui/", "/api/mesh"):
    print(u.urlopen("http://{PRIVATE}" + path).read().decode())
"""
# Asks both servers without a password.
STRANGER = """
import socket
for host, port, words, refusal in (
    ("nats", 4222, b"CONNECT {}\\r\\nPING\\r\\n", b"-ERR"),
    ("redis", 6379, b"KEYS *\\r\\n", b"-NOPERM"),
):
    with socket.create_connection((host, port), 5) as connection:
        connection.sendall(words)
        answer = b""
        while refusal not in answer:
            piece = connection.recv(4096)
            assert piece, answer
            answer += piece
    print(host, "refuses")
"""

SLEEPER = ("--entrypoint", "sleep", "lamella:test", "600")
RECOVERED_WITHIN_S = 60.0


def restarts_of(stack: Stack, container: str) -> int:
    return int(stack.run("docker", "inspect", "--format", "{{.RestartCount}}", container))


def scale_decode(stack: Stack, count: int) -> None:
    """Returns when so many are ready and the others have drained and ended."""
    stack.compose("up", "--detach", "--wait", "--no-recreate", "--scale", f"decode={count}")


def test_the_official_client_streams_through_the_published_port(alone: Answers) -> None:
    for capital, answer in zip(CAPITALS.values(), alone, strict=True):
        assert capital in str(answer["text"])
        assert answer["finish_reason"] in ("stop", "length")
        assert isinstance(answer["completion_tokens"], int)
        assert answer["completion_tokens"] > 1


def test_the_kv_crossed_between_containers_and_nothing_is_left_behind(stack: Stack, alone: Answers) -> None:
    # Asked anew: other tests may have started containers since.
    assert ask(stack, *PROMPTS) == alone
    (prefill,) = stack.containers("prefill")
    assert metric(stack, prefill, "lamella_transfer_bytes_total") > 0
    assert metric(stack, prefill, 'lamella_queue_time_seconds_count{phase="handover"}') > 0
    assert metric(stack, prefill, "lamella_transfer_failures_total") == 0
    wait_nothing_left(stack)


def test_the_page_and_the_mesh_are_on_the_published_private_port(stack: Stack) -> None:
    page, _, mesh = stack.run(sys.executable, "-c", PRIVATE_PAGES).strip().rpartition("\n")
    assert "<title>lamella</title>" in page
    assert [each["role"] for each in json.loads(mesh)["pools"]] == ["prefill", "decode"]


def test_who_knows_no_password_is_refused_by_nats_and_redis(stack: Stack) -> None:
    (gateway,) = stack.containers("gateway")
    said = stack.run("docker", "exec", gateway, "python", "-c", STRANGER)
    assert said.splitlines() == ["nats refuses", "redis refuses"]


def test_no_password_shows_from_outside(stack: Stack) -> None:
    (gateway,) = stack.containers("gateway")
    running = stack.compose("ps", "--all", "--quiet").split()
    shown = stack.run("docker", "inspect", *running) + stack.compose("logs", "--no-color")
    for file in ("nats_url", "redis_url"):
        url = stack.run("docker", "exec", gateway, "cat", f"/run/secrets/{file}")
        password = urlsplit(url).password
        assert password
        assert password not in shown
    assert stack.run("docker", "exec", gateway, "cat", "/run/gateway-secrets/admin_key") not in shown


def test_more_decode_instances_share_the_work_and_say_the_same(stack: Stack, alone: Answers) -> None:
    scale_decode(stack, 3)
    containers = stack.containers("decode")
    assert len(containers) == 3
    assert ask(stack, *PROMPTS) == alone
    for container in containers:
        assert metric(stack, container, "lamella_decode_tokens_total") > 0


def test_scaling_down_under_load_fails_no_request(stack: Stack, alone: Answers) -> None:
    with asking(stack, alone):
        scale_decode(stack, 2)
    assert len(stack.containers("decode")) == 2
    wait_nothing_left(stack)


def test_a_killed_instance_is_done_without_and_comes_back(stack: Stack, alone: Answers) -> None:
    killed = stack.containers("decode")[0]
    with asking(stack, alone):
        # Not `docker kill`, which counts as the operator's wish; init is the container's process 1.
        stack.run("docker", "exec", killed, "sh", "-c", "kill -9 $(cat /proc/1/task/1/children)")
        assert ask(stack, *PROMPTS) == alone
    scale_decode(stack, 2)
    state = stack.run("docker", "inspect", "--format", "{{.RestartCount}} {{.State.Health.Status}}", killed)
    assert state.split() == ["1", "healthy"]
    assert ask(stack, *PROMPTS) == alone
    wait_nothing_left(stack)


def test_an_instance_that_is_cut_off_is_done_without_and_comes_back(stack: Stack, alone: Answers) -> None:
    cut = stack.containers("decode")[0]
    with asking(stack, alone):
        stack.run("docker", "network", "disconnect", f"{PROJECT}_mesh", cut)
        assert ask(stack, *PROMPTS) == alone
    restarts = restarts_of(stack, cut)
    # What has its address meanwhile leaves it another one.
    squatter = stack.run("docker", "run", "--detach", "--network", f"{PROJECT}_mesh", *SLEEPER).strip()
    stack.run("docker", "network", "connect", f"{PROJECT}_mesh", cut)
    deadline = time.monotonic() + RECOVERED_WITHIN_S
    while restarts_of(stack, cut) == restarts:
        assert time.monotonic() < deadline, "it has another address, and goes on under the former"
        time.sleep(0.5)
    stack.run("docker", "rm", "--force", squatter)
    scale_decode(stack, 2)
    assert ask(stack, *PROMPTS) == alone
    assert metric(stack, cut, "lamella_decode_tokens_total") > 0
    wait_nothing_left(stack)


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
