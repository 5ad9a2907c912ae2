"""What a decode instance asks of attention workers, and what each one's share of it is."""

from dataclasses import dataclass

import msgspec

from common.config import AttentionPartition
from common.errors import ConfigError
from common.exchange_shape import ExchangeShape
from common.kv.blocks import blocks_for
from common.kv.layout import KVLayout
from common.spec import AttentionSpec, ElementType

ANSWER_TIMEOUT_S = 1.5
"""A layer's attention takes milliseconds. A worker that pauses amid a step is given up, and its sequences are
elsewhere, within 2 s: this, ``pipeline.LONG_WAIT_S`` before it and ``attention_pools.LOOK_S`` after it."""


def check_share(key: str, workers: int, kv_heads: int) -> None:
    """That each worker has as many heads. Raises ConfigError."""
    if kv_heads % workers:
        fitting = ", ".join(str(count) for count in range(1, kv_heads + 1) if kv_heads % count == 0)
        rule = (
            f"must divide the model's {kv_heads} KV heads ({fitting}), or instance.attention_partition be"
            " 'requests'"
        )
        raise ConfigError(key, workers, rule)


@dataclass(frozen=True, slots=True)
class AttentionShare:
    """One worker's of a pool: its layout, exchange and layers, and which query and KV heads these are."""

    layout: KVLayout
    shape: ExchangeShape
    attention_specs: tuple[AttentionSpec, ...]
    heads: range
    kv_heads: range


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """``heads`` are query heads. ``workers``: how many there are to be. ``lanes``: batches at once."""

    heads: int
    layout: KVLayout
    attention_specs: tuple[AttentionSpec, ...]
    element_type: ElementType
    context_length: int
    max_batch: int
    workers: int
    partition: AttentionPartition
    mini_batches: int
    lanes: int

    def check(self) -> None:
        """Raises ConfigError where heads do not divide."""
        if self.partition == "heads":
            check_share("instance.attention_workers", self.workers, self.layout.kv_heads)

    @property
    def pool_workers(self) -> int:
        """How many workers make a pool."""
        return self.workers if self.partition == "heads" else 1

    def can_make_pool(self, pools: int, workers: int) -> bool:
        """Whether so many workers, who are of no pool, can make one beside so many pools. By heads there is
        one, of all that it takes together."""
        if self.partition == "heads" and pools:
            return False
        return workers >= self.pool_workers

    def share(self, index: int) -> AttentionShare:
        """Of the pool's worker with that number."""
        layout = self.layout.of_heads(range(self.layout.kv_heads // self.pool_workers))
        heads = self.heads // self.pool_workers
        shape = ExchangeShape(
            max_tokens=self.max_batch,
            plan_words=2 + self.max_batch * (4 + blocks_for(self.context_length, layout.block_size)),
            heads=heads,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            element_type=self.element_type,
        )
        specs = tuple(
            msgspec.structs.replace(spec, heads=heads, kv_heads=layout.kv_heads)
            for spec in self.attention_specs
        )
        return AttentionShare(
            layout,
            shape,
            specs,
            range(index * heads, (index + 1) * heads),
            range(index * layout.kv_heads, (index + 1) * layout.kv_heads),
        )
