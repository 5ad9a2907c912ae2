"""A decode instance's engine over attention workers: the same program, its KV and attention elsewhere."""

from dataclasses import replace

from common.config import Config
from common.errors import ConfigError
from common.ids import InstanceId
from common.messages import KVDestination
from common.model.runner import ModelRunner
from common.service import ServiceProcess
from common.transfer.buffers import SharedBuffer
from common.transfer.endpoint import TransferEndpoint
from decode.binding import AttentionBinding, AttentionNeeds, response_name
from services.engines import Engine


def register_responses(
    config: Config, engine: Engine, transfer: TransferEndpoint
) -> tuple[AttentionNeeds, tuple[SharedBuffer, ...]]:
    """The memory that attention workers write outputs into. Raises ConfigError where heads do not divide."""
    workers = config.instance.attention_workers
    if not isinstance(engine.runner, ModelRunner):
        raise ConfigError("instance.attention_workers", workers, "needs a real model")
    program = engine.runner.program
    needs = AttentionNeeds(
        heads=program.spec.heads,
        layout=engine.layout,
        attention_specs=program.attention_specs,
        element_type="bfloat16" if engine.dtype == "bfloat16" else "float32",
        context_length=engine.context_length,
        max_batch=config.instance.max_decode_batch,
    )
    _, shape, _ = needs.share(workers)
    responses = tuple(SharedBuffer(shape.response_bytes, "lamella-attention") for _ in range(workers))
    for index, response in enumerate(responses):
        transfer.register(response_name(index), response)
    return needs, responses


async def bind_attention(
    process: ServiceProcess,
    engine: Engine,
    transfer: TransferEndpoint,
    needs: AttentionNeeds,
    responses: tuple[SharedBuffer, ...],
) -> tuple[Engine, tuple[KVDestination, ...]]:
    """The engine over its workers, and where its KV goes. Raises AttentionUnavailable."""
    binding = AttentionBinding(
        InstanceId(process.service_id),
        needs,
        responses,
        transfer,
        process.bus,
        process.store,
        process.subjects,
        process.config.mesh.call_timeout_s,
    )
    bound = await binding.bind()
    assert isinstance(engine.runner, ModelRunner)
    runner = engine.runner.over(bound.attention)
    return replace(engine, runner=runner, total_blocks=bound.total_blocks), bound.destinations
