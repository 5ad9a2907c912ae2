"""Requests that wait at a scheduler: the gateway asks for them as long as their clients wait."""

import pytest

from common.errors import NoInstanceReady, Overloaded
from tests.gateway.clients import TEXT, complete, in_background, with_peer
from tests.gateway.processes import GatewayProcess
from tests.gateway.scripted import ScriptedPeer

END_TOKEN = 2


def test_one_that_waits_is_asked_for_again_until_it_is_placed(
    gateway: GatewayProcess, ids: list[int]
) -> None:
    async def script(peer: ScriptedPeer) -> None:
        peer.queued = 2
        answer = in_background(complete(gateway))
        asked = [await peer.next_request() for _ in range(3)]
        assert asked[0] == asked[1] == asked[2]
        peer.tokens(asked[2], [*ids, END_TOKEN], finish="stop")
        assert await answer == TEXT

    with_peer(gateway, script)


def test_the_scheduler_hears_at_once_that_the_client_of_one_that_waits_has_left(
    gateway: GatewayProcess,
) -> None:
    async def script(peer: ScriptedPeer) -> None:
        peer.queued = 1
        answer = in_background(complete(gateway))
        first = await peer.next_request()
        peer.gate.clear()
        again = await peer.next_request()
        answer.cancel()
        ended = await peer.next_end()
        assert (ended.request_id, ended.attempt) == (first.request_id, again.attempt)
        assert not peer.gate.is_set(), "its call is still held"
        peer.gate.set()

    with_peer(gateway, script)


@pytest.mark.parametrize("refusal", [NoInstanceReady("this scheduler is shutting down"), Overloaded("full")])
def test_one_that_waited_at_a_scheduler_that_left_is_submitted_again(
    refusal: NoInstanceReady | Overloaded, gateway: GatewayProcess, ids: list[int]
) -> None:
    """The next scheduler may have no room yet."""

    async def script(peer: ScriptedPeer) -> None:
        peer.queued = 1
        peer.refusals = [NoInstanceReady("this scheduler is shutting down"), refusal]
        answer = in_background(complete(gateway))
        asked = [await peer.next_request() for _ in range(4)]
        assert len({each.request_id for each in asked}) == 1
        assert [each.attempt for each in asked] == [0, 0, 1, 2]
        peer.tokens(asked[3], [*ids, END_TOKEN], finish="stop")
        assert await answer == TEXT

    with_peer(gateway, script)


def test_one_that_never_waited_is_refused_at_once(gateway: GatewayProcess) -> None:
    async def script(peer: ScriptedPeer) -> None:
        peer.refusals = [NoInstanceReady("nobody")]
        answer = in_background(complete(gateway))
        await peer.next_request()
        with pytest.raises(Exception, match="nobody"):
            await answer
        assert peer.submissions.empty()

    with_peer(gateway, script)
