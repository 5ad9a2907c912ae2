"""Sequences that break, and instances that are lost: the gateway has them continued, and when it gives up."""

import time

import openai
import pytest

from common.errors import (
    HandoverFailed,
    NoInstanceReady,
    Overloaded,
)
from common.ids import GatewayId, Incarnation, InstanceId
from common.messages import GenerationRequest, InstanceLife
from common.model.tokens import Tokenizer
from gateway.continuing import CONTINUE_BACKOFF_S, PROGRESS_TOKENS
from gateway.losses import DECLARED_WITHIN_S
from tests.gateway.clients import complete, in_background, with_peer, with_stream
from tests.gateway.processes import GatewayProcess
from tests.gateway.scripted import DECODE, LIFE, PREFILL, ScriptedPeer

END_TOKEN = 2
TRIES = 5
FORMER = InstanceLife(DECODE, LIFE)


def test_a_sequence_that_may_continue_goes_on_where_it_broke(gateway: GatewayProcess, ids: list[int]) -> None:
    async def script(peer: ScriptedPeer, first: GenerationRequest) -> None:
        peer.tokens(first, ids[:4])
        peer.fail(first, HandoverFailed("the link broke"), can_continue=True)
        second = await peer.next_request()
        assert second.output_ids == tuple(ids[:4])
        assert (second.attempt, second.request_id) == (1, first.request_id)
        assert (second.prompt_ids, second.sampling) == (first.prompt_ids, first.sampling)
        peer.tokens(second, [*ids[4:], END_TOKEN], finish="stop")

    with_stream(gateway, script, seed=5)


@pytest.mark.parametrize(("lost", "tokens_before"), [(DECODE, 5), (PREFILL, 0), (PREFILL, 1)])
def test_losing_an_instance_that_is_needed_continues_the_sequence(
    lost: InstanceId, tokens_before: int, gateway: GatewayProcess, ids: list[int]
) -> None:
    async def script(peer: ScriptedPeer, first: GenerationRequest) -> None:
        peer.tokens(first, ids[:tokens_before])
        peer.announce_gone(lost)
        second = await peer.next_request()
        assert second.attempt == 1
        peer.tokens(second, ids[len(second.output_ids) :], finish="length")

    with_stream(gateway, script)


@pytest.mark.parametrize(
    ("tokens", "formers"),
    [((1, 2), [None, None, FORMER]), ((2, 0), [None, FORMER, None]), ((2, 1), [None, FORMER, FORMER])],
)
def test_a_lost_decode_instance_is_named_if_it_drew_a_token_of_the_attempt(
    tokens: tuple[int, int],
    formers: list[InstanceLife | None],
    gateway: GatewayProcess,
    ids: list[int],
) -> None:
    """The first token is prefill's, but for an attempt that is resumed."""

    async def script(peer: ScriptedPeer, request: GenerationRequest) -> None:
        for count in tokens:
            done = len(request.output_ids)
            peer.tokens(request, ids[done : done + count])
            peer.announce_gone(DECODE)
            request = await peer.next_request()
        assert request.output_ids == tuple(ids[: sum(tokens)])
        assert peer.formers == formers
        peer.tokens(request, ids[sum(tokens) :], finish="length")

    with_stream(gateway, script)


def test_who_decoded_a_sequence_is_named_until_it_is_placed(gateway: GatewayProcess, ids: list[int]) -> None:
    async def script(peer: ScriptedPeer, first: GenerationRequest) -> None:
        peer.tokens(first, ids[:2])
        peer.refusals += [NoInstanceReady("not yet"), Overloaded("not yet")]
        peer.announce_gone(DECODE)
        attempts = [await peer.next_request() for _ in range(3)]
        peer.fail(attempts[-1], HandoverFailed("the KV was dropped"), can_continue=True)
        last = await peer.next_request()
        assert peer.formers == [None, FORMER, FORMER, FORMER, None]
        peer.tokens(last, ids[2:], finish="length")

    with_stream(gateway, script)


def test_losing_the_prefill_instance_after_the_handover_changes_nothing(
    gateway: GatewayProcess, ids: list[int]
) -> None:
    async def script(peer: ScriptedPeer, request: GenerationRequest) -> None:
        peer.tokens(request, ids[:2])
        peer.announce_gone(PREFILL)
        peer.tokens(request, ids[2:], start=2, finish="length")

    with_stream(gateway, script)


@pytest.mark.parametrize("lost", [DECODE, PREFILL])
def test_losing_an_earlier_life_of_an_instance_changes_nothing(
    lost: InstanceId, gateway: GatewayProcess, ids: list[int]
) -> None:
    async def script(peer: ScriptedPeer, request: GenerationRequest) -> None:
        peer.announce_gone(lost, Incarnation("before"))
        peer.tokens(request, ids, finish="length")

    with_stream(gateway, script)


def test_a_gateway_that_lives_though_it_was_declared_gone_has_its_sequences_placed_again(
    gateway: GatewayProcess, ids: list[int]
) -> None:
    async def script(peer: ScriptedPeer, first: GenerationRequest) -> None:
        peer.tokens(first, ids[:3])
        peer.announce_gateway_gone(GatewayId("another"))
        peer.announce_gateway_gone(first.gateway_id)
        second = await peer.next_request()
        assert second.attempt == 1
        peer.tokens(second, ids[len(second.output_ids) :], finish="length")

    with_stream(gateway, script)


