"""Sequences that move to another instance amid their stream: the gateway hears where they are."""

import asyncio

import pytest

from common.ids import Incarnation, InstanceId
from common.messages import CancelRequest, GenerationRequest, InstanceLife
from tests.gateway.clients import TEXT, complete, in_background, with_peer, with_stream
from tests.gateway.processes import GatewayProcess
from tests.gateway.scripted import DECODE, NEXT_DECODE, TIMEOUT_S, ScriptedPeer


@pytest.mark.parametrize("token_comes_first", [False, True])
@pytest.mark.parametrize(
    ("lost", "tokens_after", "is_continued"),
    [(DECODE, 0, True), (DECODE, 1, False), (NEXT_DECODE, 0, True), (NEXT_DECODE, 1, True)],
)
def test_who_hands_a_sequence_on_is_needed_until_its_next_token_and_its_new_home_from_then_on(
    lost: InstanceId,
    tokens_after: int,
    is_continued: bool,
    token_comes_first: bool,
    gateway: GatewayProcess,
    ids: list[int],
) -> None:
    async def script(peer: ScriptedPeer, first: GenerationRequest) -> None:
        peer.tokens(first, ids[:3])
        if not token_comes_first:
            peer.move(first, 3)
        peer.tokens(first, ids[3 : 3 + tokens_after], start=3)
        if token_comes_first:
            peer.move(first, 3)
        await peer.wait_heard(first.gateway_id)
        life = Incarnation(first.request_id)
        peer.announce_gone(lost, life)
        done = 3 + tokens_after
        if is_continued:
            second = await peer.next_request()
            assert second.output_ids == tuple(ids[:done])
            has_decoded = lost == NEXT_DECODE and tokens_after > 0
            assert peer.formers[-1] == (InstanceLife(NEXT_DECODE, life) if has_decoded else None)
            peer.tokens(second, ids[done:], finish="length")
        else:
            peer.tokens(first, ids[done:], start=done, finish="length")

    with_stream(gateway, script)


def test_a_move_that_overtakes_the_placement_or_follows_word_that_its_home_is_gone_is_seen(
    gateway: GatewayProcess, ids: list[int]
) -> None:
    async def script(peer: ScriptedPeer, first: GenerationRequest) -> None:
        peer.tokens(first, ids[:2])
        peer.move(first, 2)
        peer.tokens(first, ids[2:3], start=2)
        await peer.wait_heard(first.gateway_id)
        peer.gate.set()
        peer.announce_gone(NEXT_DECODE, Incarnation(first.request_id))
        second = await peer.next_request()
        assert second.output_ids == tuple(ids[:3])
        peer.announce_gone(NEXT_DECODE, Incarnation(first.request_id))
        peer.tokens(second, ids[3:5])
        peer.move(second, 5)
        third = await peer.next_request()
        peer.tokens(third, ids[5:], finish="length")

    with_stream(gateway, script, is_held=True)


def test_a_home_that_was_said_to_be_gone_before_an_attempt_was_asked_for_had_come_back(
    gateway: GatewayProcess, ids: list[int]
) -> None:
    """Its instance was silent for longer than a lease, and is the very same life."""

    async def script(peer: ScriptedPeer, first: GenerationRequest) -> None:
        peer.announce_gone(NEXT_DECODE, Incarnation(first.request_id))
        peer.tokens(first, ids[:2])
        peer.move(first, 2)
        # Chosen before or after: nobody knows.
        second = await peer.next_request()
        assert second.output_ids == tuple(ids[:2])
        peer.tokens(second, ids[2:4])
        await peer.wait_heard(first.gateway_id, former=first.request_id)
        peer.move(second, 4)
        peer.tokens(second, ids[4:], start=4, finish="length")

    with_stream(gateway, script)


def test_what_moves_though_nobody_wants_it_any_more_is_cancelled_where_it_goes(
    gateway: GatewayProcess, ids: list[int]
) -> None:
    async def script(peer: ScriptedPeer) -> None:
        answer = in_background(complete(gateway))
        request = await peer.next_request()
        peer.tokens(request, ids, finish="length")
        assert await answer == TEXT
        peer.move(request, 3)
        cancel = CancelRequest(request.request_id, request.attempt)
        async with asyncio.timeout(TIMEOUT_S):
            while await peer.cancels.get() != (NEXT_DECODE, cancel):
                continue

    with_peer(gateway, script)
