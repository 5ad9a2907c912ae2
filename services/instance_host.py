"""`lamella serve prefill` and `lamella serve decode`: one process that hosts an instance."""

import os

import msgspec

from common.config import Config
from common.ids import InstanceId
from common.kv.endpoint import KV_REGION
from common.messages import KVDestination, Role
from common.service import Running, ServiceProcess, run_service
from common.telemetry import InstanceMetrics
from common.transfer.buffers import SharedBuffer
from common.transfer.endpoint import TransferEndpoint
from services.engines import has_remote_attention, load_engine
from services.instance import build_instance
from services.model_directory import model_directory


async def run_instance(config: Config, role: Role) -> None:
    """Runs one instance with ``role`` until it is told to stop. Raises what keeps it from starting."""
    instance_config = msgspec.structs.replace(config.instance, role=role)
    await run_service(msgspec.structs.replace(config, instance=instance_config), role, _start)


async def _start(process: ServiceProcess) -> Running:
    config = process.config
    engine = await load_engine(config, model_directory(config.model))
    transfer = TransferEndpoint(config.transfer)
    await transfer.start()
    # Before anybody is told of this process's memory.
    transfer.register(KV_REGION, engine.buffer)
    workers: tuple[KVDestination, ...] = ()
    if has_remote_attention(config):
        from services.remote_engine import bind_attention, register_responses

        needs, responses = register_responses(config, engine, transfer)
        engine, workers = await bind_attention(process, engine, transfer, needs, responses)
    instance = build_instance(
        config,
        InstanceId(process.service_id),
        process.incarnation,
        engine,
        transfer,
        workers,
        process.bus,
        InstanceMetrics(process.registry),
        process.spawn,
    )
    await instance.subscribe()
    process.spawn(instance.reporter.run(instance.publish_load))

    async def close() -> None:
        await transfer.close()
        engine.thread.close()
        if isinstance(engine.buffer, SharedBuffer):
            engine.buffer.close()

    host = config.service.advertise_host
    return Running(instance.record(process.http_url, host, os.getpid(), engine), instance.drain, close)
