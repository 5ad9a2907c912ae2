"""The bus over a real nats-server: calls, errors, order, bounds."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.bus import Bus
from common.errors import (
    BusError,
    BusTimeout,
    BusUnavailable,
    InternalError,
    InvalidRequest,
    MessageTooLarge,
    NoInstanceReady,
    NoResponder,
    Overloaded,
)
from common.ids import RequestId
from common.messages import Acknowledged, RequestEnded
from common.outbox import Outgoing
from common.subjects import Subjects
from tests.common.buses import WAIT_S, Answer, Question, connected, echo, pair, run, until


def test_a_call_is_answered_by_the_handler_of_its_subject(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        async with pair(nats_url, namespace) as (client, server):
            await server.serve(f"{namespace}.echo", Question, echo)
            replies = await asyncio.gather(
                *(client.call(f"{namespace}.echo", Question(str(i)), Answer, WAIT_S) for i in range(500))
            )
            assert [reply.text for reply in replies] == [str(i) for i in range(500)]

    run(work())


def test_a_service_may_call_itself(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        async with connected(nats_url, namespace) as bus:
            await bus.serve(f"{namespace}.echo", Question, echo)
            assert (await bus.call(f"{namespace}.echo", Question("me"), Answer, WAIT_S)).text == "me"

    run(work())


def test_a_request_error_of_the_handler_is_raised_at_the_caller_with_its_fields(
    nats_url: str, namespace: str
) -> None:
    async def refuse(question: Question) -> Answer:
        raise NoInstanceReady("nobody home", param="text", retry_after_s=2.5)

    async def work() -> None:
        async with pair(nats_url, namespace) as (client, server):
            await server.serve(f"{namespace}.x", Question, refuse)
            with pytest.raises(NoInstanceReady, match="nobody home") as caught:
                await client.call(f"{namespace}.x", Question(""), Answer, WAIT_S)
            assert (caught.value.param, caught.value.retry_after_s) == ("text", 2.5)

    run(work())


def test_a_defect_of_the_handler_reaches_the_caller_without_its_text(
    nats_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(question: Question) -> Answer:
        raise KeyError("secret")

    async def work() -> None:
        async with pair(nats_url, namespace) as (client, server):
            await server.serve(f"{namespace}.x", Question, fail)
            with pytest.raises(InternalError) as caught:
                await client.call(f"{namespace}.x", Question(""), Answer, WAIT_S)
            assert "secret" not in caught.value.message

    run(work())
    assert "bus_handler_failed" in caplog.text
    assert "secret" in caplog.text


def test_a_subject_that_nobody_serves_says_so_at_once(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        async with connected(nats_url, namespace) as bus:
            with pytest.raises(NoResponder):
                await bus.call(f"{namespace}.nobody", Question(""), Answer, timeout_s=3600)

    run(work())


def test_a_call_without_an_answer_ends_at_its_timeout(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        forever = asyncio.Event()

        async def never(question: Question) -> Answer:
            await forever.wait()
            return Answer("late")

        async with pair(nats_url, namespace) as (client, server):
            await server.serve(f"{namespace}.x", Question, never)
            with pytest.raises(BusTimeout):
                await client.call(f"{namespace}.x", Question(""), Answer, timeout_s=0.05)
            forever.set()

    run(work())


def test_handlers_run_side_by_side_up_to_their_bound(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        running, most = 0, 0
        all_in = asyncio.Event()

        async def count(question: Question) -> Answer:
            nonlocal running, most
            running += 1
            most = max(most, running)
            if running == 4:
                all_in.set()
            await all_in.wait()
            running -= 1
            return Answer(question.text)

        async with pair(nats_url, namespace) as (client, server):
            await server.serve(f"{namespace}.x", Question, count, max_concurrent=4)
            calls = (client.call(f"{namespace}.x", Question(str(i)), Answer, WAIT_S) for i in range(12))
            assert len(await asyncio.gather(*calls)) == 12
        assert most == 4

    run(work())


def test_calls_beyond_what_may_wait_are_overloaded(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        gate = asyncio.Event()

        async def wait(question: Question) -> Answer:
            await gate.wait()
            return Answer(question.text)

        async with pair(nats_url, namespace) as (client, server):
            await server.serve(f"{namespace}.x", Question, wait, max_concurrent=2, max_waiting=3)
            calls = [
                asyncio.create_task(client.call(f"{namespace}.x", Question(str(i)), Answer, WAIT_S))
                for i in range(9)
            ]
            refused, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            gate.set()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert sum(isinstance(each, Answer) for each in results) == 5
            errors = [each for each in results if isinstance(each, Overloaded)]
            assert len(errors) == 4
            assert all(each.retry_after_s for each in errors)
            assert refused

    run(work())


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payloads=st.lists(st.binary(max_size=200), min_size=1, max_size=40))
def test_garbage_is_counted_and_stops_nothing(payloads: list[bytes], nats_url: str, namespace: str) -> None:
    async def work() -> None:
        heard: list[RequestEnded] = []
        async with pair(nats_url, namespace) as (sender, receiver):
            await receiver.subscribe(f"{namespace}.events", RequestEnded, heard.append)
            for payload in payloads:
                sender._put(Outgoing(f"{namespace}.events", "", payload, is_call=False))
            sender.publish(f"{namespace}.events", RequestEnded(RequestId("last")))
            await sender.flush()
            await receiver.flush()
            await until(lambda: heard, receiver)
            assert heard[-1].request_id == "last"
            assert receiver.counters.malformed == len(payloads) - (len(heard) - 1)

    run(work())


def test_a_malformed_call_is_answered_as_invalid(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        async with pair(nats_url, namespace) as (client, server):
            await server.serve(f"{namespace}.x", Question, echo)
            with pytest.raises(InvalidRequest, match="malformed"):
                await client.call(f"{namespace}.x", Answer("no question"), Answer, WAIT_S)
            assert server.counters.malformed == 1

    run(work())


def test_a_reply_of_another_type_is_an_error_of_the_bus(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        async with pair(nats_url, namespace) as (client, server):
            await server.serve(f"{namespace}.x", Question, echo)
            with pytest.raises(BusError, match="no Acknowledged"):
                await client.call(f"{namespace}.x", Question(""), Acknowledged, WAIT_S)

    run(work())


def test_published_messages_arrive_in_order_and_a_failing_callback_is_counted(
    nats_url: str, namespace: str
) -> None:
    async def work() -> None:
        heard: list[str] = []

        def take(question: Question) -> None:
            if question.text == "13":
                raise ValueError("unlucky")
            heard.append(question.text)

        async with pair(nats_url, namespace) as (sender, receiver):
            await receiver.subscribe(f"{namespace}.events", Question, take)
            for i in range(3000):
                sender.publish(f"{namespace}.events", Question(str(i)))
            await until(lambda: len(heard) == 2999, receiver)
            assert heard == [str(i) for i in range(3000) if i != 13]
            assert receiver.counters.callback_failures == 1

    run(work())


def test_a_subscription_hears_what_is_published_right_after_it_was_made(
    nats_url: str, namespace: str
) -> None:
    async def work() -> None:
        async with pair(nats_url, namespace) as (sender, receiver):
            for i in range(100):
                heard: list[Question] = []
                await receiver.subscribe(f"{namespace}.e{i}", Question, heard.append)
                sender.publish(f"{namespace}.e{i}", Question("hello"))
                await until(lambda heard=heard: heard, receiver)  # type: ignore[misc]

    run(work())


def test_a_queue_group_answers_each_call_once(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        answered: list[str] = []

        async def count(question: Question) -> Answer:
            answered.append(question.text)
            return Answer(question.text)

        async with pair(nats_url, namespace) as (one, other), connected(nats_url, namespace) as client:
            for server in (one, other):
                await server.serve(f"{namespace}.x", Question, count, queue="group")
            for i in range(50):
                await client.call(f"{namespace}.x", Question(str(i)), Answer, WAIT_S)
        assert answered == [str(i) for i in range(50)]

    run(work())


def test_a_message_over_the_limit_is_refused_and_nothing_is_sent(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        async with connected(nats_url, namespace) as bus:
            with pytest.raises(MessageTooLarge, match="the limit is"):
                bus.publish(f"{namespace}.x", Question("x" * (bus.max_message_bytes + 1)))
            with pytest.raises(MessageTooLarge):
                await bus.call(f"{namespace}.x", Question("x" * (bus.max_message_bytes + 1)), Answer, WAIT_S)

    run(work())


def test_publishing_without_yielding_meets_a_bound(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        async with connected(nats_url, namespace) as bus:
            message = Question("x" * 100_000)

            def publish_many() -> None:
                for _ in range(1000):
                    bus.publish(f"{namespace}.x", message)

            with pytest.raises(BusUnavailable, match="outbox is full"):
                publish_many()
            assert bus.counters.dropped == 1
            await bus.flush()
            bus.publish(f"{namespace}.x", message)

    run(work())


def test_closing_lets_handlers_finish_and_sends_what_waits(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        started, gate = asyncio.Event(), asyncio.Event()
        heard: list[Question] = []

        async def slow(question: Question) -> Answer:
            started.set()
            await gate.wait()
            return Answer("done")

        async with connected(nats_url, namespace, "client") as client:
            server = Bus(nats_url, name="server", subjects=Subjects(namespace))
            await server.connect()
            await client.subscribe(f"{namespace}.events", Question, heard.append)
            await server.serve(f"{namespace}.x", Question, slow)
            call = asyncio.create_task(client.call(f"{namespace}.x", Question(""), Answer, WAIT_S))
            await started.wait()
            server.publish(f"{namespace}.events", Question("bye"))
            closing = asyncio.create_task(server.close())
            await until(lambda: heard, client)
            gate.set()
            await closing
            assert (await call).text == "done"
            with pytest.raises(BusUnavailable):
                server.publish(f"{namespace}.events", Question("too late"))
            with pytest.raises(NoResponder):
                await client.call(f"{namespace}.x", Question(""), Answer, WAIT_S)

    run(work())
