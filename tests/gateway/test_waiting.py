"""Requests that wait, at a scheduler or for somebody to come: the gateway asks for them as long as their
clients wait."""

import asyncio
import time
from collections.abc import Iterator

import msgspec
import openai
import pytest

from common.errors import InvalidRequest, NoInstanceReady, Overloaded, RequestError
from gateway.continuing import WAITS_S
from tests.gateway.clients import PROMPT, TEXT, client_of, complete, in_background, with_peer
from tests.gateway.conftest import gateway_config
from tests.gateway.processes import GatewayProcess, running_gateway
from tests.gateway.scripted import ScriptedPeer, scripted_peer

END_TOKEN = 2
WAIT_S = 4.0


@pytest.fixture(scope="module")
def patient(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway whose requests wait for somebody to be there."""
    config = gateway_config(nats_url, redis_url)
    own = msgspec.structs.replace(config.gateway, wait_for_instance_s=WAIT_S)
    config = msgspec.structs.replace(config, gateway=own)
    with running_gateway(config, tmp_path_factory.mktemp("patient")) as process:
        yield process


def test_one_that_waits_is_asked_for_again_until_it_is_placed(
    gateway: GatewayProcess, ids: list[int]
) -> None:
    async def script(peer: ScriptedPeer) -> None:
        peer.queued = 2
        answer = in_background(complete(gateway))
        asked = [await peer.next_request() for _ in range(3)]
        assert asked[0] == asked[1] == asked[2]
        assert peer.wanted_for_s[0] < peer.wanted_for_s[1] < peer.wanted_for_s[2]
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


def test_one_for_which_nobody_is_there_waits_until_somebody_is_and_has_room(
    patient: GatewayProcess, ids: list[int]
) -> None:
    async def script(peer: ScriptedPeer) -> None:
        peer.refusals = [NoInstanceReady("nobody"), Overloaded("full"), NoInstanceReady("nobody")]
        answer = in_background(complete(patient))
        asked = [await peer.next_request() for _ in range(4)]
        assert len({each.request_id for each in asked}) == 1
        assert [each.attempt for each in asked] == [0, 1, 2, 3]
        peer.tokens(asked[3], [*ids, END_TOKEN], finish="stop")
        assert await answer == TEXT
        assert peer.wanted_for_s[3] >= sum(WAITS_S[:3]), "all that it has waited"

    with_peer(patient, script)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_where_nobody_comes_it_is_refused_with_its_status_once_it_has_waited(
    is_streamed: bool, patient: GatewayProcess
) -> None:
    async def script(peer: ScriptedPeer) -> None:
        peer.refusals = [NoInstanceReady("nobody", retry_after_s=2.0) for _ in range(100)]
        began_s = time.monotonic()
        async with client_of(patient) as client:
            with pytest.raises(openai.InternalServerError, match="nobody") as caught:
                await client.completions.create(**PROMPT, stream=is_streamed)
        assert time.monotonic() - began_s >= WAIT_S
        assert (caught.value.status_code, caught.value.code) == (503, "no_instance_ready")
        assert caught.value.response.headers["retry-after"] == "2"
        assert len(peer.refusals) < 99, "it asked again"

    with_peer(patient, script)


def test_where_no_scheduler_answers_it_waits_for_one(patient: GatewayProcess, ids: list[int]) -> None:
    async def run() -> None:
        answer = in_background(complete(patient))
        await asyncio.sleep(0.3)
        assert not answer.done()
        async with scripted_peer(patient) as peer:
            request = await peer.next_request()
            peer.tokens(request, [*ids, END_TOKEN], finish="stop")
            assert await answer == TEXT

    asyncio.run(run())


@pytest.mark.parametrize("refusal", [Overloaded("full"), InvalidRequest("never")])
def test_one_for_which_somebody_is_there_is_refused_at_once(
    refusal: RequestError, patient: GatewayProcess
) -> None:
    async def script(peer: ScriptedPeer) -> None:
        peer.refusals = [refusal]
        answer = in_background(complete(patient))
        await peer.next_request()
        with pytest.raises(openai.APIError, match=refusal.message):
            await answer
        assert peer.submissions.empty()

    with_peer(patient, script)


def test_one_whose_client_leaves_asks_no_more(patient: GatewayProcess) -> None:
    async def script(peer: ScriptedPeer) -> None:
        peer.refusals = [NoInstanceReady("nobody") for _ in range(100)]
        answer = in_background(complete(patient))
        request = await peer.next_request()
        answer.cancel()
        ended = await peer.next_end()
        assert ended.request_id == request.request_id
        while not peer.submissions.empty():
            peer.submissions.get_nowait()
        await asyncio.sleep(0.5)
        assert peer.submissions.empty()

    with_peer(patient, script)


def test_of_several_choices_none_asks_on_where_one_is_refused(patient: GatewayProcess) -> None:
    """All or none: the others, which wait, are given up with it."""

    async def script(peer: ScriptedPeer) -> None:
        peer.refusals = [NoInstanceReady("nobody"), InvalidRequest("never")]
        async with client_of(patient) as client:
            with pytest.raises(openai.BadRequestError, match="never"):
                await client.completions.create(**PROMPT, n=2)
        for _ in range(2):
            await peer.next_request()
        await asyncio.sleep(1.0)
        assert peer.submissions.empty(), "it asks for one whose client has been answered"

    with_peer(patient, script)
