"""However a request ends, schedulers hear it from its gateway: what is booked may go by no other word."""

import asyncio

import openai
import pytest

from common.errors import HandoverFailed, InternalError
from common.messages import RequestEnded
from tests.gateway.clients import complete, in_background, with_peer
from tests.gateway.processes import GatewayProcess
from tests.gateway.scripted import ScriptedPeer


async def refusal_of(answer: asyncio.Task[str]) -> str | None:
    """The code of the error in which it ends."""
    with pytest.raises(openai.APIError) as caught:
        await answer
    return caught.value.code


def test_one_that_fails_for_good_is_over_everywhere(gateway: GatewayProcess) -> None:
    async def script(peer: ScriptedPeer) -> None:
        answer = in_background(complete(gateway))
        request = await peer.next_request()
        peer.fail(request, InternalError("a defect"), can_continue=False)
        assert await refusal_of(answer) == "internal_error"
        await peer.wait_cancelled(request)
        assert await peer.next_end() == RequestEnded(request.request_id, len(request.prompt_ids))

    with_peer(gateway, script)


def test_one_that_breaks_too_often_is_over_with_its_last_attempt(gateway: GatewayProcess) -> None:
    most = gateway.config.gateway.max_continuations

    async def script(peer: ScriptedPeer) -> None:
        answer = in_background(complete(gateway))
        for _ in range(most + 1):
            request = await peer.next_request()
            peer.fail(request, HandoverFailed("again"), can_continue=True)
        assert await refusal_of(answer) == "instance_lost"
        ended = await peer.next_end()
        assert (ended.request_id, ended.attempt) == (request.request_id, most)

    with_peer(gateway, script)


def test_one_whose_tokens_stay_away_is_over_everywhere(gateway: GatewayProcess) -> None:
    async def script(peer: ScriptedPeer) -> None:
        answer = in_background(complete(gateway))
        request = await peer.next_request()
        assert await refusal_of(answer) == "deadline_exceeded"
        await peer.wait_cancelled(request)
        assert await peer.next_ended() == request.request_id

    with_peer(gateway, script)


def test_one_that_no_scheduler_answers_is_over_though_it_may_have_been_placed(
    gateway: GatewayProcess,
) -> None:
    async def script(peer: ScriptedPeer) -> None:
        peer.gate.clear()
        answer = in_background(complete(gateway))
        request = await peer.next_request()
        assert await refusal_of(answer) == "no_instance_ready"
        assert await peer.next_end() == RequestEnded(request.request_id)
        peer.gate.set()

    with_peer(gateway, script)


def test_one_that_a_scheduler_s_defect_refuses_is_over_though_it_may_have_been_placed(
    gateway: GatewayProcess,
) -> None:
    async def script(peer: ScriptedPeer) -> None:
        peer.refusals.append(InternalError("it raised amid the delivery"))
        answer = in_background(complete(gateway))
        request = await peer.next_request()
        assert await refusal_of(answer) == "internal_error"
        assert await peer.next_end() == RequestEnded(request.request_id)

    with_peer(gateway, script)
