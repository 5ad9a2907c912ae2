"""What the cost formulas must know of a model, and the models that the papers measure, as data.

The shapes are the published ones; parameters are counted from them, so that a paper's rounded figure can be
checked against the count instead of replacing it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder-only model as the cost formulas see it (Disaggregation, Table 2: N, d, L, G).

    ``lookup_parameters`` of ``parameters`` are only looked up, a row a token, and never multiplied: the input
    embedding where the output layer has a matrix of its own.
    """

    name: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: int
    lookup_parameters: int

    @property
    def multiplied_parameters(self) -> int:
        """N: what a decode step reads and multiplies."""
        return self.parameters - self.lookup_parameters


def llama_shape(
    name: str,
    *,
    layers: int,
    hidden_size: int,
    heads: int,
    kv_heads: int,
    intermediate_size: int,
    vocab_size: int,
    is_tied: bool = False,
) -> ModelShape:
    """A model of LLaMA's architecture: QKVO, a gated feed-forward of three matrices, two norms a layer."""
    head_dim = hidden_size // heads
    attention = 2 * hidden_size * head_dim * (heads + kv_heads)
    feed_forward = 3 * hidden_size * intermediate_size
    embedding = vocab_size * hidden_size
    blocks = layers * (attention + feed_forward + 2 * hidden_size) + hidden_size
    return ModelShape(
        name=name,
        layers=layers,
        hidden_size=hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        parameters=blocks + (embedding if is_tied else 2 * embedding),
        lookup_parameters=0 if is_tied else embedding,
    )


LLAMA_13B = llama_shape(
    "llama-13b",
    layers=40,
    hidden_size=5120,
    heads=40,
    kv_heads=40,
    intermediate_size=13824,
    vocab_size=32000,
)
LLAMA_33B = llama_shape(
    "llama-33b",
    layers=60,
    hidden_size=6656,
    heads=52,
    kv_heads=52,
    intermediate_size=17920,
    vocab_size=32000,
)
LLAMA_65B = llama_shape(
    "llama-65b",
    layers=80,
    hidden_size=8192,
    heads=64,
    kv_heads=64,
    intermediate_size=22016,
    vocab_size=32000,
)
LLAMA3_70B = llama_shape(
    "llama3-70b",
    layers=80,
    hidden_size=8192,
    heads=64,
    kv_heads=8,
    intermediate_size=28672,
    vocab_size=128256,
)
SMOLLM2_135M = llama_shape(
    "smollm2-135m",
    layers=30,
    hidden_size=576,
    heads=9,
    kv_heads=3,
    intermediate_size=1536,
    vocab_size=49152,
    is_tied=True,
)

SHAPES = {shape.name: shape for shape in (LLAMA_13B, LLAMA_33B, LLAMA_65B, LLAMA3_70B, SMOLLM2_135M)}
