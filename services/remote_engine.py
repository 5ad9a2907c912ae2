"""Turns a loaded model into one whose attention is computed by attention workers."""

from dataclasses import replace

from common.config import Config
from common.errors import ConfigError
from common.ids import InstanceId
from common.model.exchange import Pace
from common.model.runner import ModelRunner
from common.service import ServiceProcess
from common.transfer.endpoint import TransferEndpoint
from decode.attention_needs import AttentionNeeds
from decode.attention_pools import AttentionPools
from decode.binding import Binder
from decode.pipeline import StaggeredEngine
from decode.remote_attention import Pools, RemoteAttention
from services.engines import Engine
from services.instance import Instance

STAGGERED_BATCHES = 2
"""On one model replica: n batches keep n − 1 replicas busy (Lamina 2, section 4.3)."""


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
        lanes=STAGGERED_BATCHES if settings.pipeline == "rotational" else 1,
    )
    needs.check()
    return needs


def over_pools(engine: Engine, needs: AttentionNeeds, pools: Pools) -> tuple[Engine, StaggeredEngine | None]:
    """The engine over attention workers, with no pool of its own; and what computes several lanes."""
    model = engine.runner
    assert isinstance(model, ModelRunner)
    lanes = [
        RemoteAttention(pools, len(needs.attention_specs), needs.heads, needs.mini_batches, lane)
        for lane in range(needs.lanes)
    ]
    runners = [model.over(attention, attention.lost_chunks) for attention in lanes]
    staggered = None
    if needs.lanes > 1:
        staggered = StaggeredEngine(engine.thread, tuple(zip(runners, lanes, strict=True)))
    return replace(engine, runner=runners[0], total_blocks=0), staggered


async def keep_pools(
    process: ServiceProcess,
    needs: AttentionNeeds,
    pools: Pools,
    transfer: TransferEndpoint,
    instance: Instance,
) -> AttentionPools:
    """Binds attention workers from now on. Returns when the wanted ones are; raises AttentionUnavailable."""
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
        handle=instance.decode.handle,
    )
    await instance.follow(kept.take_event)
    process.spawn(kept.run())
    await kept.wait_ready()
    return kept
