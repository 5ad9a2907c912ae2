"""Pools that an instance may have, and what it says of them."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path

import pytest

from common.config import Config, InstanceConfig, MeshConfig
from common.errors import ConfigError
from common.ids import Incarnation, InstanceId
from common.instance_metrics import InstanceMetrics
from common.messages import LoadReport
from common.subjects import Subjects
from common.telemetry import new_registry
from common.transfer.endpoint import TransferEndpoint
from decode import events
from services.hosts.building import build_instance
from services.hosts.engines import check_attention_pools, load_engine
from tests.common.buses import connected, run, until


def test_attention_pools_hold_the_context_or_the_start_fails_and_says_which_key_to_raise() -> None:
    check_attention_pools(32, 256, 8192)
    with pytest.raises(ConfigError, match=r"attention.kv_bytes = '31 blocks of 256 tokens .*8192 tokens"):
        check_attention_pools(31, 256, 8192)


def test_an_instance_says_how_much_its_pools_hold_together_and_the_largest_of_them(
    nats_url: str, namespace: str
) -> None:
    async def work() -> None:
        config = Config(
            mesh=MeshConfig(namespace=namespace), instance=InstanceConfig(role="decode", engine="emulated")
        )
        loaded = await load_engine(config, Path("model"))
        engine = replace(loaded, total_blocks=0)
        transfer = TransferEndpoint(config.transfer)
        reports: list[LoadReport] = []
        async with asyncio.TaskGroup() as tasks, connected(nats_url, namespace) as bus:

            def spawn(work: Coroutine[None, None, None]) -> None:
                tasks.create_task(work)

            instance = build_instance(
                config,
                InstanceId("decode-0"),
                Incarnation("i1"),
                engine,
                transfer,
                bus,
                InstanceMetrics(new_registry("decode")),
                spawn,
            )
            await bus.subscribe(Subjects(namespace).scheduler_events(), LoadReport, reports.append)
            for blocks in (6, 20):
                instance.decode.handle(events.PoolAdded(blocks))
            record = instance.record("", "h", 1, engine)
            instance.publish_load()
            await until(lambda: reports, bus)
        await transfer.close()
        loaded.thread.close()
        for said in (record, reports[0]):
            assert (said.total_blocks, said.largest_pool_blocks) == (26, 20)

    run(work())
