"""What a scheduler answers over HTTP of its decisions."""

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI

from scheduler.explanations import add_routes
from scheduler.placing import Placer
from tests.requests import make_request
from tests.scheduler.states import make_state, ready


def ask(placer: Placer, query: str) -> tuple[object, Any]:
    """Status and JSON of ``/decisions?query``."""
    app = FastAPI()
    add_routes(app, placer)
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request"}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    question = {"path": "/decisions", "query_string": query.encode(), "headers": []}
    scope = {"type": "http", "method": "GET", **question}
    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]  # ASGI's own types are looser
    return sent[0]["status"], json.loads(sent[1]["body"])  # type: ignore[arg-type]  # it is bytes


def test_a_query_that_cannot_be_meant_is_refused_and_any_other_answered() -> None:
    state = make_state()
    ready(state, p0=0, d0=0)
    for name in ("r1", "r2"):
        state.place(make_request(name), 0.0)
    status, decisions = ask(state.placer, "newest=1&class=default&instance=d0")
    assert (status, [each["request_id"] for each in decisions]) == (200, ["r2"])
    assert ask(state.placer, "class=batch") == (200, [])


@pytest.mark.parametrize("newest", ["-1", "0", "some", "1001"])
def test_no_number_of_decisions_is_no_question(newest: str) -> None:
    said = f"newest = {newest!r}: must be a whole number, 1..1000"
    assert ask(make_state().placer, f"newest={newest}") == (400, {"detail": said})
