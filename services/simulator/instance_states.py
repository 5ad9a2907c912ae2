"""The live states of a simulated instance's rooms, over one pool of blocks."""

from common.config import Config
from common.kv.blocks import BlockAllocator
from common.kv.layout import KVLayout
from common.messages import InstanceRecord, has_phase
from common.performance import DEFAULT_CHUNK_TOKENS, DEFAULT_LAYERWISE_MIN_TOKENS
from common.room_mates import RoomMates
from decode.context_turns import ContextTurns
from decode.pulls import Pulls
from decode.state import DecodeState
from prefill.prompts import PromptQueue
from prefill.state import PrefillState
from scheduler.policy.prefill_batching import fill_batch_of
from scheduler.policy.pull_budget import PullBudget, share_of_steps
from services.hosts.engines import host_blocks_in
from services.simulator.config import Pool, Simulated
from services.simulator.gateway import END_TOKEN


def states_of(simulated: Simulated, pool: Pool, record: InstanceRecord) -> tuple[PrefillState, DecodeState]:
    """As ``services.hosts.instance`` builds them."""
    config, settings, role = pool.settings, pool.settings.instance, pool.config.role
    layout = _layout_of(simulated, config)
    remote = pool.remote
    # Attention workers' pools come when they are bound.
    blocks = BlockAllocator(record.total_blocks if remote is None else 0, has_pages=False)
    mates = RoomMates(settings.mixed_policy, settings.mixed_max_wait_s, is_mixed=role == "mixed")
    prefill = PrefillState(
        instance_id=record.instance_id,
        incarnation=record.incarnation,
        blocks=blocks,
        layout=layout,
        eos_token_ids=(END_TOKEN,),
        chunk_tokens=settings.chunk_tokens or DEFAULT_CHUNK_TOKENS,
        prompts=PromptQueue(
            settings.prefill_order, settings.scheduling_window, settings.prefill_aging_tokens_per_s
        ),
        max_waiting_requests=settings.max_waiting_requests,
        layerwise_min_tokens=config.transfer.layerwise_min_tokens or DEFAULT_LAYERWISE_MIN_TOKENS,
        fill_batch=fill_batch_of(settings.prefill_batching, settings.prefill_order),
        is_admitting=has_phase(role, "prefill"),
        mates=mates,
    )
    decode = DecodeState(
        instance_id=record.instance_id,
        blocks=blocks,
        block_size=settings.block_size,
        eos_token_ids=(END_TOKEN,),
        max_batch=settings.max_decode_batch,
        max_waiting_requests=settings.max_waiting_requests,
        admission=settings.decode_admission,
        is_admitting=has_phase(role, "decode"),
        lanes=pool.config.pipeline if remote is None else remote.needs.lanes,
        max_moves=settings.attention_moves,
        min_move_gain_tokens=settings.attention_move_gain_tokens,
        mates=mates,
        pulls=_pulls(simulated, pool),
        host_blocks=host_blocks_in(config, layout, record.total_blocks) if remote is None else 0,
        block_bytes=layout.block_bytes,
        turns=ContextTurns(settings.max_step_context_tokens),
    )
    return prefill, decode


def _pulls(simulated: Simulated, pool: Pool) -> Pulls:
    """A mesh on one host computes on its processor; other instances are taken for accelerators."""
    transfer = pool.settings.transfer
    share = share_of_steps(transfer.pull_share, is_shared=simulated.host is not None)
    return Pulls(PullBudget(share), transfer.mode == "push")


def _layout_of(simulated: Simulated, config: Config) -> KVLayout:
    shape = simulated.shape
    return KVLayout(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_size=config.instance.block_size,
        element_bytes=simulated.cluster.element_bytes,
    )
