"""An attention worker's service in this process, and decode instances' bindings to it, over a real bus."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from attention.service import AttentionService
from attention.state import AttentionState
from common.bus import Bus
from common.config import AttentionConfig, Config, ModelConfig, TransferConfig
from common.http import Health
from common.ids import InstanceId, new_incarnation
from common.kv.layout import KVLayout
from common.messages import InstanceEvent, ServiceRecord
from common.messages.attention import AttentionCall
from common.model.exchange import Pace
from common.service import ServiceProcess
from common.spec import AttentionSpec
from common.store import Store
from common.subjects import Subjects
from common.transfer.endpoint import TransferEndpoint
from decode.attention_needs import AttentionNeeds
from decode.binding import Binder

LAYERS = 2
KV_BYTES = 1 << 20
NEEDS = AttentionNeeds(
    heads=4,
    layout=KVLayout(layers=LAYERS, kv_heads=2, head_dim=8, block_size=4, element_bytes=4),
    attention_specs=(AttentionSpec(4, 2, 8, 0.5),) * LAYERS,
    element_type="float32",
    context_length=64,
    max_batch=4,
    workers=1,
    partition="requests",
    mini_batches=1,
    lanes=1,
)
SHARED_MEMORY = TransferConfig(path="shared_memory")
CALL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Worker:
    service: AttentionService
    record: ServiceRecord


@asynccontextmanager
async def attention_service(
    bus: Bus,
    redis_url: str,
    namespace: str,
    settings: AttentionConfig,
    service_id: str = "attention-0",
    transfer_config: TransferConfig = SHARED_MEMORY,
) -> AsyncIterator[Worker]:
    """Serves calls on ``bus``. A task of the service that fails ends the block, as it ends the process."""
    config = Config(model=ModelConfig(kernels="torch"), attention=settings, transfer=transfer_config)
    transfer = TransferEndpoint(config.transfer)
    await transfer.start()
    async with asyncio.TaskGroup() as tasks:
        process = ServiceProcess(
            config=config,
            kind="attention",
            service_id=service_id,
            incarnation=new_incarnation(),
            http_url="http://127.0.0.1:0",
            bus=bus,
            store=Store(redis_url, namespace),
            subjects=Subjects(namespace),
            registry=CollectorRegistry(),
            health=Health(),
            app=FastAPI(),
            _tasks=tasks,
        )
        state = AttentionState(
            service_id, settings.kv_bytes, settings.exchange_bytes, settings.decode_instances
        )
        service = AttentionService(state, transfer, process, torch.device("cpu"))
        service.start()
        await bus.serve(process.subjects.attention_calls(service_id), AttentionCall, service.answer)
        await bus.subscribe(process.subjects.everyone(), InstanceEvent, service.take_event)
        try:
            yield Worker(service, process.record("attention"))
        finally:
            await service.close()
            process._cancel_tasks()
            await process.store.close()


@asynccontextmanager
async def binder(
    bus: Bus,
    namespace: str,
    needs: AttentionNeeds = NEEDS,
    new_pace: Callable[[], Pace | None] = lambda: None,
) -> AsyncIterator[Binder]:
    """Of one life of a decode instance."""
    transfer = TransferEndpoint(SHARED_MEMORY)
    await transfer.start()
    try:
        yield Binder(
            InstanceId("decode-0"),
            new_incarnation(),
            needs,
            transfer,
            bus,
            Subjects(namespace),
            CALL_TIMEOUT_S,
            new_pace,
        )
    finally:
        await transfer.close()
