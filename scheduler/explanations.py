"""``/decisions`` and ``/regret`` of a scheduler: why requests went where they went, and where else."""

import asyncio
import time
from collections.abc import Iterator

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry

from common.decision_query import read_query
from common.errors import InvalidRequest
from common.http import READ
from common.telemetry import Sums, export_sums
from scheduler.decision_log import Decision
from scheduler.placing import Placer
from scheduler.regret import RegretLog

BAD_REQUEST = 400


def add_routes(app: FastAPI, placer: Placer) -> None:
    """``/decisions`` (the newest first; ``?newest=N``, ``?class=NAME``, ``?instance=ID``: those that looked
    at it; ``common.decision_query``), ``/decisions/CALL`` (each choice of that call), ``/regret`` (a
    ``RegretReport``). Times are those of the wall clock: what schedulers of several hosts decided is put in
    order by them."""
    settings = placer.settings

    @app.api_route("/decisions", methods=READ)
    async def newest(request: Request) -> Response:
        try:
            asked = read_query(request.query_params)
        except InvalidRequest as exc:
            return _json({"detail": exc.message}, BAD_REQUEST)
        return _json(_dated(placer.log.newest(*asked)))

    @app.api_route("/decisions/{call_id}", methods=READ)
    async def of_call(call_id: str) -> Response:
        found = placer.log.find(call_id)
        return _json(_dated(found), 200 if found else 404)

    @app.api_route("/regret", methods=READ)
    async def regret() -> Response:
        return _json(placer.regret.report(settings.prefill_policy, settings.decode_policy))


def export_regret(registry: CollectorRegistry, log: RegretLog) -> None:
    """As metrics, summed when they are scraped."""

    def regrets() -> Iterator[Sums]:
        for each in log.policies.values():
            yield Sums((each.phase, each.policy), each.decisions, each.regret_s)

    def errors() -> Iterator[Sums]:
        for each in log.hindsight.values():
            yield Sums((each.phase,), each.requests, each.error_s)

    export_sums(
        registry,
        "policy_regret_seconds",
        "By how much a policy's choice would have been worse than the best, as predicted.",
        ("phase", "policy"),
        regrets,
    )
    export_sums(
        registry,
        "placement_prediction_error_seconds",
        "By how much TTFT (prefill) and TPOT (decode) missed what was predicted of the choice taken.",
        ("phase",),
        errors,
    )


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _dated(decisions: list[Decision]) -> list[Decision]:
    """With seconds since 1970, by what the wall clock says now."""
    began_s = time.time() - asyncio.get_running_loop().time()
    return [msgspec.structs.replace(each, at_s=began_s + each.at_s) for each in decisions]
