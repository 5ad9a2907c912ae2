"""Schedulers that die before they have said where a request goes: the gateway submits it again."""

import asyncio

import openai
import pytest

from common.errors import HandoverFailed, RequestCancelled
from common.ids import Incarnation
from common.messages import GenerationRequest
from gateway.attempts import MAX_RESUBMISSIONS
from gateway.continuing import CONTINUE_BACKOFF_S
from tests.gateway.clients import TEXT, complete, in_background, with_peer, with_stream
from tests.gateway.processes import GatewayProcess
from tests.gateway.scripted import ScriptedPeer


def test_a_submission_that_a_dead_scheduler_may_have_had_is_made_again_once(
    gateway: GatewayProcess, ids: list[int]
) -> None:
    async def script(peer: ScriptedPeer, first: GenerationRequest) -> None:
        # Two others say so.
        peer.announce_scheduler_gone(Incarnation(first.request_id))
        peer.announce_scheduler_gone(Incarnation(first.request_id))
        second = await peer.next_request()
        assert (second.request_id, second.attempt) == (first.request_id, 1)
        peer.gate.set()
        # The answer that came after all is taken back.
        await peer.wait_cancelled(first)
        peer.tokens(second, ids, finish="length")
        ended = await peer.next_end()
        assert (ended.request_id, ended.attempt) == (first.request_id, 1)

    with_stream(gateway, script, is_held=True)


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_request_whose_tokens_all_came_is_answered_though_its_scheduler_died_before_it_said_so(
    is_announced: bool, gateway: GatewayProcess, ids: list[int]
) -> None:
    async def script(peer: ScriptedPeer) -> None:
        peer.gate.clear()
        answer = in_background(complete(gateway))
        request = await peer.next_request()
        peer.tokens(request, ids, finish="length")
        await peer.wait_heard(request.gateway_id)
        if is_announced:
            peer.announce_scheduler_gone(Incarnation(request.request_id))
        assert await answer == TEXT
        if is_announced:
            assert peer.ended.empty(), "it waited for its call to time out"
            peer.gate.set()
        ended = await peer.next_end()
        assert (ended.request_id, ended.attempt) == (request.request_id, 0)
        assert peer.submissions.empty()
        peer.gate.set()

    with_peer(gateway, script)


def test_a_scheduler_that_dies_costs_none_of_the_continuations_that_are_for_sequences_that_break(
    gateway: GatewayProcess, ids: list[int]
) -> None:
    async def script(peer: ScriptedPeer, first: GenerationRequest) -> None:
        for death in range(MAX_RESUBMISSIONS):
            peer.announce_scheduler_gone(Incarnation(f"{first.request_id}-{death}"))
            if death == MAX_RESUBMISSIONS - 1:
                peer.gate.set()
            request = await peer.next_request()
        for _ in range(gateway.config.gateway.max_continuations):
            peer.tokens(request, ids[len(request.output_ids) :][:1])
            peer.fail(request, HandoverFailed("again"), can_continue=True)
            request = await peer.next_request()
        peer.tokens(request, ids[len(request.output_ids) :], finish="length")

    with_stream(gateway, script, is_held=True)


def test_a_request_that_schedulers_may_die_of_is_given_up_and_its_client_told_not_to_try_again(
    gateway: GatewayProcess,
) -> None:
    async def script(peer: ScriptedPeer) -> None:
        peer.gate.clear()
        answer = in_background(complete(gateway))
        for death in range(MAX_RESUBMISSIONS + 1):
            request = await peer.next_request()
            assert request.attempt == death
            peer.announce_scheduler_gone(Incarnation(f"{request.request_id}-{death}"))
        with pytest.raises(openai.InternalServerError) as caught:
            await answer
        assert caught.value.status_code == 500
        assert caught.value.response.headers["x-should-retry"] == "false"
        peer.gate.set()
        ended = await peer.next_end()
        assert (ended.request_id, ended.attempt) == (request.request_id, MAX_RESUBMISSIONS)
        assert peer.submissions.empty()

    with_peer(gateway, script)


def test_a_request_taken_for_one_that_has_ended_is_submitted_again_while_its_client_waits(
    gateway: GatewayProcess, ids: list[int]
) -> None:
    """A store that forgot this gateway made its scheduler drop what it was placing."""

    async def script(peer: ScriptedPeer) -> None:
        peer.refusals += [RequestCancelled("ended while it was placed") for _ in range(2)]
        answer = in_background(complete(gateway))
        attempts = [await peer.next_request() for _ in range(3)]
        assert [each.attempt for each in attempts] == [0, 1, 2]
        peer.tokens(attempts[-1], ids, finish="length")
        assert await answer == TEXT
        ended = await peer.next_end()
        assert (ended.request_id, ended.attempt) == (attempts[0].request_id, 2)
        assert peer.submissions.empty()

    with_peer(gateway, script)


def test_a_request_that_has_ended_is_not_submitted_again_once_its_client_has_left(
    gateway: GatewayProcess,
) -> None:
    async def script(peer: ScriptedPeer) -> None:
        peer.gate.clear()
        peer.refusals += [RequestCancelled("ended while it was placed")]
        answer = in_background(complete(gateway))
        first = await peer.next_request()
        answer.cancel()
        assert await peer.next_ended() == first.request_id
        peer.gate.set()
        await peer.wait_heard(first.gateway_id)
        await asyncio.sleep(2 * CONTINUE_BACKOFF_S)
        assert peer.submissions.empty()

    with_peer(gateway, script)
