"""Both rooms of an instance over one pool, and its role: over a real bus, with the emulated engine."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from common.config import Config, InstanceConfig, MeshConfig, SchedulerConfig
from common.errors import InvalidRequest, LeaderSuperseded, NoInstanceReady
from common.ids import Incarnation, InstanceId, RequestId
from common.instance_metrics import InstanceMetrics
from common.kv.blocks import BlockOwner
from common.lifecycle import DecodePhase
from common.messages import (
    Acknowledged,
    DecodeTask,
    FlipProgress,
    FlipRole,
    GatewayEvent,
    InstanceLife,
    LeaderAnnounced,
    LeaveSequence,
    LoadReport,
    OfferDeclined,
    Placement,
    PlaceMoved,
    Role,
    SequenceMoved,
)
from common.subjects import Subjects
from common.telemetry import new_registry
from common.transfer.endpoint import TransferEndpoint
from prefill.events import SequenceLeft
from services.hosts.building import build_instance
from services.hosts.engines import load_engine
from services.hosts.instance import Instance
from services.hosts.load_report import Asked
from tests.common.buses import connected, run, until
from tests.decode.states import PREFILL, task_of
from tests.requests import GATEWAY, make_request

NOBODY = InstanceId("decode-9")
LIFE = Incarnation("i1")
CHUNK_TOKENS = 300


@asynccontextmanager
async def decode_instance(
    nats_url: str,
    namespace: str,
    total_blocks: int | None = None,
    scheduler: SchedulerConfig | None = None,
) -> AsyncIterator[Instance]:
    """``total_blocks`` 0: its KV is attention workers'; None: as configured."""
    settings = InstanceConfig(role="decode", engine="emulated", chunk_tokens=CHUNK_TOKENS)
    config = Config(
        mesh=MeshConfig(namespace=namespace), instance=settings, scheduler=scheduler or SchedulerConfig()
    )
    loaded = await load_engine(config, Path("model"))
    engine = loaded if total_blocks is None else replace(loaded, total_blocks=total_blocks)
    transfer, started = TransferEndpoint(config.transfer), set[asyncio.Task[None]]()

    def spawn(work: Coroutine[None, None, None]) -> None:
        started.add(asyncio.create_task(work))

    async with connected(nats_url, namespace) as bus:
        metrics = InstanceMetrics(new_registry("decode"))
        instance_id = InstanceId("decode-0")
        yield build_instance(config, instance_id, LIFE, engine, transfer, bus, metrics, spawn)
        for task in started:
            task.cancel()
        await asyncio.wait(started or {asyncio.create_task(asyncio.sleep(0))})
    await transfer.close()
    loaded.thread.close()


