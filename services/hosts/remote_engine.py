"""Turns a loaded model into one whose attention is computed by attention workers."""

from dataclasses import replace
from functools import partial

from common.config import Config
from common.engine_thread import EngineThread
from common.errors import ConfigError
from common.ids import InstanceId
from common.model.exchange import Pace
from common.model.program import ModelProgram
from common.model.runner import ModelRunner
from common.service import ServiceProcess
from common.telemetry import export_count
from common.transfer.endpoint import TransferEndpoint
from decode.attention_needs import AttentionNeeds
from decode.attention_pools import AttentionPools
from decode.binding import Binder
from decode.pipeline import Replica, StaggeredEngine
from decode.remote_attention import Pools, RemoteAttention
from scheduler.policy.staggering import Staggering
from services.hosts.engines import Engine, check_attention_pools
from services.hosts.instance import Instance
from services.hosts.model_engine import load_on, use_cores
from services.model_directory import model_directory


def attention_needs(config: Config, engine: Engine) -> AttentionNeeds:
    """Raises ConfigError where the model's heads cannot be shared out so, or there is no model."""
    settings = config.instance
    if not isinstance(engine.runner, ModelRunner):
        raise ConfigError("instance.attention_workers", settings.attention_workers, "needs a real model")
    program = engine.runner.program
    needs = AttentionNeeds(
        heads=program.spec.heads,
        layout=engine.layout,
        attention_specs=program.attention_specs,
        element_type="bfloat16" if engine.dtype == "bfloat16" else "float32",
        context_length=engine.context_length,
        max_batch=settings.max_decode_batch,
        workers=settings.attention_workers,
        partition=settings.attention_partition,
        mini_batches=settings.attention_mini_batches,
        lanes=1 if settings.pipeline == "off" else settings.staggered_batches,
    )
    needs.check()
    return needs


async def over_pools(
    config: Config, engine: Engine, needs: AttentionNeeds, pools: Pools
) -> tuple[Engine, StaggeredEngine | None]:
    """The engine over attention workers, with no pool of its own; and what computes several lanes.

    Raises ModelError where a replica's device cannot hold the model.
    """
    model = engine.runner
    assert isinstance(model, ModelRunner)
    lanes = [
        RemoteAttention(pools, len(needs.attention_specs), needs.heads, needs.mini_batches, lane)
        for lane in range(needs.lanes)
    ]
    runners = [model.over(attention, attention.lost_chunks) for attention in lanes]
    staggered = None
    if needs.lanes > 1:
        staggering = Staggering(needs.lanes, is_fixed=config.instance.pipeline == "fixed")
        replicas = await _replicas(config, engine, model.program, staggering.replicas)
        batches = tuple(zip(runners, lanes, strict=True))
        staggered = StaggeredEngine(engine.thread, staggering, replicas, batches)
    return replace(engine, runner=runners[0], total_blocks=0), staggered


async def _replicas(config: Config, engine: Engine, program: ModelProgram, count: int) -> list[Replica]:
    """The first computes with what is loaded; others load the weights once a device. One alone needs no
    thread but the engine's."""
    if count == 1:
        return [Replica(engine.thread, program)]
    settings = config.model
    programs = {settings.device: program}
    replicas = []
    for index in range(count):
        thread = EngineThread(name=f"replica {index}")
        if settings.threads is not None:
            await thread.run(use_cores, max(1, settings.threads // count))
        device = (config.instance.replica_devices or (settings.device,) * count)[index]
        if device not in programs:
            programs[device] = await thread.run(load_on, settings, model_directory(settings), device)
        replicas.append(Replica(thread, programs[device]))
    return replicas


async def keep_pools(
    process: ServiceProcess,
    needs: AttentionNeeds,
    pools: Pools,
    transfer: TransferEndpoint,
    instance: Instance,
) -> AttentionPools:
    """Binds attention workers from now on. Returns when the wanted ones are.

    Raises AttentionUnavailable, or ConfigError where no pool of theirs holds the model's context.
    """
    transfer_config = process.config.transfer
    bandwidth = transfer_config.emulated_bandwidth_bytes_per_s
    latency_s = transfer_config.emulated_latency_s

    def new_pace() -> Pace | None:
        return None if bandwidth is None and latency_s == 0 else Pace(bandwidth, latency_s)

    binder = Binder(
        InstanceId(process.service_id),
        process.incarnation,
        needs,
        transfer,
        process.bus,
        process.subjects,
        process.config.mesh.call_timeout_s,
        new_pace,
    )
    kept = AttentionPools(
        binder=binder,
        store=process.store,
        state=instance.decode.state,
        pools=pools,
        destinations=instance.pool_destinations,
        workers=instance.decode.inheritance.workers,
        silent=instance.decode.mover.silent,
        handle=instance.decode.handle,
    )
    count = partial(export_count, process.registry)
    count("attention_bindings", "Bindings to attention workers.", lambda: kept.bindings)
    count("attention_bindings_unsettled", "Given up, the worker not told yet.", lambda: kept.unsettled)
    await instance.follow(kept.take_event)
    process.spawn(kept.run())
    await kept.wait_ready()
    largest_pool_blocks = instance.blocks.largest_pool_blocks
    check_attention_pools(largest_pool_blocks, needs.layout.block_size, needs.context_length)
    return kept
