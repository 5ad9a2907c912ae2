"""Questions to the stack, and what its containers count meanwhile."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.compose.stack import COMMAND_TIMEOUT_S, PUBLISHED, Stack

CLIENT = Path(__file__).with_name("client.py")
CAPITALS = {"Japan": "Tokyo", "Kenya": "Nairobi", "Cuba": "Havana", "Poland": "Warsaw"}
PROMPTS = tuple(f"What is the capital of {country}?" for country in CAPITALS)
"""At none of their answers' tokens is the second best near: bf16 may draw that one in another batch."""
METRICS = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/metrics').read().decode())"
HELD = ("used", "quarantined", "leaked")
"""Blocks of sequences, those that a transfer which was given up may still write, and those of nobody."""
IDLE_WITHIN_S = 15.0
"""What still rests because of a lost peer is freed meanwhile."""

Answers = list[dict[str, object]]


def ask(stack: Stack, *prompts: str) -> Answers:
    answers: Answers = json.loads(stack.run(sys.executable, str(CLIENT), f"http://{PUBLISHED}/v1", *prompts))
    return answers


@contextmanager
def asking(stack: Stack, alone: Answers) -> Iterator[None]:
    """Meanwhile all prompts are asked over and over; afterwards, every answer was as when asked alone."""
    command = (sys.executable, str(CLIENT), f"http://{PUBLISHED}/v1", "--until-told", *PROMPTS)
    with stack.begin(*command) as client:
        assert client.stdout is not None
        # From now on somebody is always in the middle of an answer.
        client.stdout.readline()
        try:
            yield
        finally:
            output, errors = client.communicate(timeout=COMMAND_TIMEOUT_S)
    assert client.returncode == 0, errors
    answers = json.loads(output.splitlines()[-1])
    assert len(answers) > len(PROMPTS)
    expected = {answer["prompt"]: answer for answer in alone}
    for answer in answers:
        assert answer == expected[answer["prompt"]]


def wait_nothing_left(stack: Stack) -> None:
    """Returns when no running instance holds a block; fails where one does for long."""
    deadline = time.monotonic() + IDLE_WITHIN_S
    for instance in (*stack.containers("prefill"), *stack.containers("decode")):
        while (held := held_blocks(stack, instance)) > 0:
            assert time.monotonic() < deadline, f"{instance} still holds {held:.0f} blocks"


def held_blocks(stack: Stack, instance: str) -> float:
    return sum(metric(stack, instance, f'lamella_kv_blocks{{state="{each}"}}') for each in HELD)


def metric(stack: Stack, container: str, sample: str) -> float:
    """The value of one sample, as the container itself serves it."""
    text = stack.run("docker", "exec", container, "python", "-c", METRICS)
    found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
    assert found is not None, f"no {sample} in:\n{text}"
    return float(found.group(1))


def wait_said(process: subprocess.Popen[str], words: str) -> None:
    """Reads what it says until then."""
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return
    raise AssertionError(f"it ended without saying {words}")
