"""What the gateway makes of the schedulers' answers about their decisions."""

import asyncio

import pytest
from aiohttp import web

from common.decision_query import DecisionQuery
from common.errors import InvalidRequest, NoInstanceReady
from common.ids import Incarnation
from common.messages import ServiceRecord
from gateway.private.decisions import newest_decisions


def scheduler_at(http_url: str) -> ServiceRecord:
    return ServiceRecord(
        service_id=http_url,
        incarnation=Incarnation("s1"),
        kind="scheduler",
        host="127.0.0.1",
        pid=1,
        http_url=http_url,
    )


async def decisions(request: web.Request) -> web.Response:
    """As a scheduler answers: one decision, or that the query is none for it."""
    if request.query_string != "newest=5&class=batch":
        return web.json_response({"detail": f"{request.query_string}: no"}, status=400)
    return web.json_response([{"request_id": "r1", "at_s": 1.0}])


def ask(query: DecisionQuery, *, beside: list[ServiceRecord]) -> bytes:
    """One scheduler that answers, and those ``beside`` it."""

    async def work() -> bytes:
        app = web.Application()
        app.router.add_get("/decisions", decisions)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            host, port = runner.addresses[0][:2]
            return await newest_decisions([scheduler_at(f"http://{host}:{port}"), *beside], query)
        finally:
            await runner.cleanup()

    return asyncio.run(work())


ABSENT = scheduler_at("http://127.0.0.1:1")


def test_a_scheduler_that_does_not_answer_is_left_out() -> None:
    assert b'"r1"' in ask(DecisionQuery(5, "batch"), beside=[ABSENT])


def test_nobodys_answer_is_not_taken_for_no_decisions() -> None:
    for members in ([], [ABSENT]):
        with pytest.raises(NoInstanceReady, match="no scheduler answers"):
            asyncio.run(newest_decisions(members, DecisionQuery()))


def test_a_query_that_schedulers_refuse_is_refused_in_their_words() -> None:
    """Of another version, say."""
    with pytest.raises(InvalidRequest, match="newest=5&instance=d0: no"):
        ask(DecisionQuery(5, instance="d0"), beside=[])
