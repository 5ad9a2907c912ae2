"""What the cost formulas must know of a model, and the models that the papers measure, as data.

The shapes are the published ones; parameters are counted from them, so that a paper's rounded figure can be
checked against the count instead of replacing it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder-only model as the cost formulas see it (Disaggregation, Table 2: N, d, L, G).

    ``lookup_parameters`` of ``parameters`` are only looked up, a row a token, and never multiplied: the input
    embedding where the output layer has a matrix of its own. ``intermediate_size``: between the feed-forward
    network's matrices.
    """

    name: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    parameters: int
    lookup_parameters: int

    @property
    def multiplied_parameters(self) -> int:
        """N: what a decode step reads and multiplies."""
        return self.parameters - self.lookup_parameters

    @property
    def head_parameters(self) -> int:
        """Of the output matrix: multiplied for a token only where the next one is wanted."""
        return self.vocab_size * self.hidden_size

    @property
    def feed_forward_matrices(self) -> int:
        """3 where it is gated, else 2: as many as fill what attention leaves of the parameters."""
        attention = _attention_parameters(self.hidden_size, self.heads, self.kv_heads, self.head_dim)
        rest = (self.multiplied_parameters - self.head_parameters) / self.layers - attention
        return 3 if rest > 2.5 * self.hidden_size * self.intermediate_size else 2


def body_parameters(
    *,
    layers: int,
    hidden_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    feed_forward_matrices: int = 3,
) -> int:
    """Of all but the embeddings: QKVO, the feed-forward network, two norms a layer and one at the end."""
    attention = _attention_parameters(hidden_size, heads, kv_heads, head_dim)
    feed_forward = feed_forward_matrices * hidden_size * intermediate_size
    return layers * (attention + feed_forward + 2 * hidden_size) + hidden_size


def _attention_parameters(hidden_size: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """A layer's QKVO."""
    return 2 * hidden_size * head_dim * (heads + kv_heads)


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
    head_dim, embedding = hidden_size // heads, vocab_size * hidden_size
    body = body_parameters(
        layers=layers,
        hidden_size=hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
    )
    return ModelShape(
        name=name,
        layers=layers,
        hidden_size=hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        parameters=body + (embedding if is_tied else 2 * embedding),
        lookup_parameters=0 if is_tied else embedding,
    )


def gpt_shape(
    name: str, *, layers: int, hidden_size: int, heads: int, vocab_size: int, positions: int = 0
) -> ModelShape:
    """A model of GPT-3's architecture (OPT, BLOOM): multi-head attention, a feed-forward network of two
    matrices and four times the width, biases, norms of two vectors, tied embeddings. ``positions``: rows of a
    learned table, 0 where there is none (ALiBi)."""
    matrices = 12 * hidden_size * hidden_size
    biases_and_norms = (9 + 4) * hidden_size
    embedding, table = vocab_size * hidden_size, positions * hidden_size
    return ModelShape(
        name=name,
        layers=layers,
        hidden_size=hidden_size,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden_size // heads,
        intermediate_size=4 * hidden_size,
        vocab_size=vocab_size,
        parameters=layers * (matrices + biases_and_norms) + 2 * hidden_size + embedding + table,
        lookup_parameters=table,
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
LLAMA2_7B = llama_shape(
    "llama2-7b",
    layers=32,
    hidden_size=4096,
    heads=32,
    kv_heads=32,
    intermediate_size=11008,
    vocab_size=32000,
)
LLAMA2_70B = llama_shape(
    "llama2-70b",
    layers=80,
    hidden_size=8192,
    heads=64,
    kv_heads=8,
    intermediate_size=28672,
    vocab_size=32000,
)
INTERNLM_20B = llama_shape(
    "internlm-20b",
    layers=60,
    hidden_size=5120,
    heads=40,
    kv_heads=40,
    intermediate_size=13824,
    vocab_size=103168,
)
QWEN_72B = llama_shape(
    "qwen-72b",
    layers=80,
    hidden_size=8192,
    heads=64,
    kv_heads=64,
    intermediate_size=24576,
    vocab_size=152064,
)
CODELLAMA_34B = llama_shape(
    "codellama-34b",
    layers=48,
    hidden_size=8192,
    heads=64,
    kv_heads=8,
    intermediate_size=22016,
    vocab_size=32000,
)
LLAMA3_8B = llama_shape(
    "llama3-8b",
    layers=32,
    hidden_size=4096,
    heads=32,
    kv_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
)
OPT_13B = gpt_shape("opt-13b", layers=40, hidden_size=5120, heads=40, vocab_size=50272, positions=2050)
OPT_66B = gpt_shape("opt-66b", layers=64, hidden_size=9216, heads=72, vocab_size=50272, positions=2050)
OPT_175B = gpt_shape("opt-175b", layers=96, hidden_size=12288, heads=96, vocab_size=50272, positions=2050)
BLOOM_176B = gpt_shape("bloom-176b", layers=70, hidden_size=14336, heads=112, vocab_size=250880)
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

SHAPES = {
    shape.name: shape
    for shape in (
        LLAMA_13B,
        LLAMA_33B,
        LLAMA_65B,
        LLAMA3_70B,
        LLAMA2_7B,
        LLAMA2_70B,
        INTERNLM_20B,
        QWEN_72B,
        CODELLAMA_34B,
        LLAMA3_8B,
        OPT_13B,
        OPT_66B,
        OPT_175B,
        BLOOM_176B,
        SMOLLM2_135M,
    )
}
