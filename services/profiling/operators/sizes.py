"""What is measured: the part of a layer that one of several devices has, and at which sizes (Vidur 4.3).

Nothing here computes. Tensors are cut as Megatron cuts them: QKV, the gates and the output matrix by columns,
the other two products by rows, so that a shard of any degree runs alone on one device.
"""

from dataclasses import dataclass

from common.errors import ConfigError
from common.shapes import ModelShape
from services.simulator.performance.roofline import check_parallelism

STEPS_AN_OCTAVE = 2
"""Of tokens: products between two sizes are no straight line."""
FEWEST_CHUNK_TOKENS, SHORTEST_CONTEXT, FIRST_BEFORE = 16, 16, 128
SMALLEST_MESSAGE_BYTES = 512
MESSAGE_FACTOR = 4
KV_BYTES = 1 << 30
"""Of one layer; batches that need more are left out."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One of ``tensor_parallel`` devices' part of a layer, and of the output matrix."""

    shape: ModelShape
    tensor_parallel: int
    heads: int
    kv_heads: int
    intermediate_size: int
    vocab_size: int

    @property
    def is_gated(self) -> bool:
        """As LLaMA: a gated feed-forward network, RMSNorm, rotary embedding, no biases. Else as GPT: two
        matrices, LayerNorm, positions of a table, biases."""
        return self.shape.feed_forward_matrices > 2

    def layer_parameters(self) -> int:
        attention = 2 * self.shape.head_dim * (self.heads + self.kv_heads)
        matrices = self.shape.feed_forward_matrices * self.intermediate_size
        return self.shape.hidden_size * (attention + matrices)


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest pass that is measured: its tokens, a sequence's context, decodes at once."""

    tokens: int = 2048
    context: int = 4096
    batch: int = 64

    def __post_init__(self) -> None:
        """Raises ConfigError for less than two cases of anything."""
        for key, value, least in (
            ("--max-tokens", self.tokens, 2 * FEWEST_CHUNK_TOKENS),
            ("--max-context", self.context, 4 * SHORTEST_CONTEXT),
            ("--max-batch", self.batch, 2),
        ):
            if value < least:
                raise ConfigError(key, value, f"must be at least {least}")


@dataclass(frozen=True, slots=True)
class Effort:
    """Every case is measured ``rounds`` times, fewer where ``limit_s`` is over by then, once at least."""

    rounds: int
    limit_s: float


def shard_of(shape: ModelShape, tensor_parallel: int) -> Shard:
    """What does not divide is filled up, as engines do; heads must. Raises ConfigError."""
    check_parallelism(shape, tensor_parallel, 1)
    return Shard(
        shape=shape,
        tensor_parallel=tensor_parallel,
        heads=shape.heads // tensor_parallel,
        kv_heads=max(1, shape.kv_heads // tensor_parallel),
        intermediate_size=-(-shape.intermediate_size // tensor_parallel),
        vocab_size=-(-shape.vocab_size // tensor_parallel),
    )


def token_counts(limits: Limits) -> tuple[int, ...]:
    """Of passes, from one on."""
    return _up_to(limits.tokens, 1, 2, STEPS_AN_OCTAVE)


def sequence_counts(limits: Limits) -> tuple[int, ...]:
    """That get a token of one pass."""
    return _up_to(limits.batch, 1, 2, STEPS_AN_OCTAVE)


def chunk_cases(limits: Limits) -> tuple[tuple[int, int], ...]:
    """(tokens before, tokens) of a prompt's chunk."""
    chunks = _up_to(min(limits.tokens, limits.context), FEWEST_CHUNK_TOKENS, 2)
    befores = (0, *_up_to(limits.context, FIRST_BEFORE, 2))
    return tuple((before, each) for each in chunks for before in befores if before + each <= limits.context)


def step_cases(shard: Shard, limits: Limits, element_bytes: int) -> tuple[tuple[int, int], ...]:
    """(batch, context of each) of decode steps, those whose KV is no more than ``KV_BYTES`` a layer."""
    token_bytes = 2 * shard.kv_heads * shard.shape.head_dim * element_bytes
    contexts = _up_to(limits.context, SHORTEST_CONTEXT, 2)
    return tuple(
        (batch, context)
        for batch in _up_to(limits.batch, 1, 2)
        for context in contexts
        if batch * context * token_bytes <= KV_BYTES
    )


def message_sizes(largest_bytes: int) -> tuple[int, ...]:
    """Bytes that each participant puts in."""
    return _up_to(max(largest_bytes, 2 * SMALLEST_MESSAGE_BYTES), SMALLEST_MESSAGE_BYTES, MESSAGE_FACTOR)


def _up_to(last: int, first: int, factor: int, steps: int = 1) -> tuple[int, ...]:
    """Powers of ``factor`` times ``first``, ``steps`` for each, and ``last``."""
    found = {last}
    power = 0
    while (each := round(first * factor ** (power / steps))) < last:
        found.add(each)
        power += 1
    return tuple(sorted(found))
