"""`lamella serve prefill` and `lamella serve decode`: one process that hosts an instance."""

import logging
import os
from functools import partial

import msgspec

from common.config import Config
from common.errors import StoreUnavailable
from common.ids import InstanceId
from common.instance_metrics import InstanceMetrics
from common.kv.endpoint import KV_REGION
from common.messages import Role
from common.service import Running, ServiceProcess, run_service
from common.telemetry import export_count, export_model
from common.transfer.buffers import SharedBuffer
from common.transfer.endpoint import TransferEndpoint
from services.hosts.building import build_instance
from services.hosts.engines import has_remote_attention, load_engine
from services.model_directory import model_directory

log = logging.getLogger("lamella.instance")


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
    instance_of = partial(
        build_instance,
        config,
        InstanceId(process.service_id),
        process.incarnation,
        transfer=transfer,
        bus=process.bus,
        metrics=InstanceMetrics(process.registry),
        spawn=process.spawn,
    )
    leave_workers, staggered = None, None
    if has_remote_attention(config):
        from decode.remote_attention import Pools
        from services.hosts.remote_engine import attention_needs, keep_pools, over_pools

        needs, pools = attention_needs(config, engine), Pools()
        engine, staggered = await over_pools(config, engine, needs, pools)
        instance = instance_of(engine=engine, staggered=staggered)
        await instance.subscribe()
        kept = await keep_pools(process, needs, pools, transfer, instance)
        leave_workers = kept.close
    else:
        instance = instance_of(engine=engine)
        await instance.subscribe()
    export_model(process.registry, engine.model_name)
    count = partial(export_count, process.registry)
    count("kv_moves", "Sequences whose KV is on its way.", lambda: instance.decode.mover.under_way)
    swapping = instance.decode.state.swapping
    count("sequences_swapped", "In the host tier, or on the way.", lambda: swapping.away)
    count("host_kv_blocks", "Blocks of the host tier that are held.", lambda: swapping.host.used_blocks)
    count("transfers_open", "Transfers that have not settled.", lambda: transfer.outstanding)
    process.spawn(instance.reporter.run(instance.publish_load))
    process.spawn(instance.prefill.reports.run())

    async def close() -> None:
        if leave_workers is not None:
            await leave_workers()
        await transfer.close()
        if staggered is not None:
            staggered.close()
        engine.thread.close()
        if isinstance(engine.buffer, SharedBuffer):
            engine.buffer.close()

    describe = partial(instance.record, process.http_url, config.service.advertise_host, os.getpid(), engine)

    async def write_record() -> None:
        try:
            await process.store.update(describe())
        except StoreUnavailable as exc:
            # The next heartbeat writes it.
            log.warning("role_unwritten", extra={"role": instance.role, "error": str(exc)})

    instance.write_record = write_record
    return Running(describe(), instance.drain, close, describe)