def test_a_flip_is_told_to_the_scheduler_at_once_and_written_down(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        reports: list[LoadReport] = []
        written: list[Role] = []

        async with decode_instance(nats_url, namespace) as instance:

            async def write_record() -> None:
                assert instance.home == instance.role
                written.append(instance.role)

            instance.write_record = write_record
            await instance.bus.subscribe(Subjects(namespace).scheduler_events(), LoadReport, reports.append)
            for _ in range(2):
                assert (await instance.flip("prefill")).left == 0
            await until(lambda: reports, instance.bus)
        assert [(report.role, report.is_draining) for report in reports] == [("prefill", False)]
        assert reports[0].chunk_tokens == CHUNK_TOKENS
        assert written == ["prefill"]

    run(work())


@pytest.mark.parametrize(
    ("scheduler", "has_needs", "has_spare"),
    [
        (SchedulerConfig(), True, True),
        (SchedulerConfig(shadow_share=0.0), True, False),
        (SchedulerConfig(shadow_share=0.0, rebalance_decodes=False), False, False),
    ],
)
def test_it_reports_what_the_scheduler_s_settings_ask(
    nats_url: str, namespace: str, scheduler: SchedulerConfig, has_needs: bool, has_spare: bool
) -> None:
    async def work() -> None:
        async with decode_instance(nats_url, namespace, scheduler=scheduler) as instance:
            assert instance._asked == Asked(has_needs=has_needs, has_spare=has_spare)

    run(work())


def test_an_instance_without_kv_of_its_own_and_one_that_drains_keep_their_role(
    nats_url: str, namespace: str
) -> None:
    async def work() -> None:
        async with decode_instance(nats_url, namespace, total_blocks=0) as instance:
            with pytest.raises(InvalidRequest, match="attention workers"):
                await instance.flip("prefill")
        async with decode_instance(nats_url, namespace) as instance:
            await instance.drain(timeout_s=1.0)
            with pytest.raises(NoInstanceReady, match="draining"):
                await instance.flip("prefill")
            assert instance.role == "decode"

    run(work())


def test_a_sequence_that_waits_for_memory_gets_what_the_other_room_frees(
    nats_url: str, namespace: str
) -> None:
    """A sequence that ran here has all of it, and is to go to an instance that is not there."""

    async def work() -> None:
        async with decode_instance(nats_url, namespace) as instance:
            blocks, decode = instance.blocks, instance.decode.state
            held_by = BlockOwner("handed-on", RequestId("r1"), 0)
            assert blocks.try_allocate(held_by, blocks.total_blocks)
            await instance.decode.decode(task_of("r2"))
            [waiting] = decode.sequences.values()
            assert waiting.phase is DecodePhase.WAITING
            request = make_request("r1", 5, 9, output_ids=(7, 8))
            instance.prefill.take_over(SequenceLeft(held_by, request, NOBODY, LIFE, None))
            await until(lambda: waiting.phase is not DecodePhase.WAITING, instance.bus)

    run(work())


def test_a_scheduler_that_does_not_lead_any_more_changes_no_role(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        async with decode_instance(nats_url, namespace) as instance:
            await instance.subscribe()
            bus, subjects = instance.bus, instance.subjects
            bus.publish(subjects.leader(), LeaderAnnounced("scheduler-1", LIFE, epoch=7))
            await until(lambda: instance.leaders.highest == 7, bus)
            calls = subjects.instance_calls(instance.instance_id)
            with pytest.raises(LeaderSuperseded, match="epoch 6 is over"):
                await bus.call(calls, FlipRole("prefill", epoch=6), FlipProgress, 5.0)
            assert instance.role == "decode"
            await bus.call(calls, FlipRole("prefill", epoch=7), FlipProgress, 5.0)
            # A person's word needs no lease.
            await bus.call(calls, FlipRole("decode"), FlipProgress, 5.0)
            assert instance.role == "decode"

    run(work())


def test_a_sequence_that_its_next_instance_refuses_goes_where_the_scheduler_says(
    nats_url: str, namespace: str
) -> None:
    async def work() -> None:
        offers: list[InstanceId] = []
        heard: list[GatewayEvent] = []
        home = Placement(InstanceId("decode-0"), LIFE, InstanceId("decode-2"), LIFE)

        async def refuse(task: DecodeTask) -> Acknowledged:
            offers.append(NOBODY)
            raise NoInstanceReady("admits no sequences now")

        async def take(task: DecodeTask) -> Acknowledged:
            offers.append(home.decode_instance)
            return Acknowledged()

        async def place(call: PlaceMoved) -> Placement:
            assert call.request.output_ids == (7, 8)
            assert call.former == InstanceLife(InstanceId("decode-0"), LIFE)
            return home

        async with decode_instance(nats_url, namespace) as instance:
            bus, subjects = instance.bus, instance.subjects
            await bus.serve(subjects.instance_calls(NOBODY), DecodeTask, refuse)
            await bus.serve(subjects.instance_calls(home.decode_instance), DecodeTask, take)
            await bus.serve(subjects.submit(), PlaceMoved, place)
            await bus.subscribe(subjects.gateway_events(GATEWAY), GatewayEvent, heard.append)
            held_by = BlockOwner("handed-on", RequestId("r1"), 0)
            assert instance.blocks.try_allocate(held_by, 1)
            request = make_request("r1", 5, 9, output_ids=(7, 8))
            instance.prefill.take_over(SequenceLeft(held_by, request, NOBODY, LIFE, None))
            await until(lambda: len(offers) == 2 and heard, bus)
        assert offers == [NOBODY, home.decode_instance]
        assert heard == [SequenceMoved(RequestId("r1"), 0, home, output_tokens=2)]

    run(work())


def test_a_sequence_that_waits_is_given_back_when_the_leader_asks_and_nobody_else(
    nats_url: str, namespace: str
) -> None:
    async def work() -> None:
        declined: list[OfferDeclined] = []
        async with decode_instance(nats_url, namespace) as instance:
            await instance.subscribe()
            bus, subjects, decode = instance.bus, instance.subjects, instance.decode
            await bus.subscribe(subjects.instance_events(PREFILL), OfferDeclined, declined.append)
            assert instance.blocks.try_allocate(
                BlockOwner("prefill", RequestId("r1"), 0), instance.blocks.total_blocks
            )
            await decode.decode(task_of("r2"))
            instance.leaders.note(7)
            for epoch in (6, 7):
                leave = LeaveSequence(RequestId("r2"), 0, NOBODY, epoch)
                bus.publish(subjects.instance_events(instance.instance_id), leave)
                assert not declined, "a scheduler that leads no more was obeyed"
                await bus.flush(5.0)
            await until(lambda: declined, bus)
            assert declined == [OfferDeclined(RequestId("r2"), 0, instance.instance_id, NOBODY)]
            assert decode.state.is_idle

    run(work())


def test_what_was_offered_and_given_back_goes_where_it_is_wanted(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        offers: list[InstanceId] = []
        wanted = InstanceId("decode-2")

        async def take(task: DecodeTask) -> Acknowledged:
            offers.append(NOBODY if not offers else wanted)
            return Acknowledged()

        async def place(call: PlaceMoved) -> Placement:
            assert call.wanted == wanted
            return Placement(InstanceId("decode-0"), LIFE, wanted, LIFE)

        async with decode_instance(nats_url, namespace) as instance:
            await instance.subscribe()
            bus, subjects = instance.bus, instance.subjects
            for instance_id in (NOBODY, wanted):
                await bus.serve(subjects.instance_calls(instance_id), DecodeTask, take)
            await bus.serve(subjects.submit(), PlaceMoved, place)
            held_by = BlockOwner("handed-on", RequestId("r1"), 0)
            assert instance.blocks.try_allocate(held_by, 1)
            request = make_request("r1", 5, 9, output_ids=(7, 8))
            instance.prefill.take_over(SequenceLeft(held_by, request, NOBODY, LIFE, None))
            await until(lambda: len(offers) == 1, bus)
            declined = OfferDeclined(RequestId("r1"), 0, NOBODY, wanted)
            bus.publish(subjects.instance_events(instance.instance_id), declined)
            await until(lambda: len(offers) == 2, bus)

    run(work())