def test_what_began_while_others_still_heard_that_its_gateway_is_gone_is_placed_again(
    gateway: GatewayProcess, ids: list[int]
) -> None:
    """An instance that heard it later than the gateway forgot that, too."""
    were_in_time: list[bool] = []

    async def script(peer: ScriptedPeer, first: GenerationRequest) -> None:
        declared_s = time.monotonic()
        peer.announce_gateway_gone(first.gateway_id)
        second = await peer.next_request()
        were_in_time.append(time.monotonic() < declared_s + DECLARED_WITHIN_S)
        await peer.wait_cancelled(first)
        if not were_in_time[-1]:  # everybody had heard when it began
            peer.tokens(second, ids, finish="length")
            return
        peer.tokens(second, ids[:2])
        third = await peer.next_request()
        await peer.wait_cancelled(second)
        assert (third.attempt, third.output_ids) == (2, tuple(ids[:2]))
        peer.tokens(third, ids[2:], finish="length")

    while not any(were_in_time) and len(were_in_time) < TRIES:
        with_stream(gateway, script)
    assert any(were_in_time), "the machine is too busy for what is tested"


def test_each_scheduler_s_word_that_a_living_gateway_is_gone_costs_none_of_the_continuations(
    gateway: GatewayProcess, ids: list[int]
) -> None:
    """Instances forget its sequences at each."""
    schedulers = gateway.config.gateway.max_continuations + 1

    async def script(peer: ScriptedPeer, request: GenerationRequest) -> None:
        for _ in range(schedulers):
            peer.tokens(request, ids[len(request.output_ids) :][:1])
            await peer.wait_heard(request.gateway_id)
            peer.announce_gateway_gone(request.gateway_id)
            former, request = request, await peer.next_request()
            await peer.wait_cancelled(former)
        assert request.output_ids == tuple(ids[:schedulers])
        peer.tokens(request, ids[schedulers:], finish="length")

    with_stream(gateway, script)


def test_a_gateway_that_is_declared_gone_while_it_submits_submits_again(
    gateway: GatewayProcess, ids: list[int]
) -> None:
    async def script(peer: ScriptedPeer, first: GenerationRequest) -> None:
        peer.announce_gateway_gone(first.gateway_id)
        peer.gate.set()
        second = await peer.next_request()
        await peer.wait_cancelled(first)
        peer.tokens(second, ids, finish="length")

    with_stream(gateway, script, is_held=True)


def test_a_sequence_that_breaks_too_often_ends_in_an_error_event(
    gateway: GatewayProcess, ids: list[int]
) -> None:
    async def script(peer: ScriptedPeer) -> None:
        answer = in_background(complete(gateway))
        for attempt in range(gateway.config.gateway.max_continuations + 1):
            request = await peer.next_request()
            assert request.attempt == attempt
            peer.tokens(request, [ids[attempt]])
            peer.fail(request, HandoverFailed("again"), can_continue=True)
        with pytest.raises(openai.APIError, match="broke") as caught:
            await answer
        assert caught.value.code == "instance_lost"

    with_peer(gateway, script)


def test_a_sequence_that_gets_on_between_its_breaks_goes_on_to_its_end(
    gateway: GatewayProcess, tokenizer: Tokenizer
) -> None:
    breaks = gateway.config.gateway.max_continuations + 2
    text = "A lamella is a thin plate. " * 20
    ids = tokenizer.encode(text)

    async def script(peer: ScriptedPeer) -> None:
        answer = in_background(complete(gateway, max_tokens=len(ids)))
        for _ in range(breaks):
            request = await peer.next_request()
            done = len(request.output_ids)
            peer.tokens(request, ids[done : done + PROGRESS_TOKENS])
            peer.fail(request, HandoverFailed("again"), can_continue=True)
        request = await peer.next_request()
        peer.tokens(request, ids[len(request.output_ids) :], finish="length")
        assert await answer == text

    with_peer(gateway, script)


def test_who_had_no_room_after_all_is_asked_again_ever_later(gateway: GatewayProcess, ids: list[int]) -> None:
    async def script(peer: ScriptedPeer, request: GenerationRequest) -> None:
        began_s = time.monotonic()
        for _ in range(gateway.config.gateway.max_continuations):
            peer.fail(request, NoInstanceReady("no attention worker"), can_continue=True)
            request = await peer.next_request()
        assert time.monotonic() - began_s >= CONTINUE_BACKOFF_S * (1 + 2 + 4)
        peer.tokens(request, ids, finish="length")

    with_stream(gateway, script)


def test_a_lost_instance_is_named_once_however_often_the_sequence_is_submitted(
    gateway: GatewayProcess, ids: list[int]
) -> None:
    """Its next life is there by then, and would be suspected again each time."""

    async def script(peer: ScriptedPeer, first: GenerationRequest) -> None:
        peer.refusals += [NoInstanceReady("not yet"), NoInstanceReady("not yet")]
        peer.fail(first, HandoverFailed("gone"), can_continue=True, lost_instance=PREFILL)
        attempts = [await peer.next_request() for _ in range(3)]
        assert peer.lost == [(), (PREFILL,), (), ()]
        peer.tokens(attempts[-1], ids, finish="length")

    with_stream(gateway, script)
