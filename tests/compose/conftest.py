"""A real container engine for the tests of the stack, and the stack itself, built and started once.

Building takes minutes and starts containers, so it is asked for:

    LAMELLA_COMPOSE=1 pytest tests/compose                    with this machine's Docker
    LAMELLA_COMPOSE_WRAPPER=SCRIPT pytest tests/compose       with `SCRIPT run docker …`, an engine elsewhere

Without either, or where no engine answers, the tests are skipped and say so.
"""

import os
from collections.abc import Iterator

import pytest

from tests.compose.questions import PROMPTS, Answers, ask
from tests.compose.stack import BUILD_TIMEOUT_S, Stack, why_no_engine


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The mesh of docker-compose.yml, healthy; gone afterwards with everything it made but its image."""
    wrapper = os.environ.get("LAMELLA_COMPOSE_WRAPPER")
    if wrapper is None and not os.environ.get("LAMELLA_COMPOSE"):
        pytest.skip(
            "no container engine asked for: set LAMELLA_COMPOSE=1, or LAMELLA_COMPOSE_WRAPPER to its script"
        )
    prefix = (wrapper, "run") if wrapper else ()
    missing = why_no_engine(prefix)
    if missing is not None:
        pytest.skip(f"NOTHING OF THE STACK IS TESTED, no container engine answers: {missing}")
    stack = Stack(prefix)
    stack.compose("build", timeout_s=BUILD_TIMEOUT_S)
    try:
        stack.compose("up", "--detach", "--wait")
        yield stack
    finally:
        # Shown by pytest beside a failure.
        print(stack.compose("logs", "--no-color", "--tail", "40"))
        stack.compose("down", "--volumes", "--remove-orphans")


@pytest.fixture(scope="session")
def alone(stack: Stack) -> Answers:
    """Every prompt's answer, asked one after the other of one prefill and one decode instance."""
    return [answer for prompt in PROMPTS for answer in ask(stack, prompt)]
