"""The profile ``obs`` beside the real stack: Prometheus finds every process, and knows our rules."""

import json
import sys
import time
from typing import Any

import pytest

from tests.compose.stack import PROMETHEUS, Stack

pytestmark = pytest.mark.timeout(2400)

ASK = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"
SERVICES = {"gateway", "scheduler", "prefill", "decode"}
FOUND_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def prometheus(stack: Stack) -> str:
    """Its address. What is already running stays."""
    image = stack.compose("--profile", "obs", "config", "--images", "prometheus").split()
    (name,) = [each for each in image if "prometheus" in each]
    if not stack.has_image(name):
        pytest.skip(f"the image {name} is not here and cannot be pulled")
    stack.compose("--profile", "obs", "up", "--detach", "--wait", "--no-recreate", "prometheus")
    return f"http://{PROMETHEUS}/api/v1"


def ask(stack: Stack, url: str) -> Any:
    return json.loads(stack.run(sys.executable, "-c", ASK, url))["data"]


def test_prometheus_reads_every_process_of_the_stack(stack: Stack, prometheus: str) -> None:
    deadline = time.monotonic() + FOUND_WITHIN_S
    while True:
        targets = ask(stack, f"{prometheus}/targets?state=active")["activeTargets"]
        up = {each["labels"]["component"] for each in targets if each["health"] == "up"}
        if up == SERVICES:
            return
        assert time.monotonic() < deadline, targets


def test_prometheus_evaluates_our_rules(stack: Stack, prometheus: str) -> None:
    groups = ask(stack, f"{prometheus}/rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {"LamellaProcessDown", "LamellaBlocksLeaked"} <= {rule["name"] for rule in rules}
    assert [rule["lastError"] for rule in rules if rule.get("lastError")] == []


def test_observing_ends_and_leaves_the_mesh(stack: Stack, prometheus: str) -> None:
    stack.compose("--profile", "obs", "stop", "prometheus")
    stack.compose("--profile", "obs", "rm", "--force", "prometheus")
    assert {name for name in SERVICES if not stack.containers(name)} == set()
