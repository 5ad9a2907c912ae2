"""Loads the real model into an Engine. The only part of the instance's start that needs torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from common.config import Config, InstanceConfig, ModelConfig
from common.engine_thread import EngineThread
from common.errors import ConfigError
from common.kv.blocks import blocks_for
from common.kv.host_memory import HostMemory
from common.kv.layout import KVLayout
from common.kv.pool import allocate_pool
from common.messages import SamplingParams
from common.model.attention import LocalAttention
from common.model.attention_kernels import TILE_KEYS
from common.model.device import accelerator_name, device_of
from common.model.kernels import use_compiled
from common.model.precision import precision_of, wants_compiled, wants_graphs
from common.model.program import ModelProgram, load_program
from common.model.runner import ModelRunner
from common.model.step_graphs import step_graphs
from common.performance import DEFAULT_CHUNK_TOKENS, DEFAULT_LAYERWISE_MIN_TOKENS, FittedTime
from common.profile import measured_layerwise_min_tokens, profile_path, read_profile
from common.spec import served_context_length
from common.steps import Draw, SequenceStep
from services.hosts.engines import (
    Engine,
    blocks_in,
    check_pool,
    has_remote_attention,
    host_blocks_in,
)

WARM_UP_TOKENS = 3


def use_cores(count: int) -> None:
    """Called on the engine's thread: torch keeps its thread count per calling thread."""
    torch.set_num_threads(count)


def load_model_engine(config: Config, model_directory: Path, thread: EngineThread) -> Engine:
    """Weights, program, pool and a first pass that touches every kernel. Raises ModelError, ConfigError."""
    if wants_compiled(config.model):
        use_compiled(config.model.cache_directory, config.model.threads)
    program = load_on(config.model, model_directory, config.model.device)
    spec, dtype, device = program.spec, program.dtype, program.device
    layout = KVLayout(
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        block_size=config.instance.block_size,
        element_bytes=dtype.itemsize,
    )
    context_length = served_context_length(spec, config.model.context_length)
    is_remote = has_remote_attention(config)
    if is_remote:
        total_blocks, host_blocks = blocks_for(WARM_UP_TOKENS, layout.block_size), 0
    else:
        total_blocks = blocks_in(config, layout)
        check_pool(config, layout, context_length)
        host_blocks = host_blocks_in(config, layout, total_blocks)
    with memory_asked_by("kv_bytes", config.instance):
        pool, buffer = allocate_pool(layout, total_blocks, dtype, device)
    with memory_asked_by("swap_bytes", config.instance):
        host_tier = HostMemory(pool, host_blocks) if host_blocks else None
    runner = ModelRunner(
        program,
        LocalAttention(pool, program.attention_specs),
        thread.share_cores,
        graphs=step_graphs(program, pool) if wants_graphs(config.model) and not is_remote else None,
    )
    _warm_up(runner, tuple(range(min(total_blocks, blocks_for(WARM_UP_TOKENS, layout.block_size)))))
    precision, accelerator = precision_of(config.model), accelerator_name(config.model.device)
    profile = read_profile(profile_path(config.model, model_directory, precision.compute, accelerator))
    chunk_tokens = DEFAULT_CHUNK_TOKENS if profile is None else profile.saturation_tokens
    most_draws = config.instance.max_decode_batch
    most_rows = most_draws if is_remote else max(config.instance.chunk_tokens or chunk_tokens, most_draws)
    room = min(most_rows, context_length, total_blocks * layout.block_size)
    blocks = tuple(range(blocks_for(room, layout.block_size)))
    runner.make_kernels(most_rows, most_draws, blocks, room)
    return Engine(
        runner=runner,
        thread=thread,
        layout=layout,
        buffer=buffer,
        total_blocks=total_blocks,
        eos_token_ids=tuple(spec.eos_token_ids),
        model_name=spec.name,
        context_length=context_length,
        dtype=precision.compute,
        chunk_tokens=chunk_tokens,
        layerwise_min_tokens=measured_layerwise_min_tokens(profile, config.transfer, context_length)
        or DEFAULT_LAYERWISE_MIN_TOKENS,
        host_tier=host_tier,
        chunk_time=None if profile is None else _as_profiled(profile.chunk_time),
        step_time=None if profile is None or is_remote else _as_profiled(profile.step_time),
        is_settled=runner.is_settled,
        key_tile=key_tile(program),
    )


def key_tile(program: ModelProgram) -> int:
    """Of its chunks' attention, as ``Engine`` has it."""
    has_softcap = any(spec.softcap is not None for spec in program.attention_specs)
    is_filled_up = program.dtype is torch.bfloat16 and program.device.type == "cpu" and not has_softcap
    return TILE_KEYS if is_filled_up else 1


@contextmanager
def memory_asked_by(key: str, instance: InstanceConfig) -> Iterator[None]:
    """For what is allocated within it. Raises ConfigError where the system or torch refuses it."""
    try:
        yield
    except (OSError, MemoryError, OverflowError, RuntimeError) as exc:
        reason = str(exc).partition("\n")[0]
        rule = f"is more memory than can be had here ({reason})"
        raise ConfigError(f"instance.{key}", getattr(instance, key), rule) from exc


def _as_profiled(fitted: FittedTime) -> FittedTime:
    """Of no samples that the instance took itself."""
    return msgspec.structs.replace(fitted, samples=0)


def load_on(config: ModelConfig, model_directory: Path, device: str) -> ModelProgram:
    """The model on that device. Raises ModelError, or ConfigError where there is no such device."""
    precision = precision_of(config)
    return load_program(
        model_directory,
        precision.compute,
        device_of("model.device", device),
        config.cache_directory,
        weights=precision.weights,
    )


def _warm_up(runner: ModelRunner, block_table: tuple[int, ...]) -> None:
    """One prompt and one step in the first blocks, which nobody holds yet."""
    greedy = SamplingParams(max_tokens=2, temperature=0.0)
    runner.run([SequenceStep((1, 1), 0, block_table, Draw(greedy, (1, 1), ()))])
    runner.run([SequenceStep((1,), 2, block_table, Draw(greedy, (1, 1), (1,)))])
