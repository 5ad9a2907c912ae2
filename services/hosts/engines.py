"""What computes inside an instance: the real model, or the emulated one. Both give the same Engine.

torch is imported only where the real model is loaded, so an emulated instance starts at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.config import Config
from common.emulation import EmulatedHostTier, EmulatedRunner
from common.engine_thread import EngineThread
from common.errors import ConfigError
from common.host_cores import open_host_cores
from common.importing import importing
from common.kv.blocks import blocks_for
from common.kv.layout import KVLayout
from common.kv.tier import HostTier
from common.performance import DEFAULT_CHUNK_TOKENS, DEFAULT_LAYERWISE_MIN_TOKENS, FittedTime
from common.steps import Runner, SequenceStep
from common.transfer.buffers import ForeignMemory, SharedBuffer
from scheduler.policy.pull_budget import share_of_steps


@dataclass(frozen=True, slots=True)
class Engine:
    """A runner on its thread, and the pool it computes over.

    ``buffer`` is the pool's memory as the transfer engine registers it: host memory that other processes can
    map, or a device's. ``chunk_tokens``: of a chunk that keeps it busy, and ``layerwise_min_tokens``: of a
    prompt whose KV is best handed over layer by layer, as far as is known. ``chunk_time`` and ``step_time``:
    as profiled on such a machine, if that was done.
    ``host_tier``: where the blocks of preempted sequences can wait, if anywhere. ``is_settled``: whether a
    pass takes as long from now on. ``key_tile``: keys that a chunk's attention fills up to multiples of.
    """

    runner: Runner
    thread: EngineThread
    layout: KVLayout
    buffer: SharedBuffer | ForeignMemory
    total_blocks: int
    eos_token_ids: tuple[int, ...]
    model_name: str
    context_length: int
    dtype: str
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    layerwise_min_tokens: int = DEFAULT_LAYERWISE_MIN_TOKENS
    host_tier: HostTier | None = None
    chunk_time: FittedTime | None = None
    step_time: FittedTime | None = None
    is_settled: Callable[[Sequence[SequenceStep]], bool] = lambda batch: True
    key_tile: int = 1


async def load_engine(config: Config, model_directory: Path) -> Engine:
    """Loads on the engine's own thread, so the event loop answers health checks meanwhile.

    Raises ModelError for a directory that cannot be served, ConfigError for a pool without a block.
    """
    if config.instance.engine == "emulated":
        return _emulated_engine(config, model_directory)
    with importing():
        from services.hosts.model_engine import load_model_engine, use_cores

    threads = config.model.threads
    cores = open_host_cores() if threads is None else None
    thread = EngineThread(cores, use_cores)
    if threads is not None:
        await thread.run(use_cores, threads)
    return await thread.run(load_model_engine, config, model_directory, thread)


def blocks_in(config: Config, layout: KVLayout) -> int:
    """How many blocks ``instance.kv_bytes`` holds."""
    total_blocks = config.instance.kv_bytes // layout.block_bytes
    if total_blocks < 1:
        raise ConfigError(
            "instance.kv_bytes",
            config.instance.kv_bytes,
            f"must hold at least one block of {layout.block_bytes} bytes",
        )
    return total_blocks


def host_blocks_in(config: Config, layout: KVLayout, total_blocks: int) -> int:
    """How many blocks ``instance.swap_bytes`` holds; never more than the pool, all of whose sequences would
    then be away."""
    return min(config.instance.swap_bytes // layout.block_bytes, total_blocks)


def has_remote_attention(config: Config) -> bool:
    """Whether this instance's KV lives with attention workers."""
    return config.instance.role == "decode" and config.instance.attention_workers > 0


def pull_share_of(config: Config) -> float:
    """Of a step's time, for pulls: they share the processor with it where KV lies in a host's memory."""
    device = config.attention.device if has_remote_attention(config) else config.model.device
    return share_of_steps(config.transfer.pull_share, is_shared=device == "cpu")


def check_pool(config: Config, layout: KVLayout, context_length: int) -> None:
    """A request that names no limit may grow to the whole context: a pool that cannot hold one would refuse
    them all. Raises ConfigError."""
    needed = blocks_for(context_length, layout.block_size) * layout.block_bytes
    if config.instance.kv_bytes < needed:
        raise ConfigError(
            "instance.kv_bytes",
            config.instance.kv_bytes,
            f"must hold one sequence of the context's {context_length} tokens, {needed} bytes; or lower"
            " model.context_length",
        )


def check_attention_pools(largest_pool_blocks: int, block_size: int, context_length: int) -> None:
    """As ``check_pool``, where the pools are the attention workers' that were bound. Raises ConfigError."""
    if largest_pool_blocks * block_size < context_length:
        raise ConfigError(
            "attention.kv_bytes",
            f"{largest_pool_blocks} blocks of {block_size} tokens in the largest pool",
            "what a worker has for each of attention.decode_instances must hold one sequence of the"
            f" context's {context_length} tokens; or lower model.context_length",
        )


def _emulated_engine(config: Config, model_directory: Path) -> Engine:
    emulation = config.emulation
    layout = KVLayout(
        layers=1, kv_heads=1, head_dim=1, block_size=config.instance.block_size, element_bytes=1
    )
    host_blocks = host_blocks_in(config, layout, emulation.total_blocks)
    return Engine(
        runner=EmulatedRunner(emulation),
        thread=EngineThread(),
        layout=layout,
        buffer=SharedBuffer(layout.block_bytes * emulation.total_blocks),
        total_blocks=emulation.total_blocks,
        eos_token_ids=(),
        model_name=model_directory.name,
        context_length=emulation.context_length,
        dtype="emulated",
        host_tier=EmulatedHostTier(host_blocks, layout.block_bytes) if host_blocks else None,
    )
