"""``/decisions`` of a scheduler: why requests went where they went."""

import msgspec
from fastapi import FastAPI, Response

from common.http import READ
from scheduler.decision_log import DecisionLog

NEWEST, MOST_NEWEST = 20, 1000


def add_routes(app: FastAPI, log: DecisionLog) -> None:
    """``/decisions`` (the newest first, ``?newest=N``) and ``/decisions/CALL`` (each choice of that call)."""

    @app.api_route("/decisions", methods=READ)
    async def newest(newest: int = NEWEST) -> Response:
        return _json(log.newest(min(newest, MOST_NEWEST)))

    @app.api_route("/decisions/{call_id}", methods=READ)
    async def of_call(call_id: str) -> Response:
        found = log.find(call_id)
        return _json(found, 200 if found else 404)


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
