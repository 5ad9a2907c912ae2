"""Operators over a pass's tokens: what a shard computes of a layer beside attention, and of a pass's ends.

They are those that instances call with torch's kernels, of random weights. A layer's follow one another as in
a pass, attention among them, and layer follows layer, each with weights of its own: a product that is
repeated alone would find its weights in the caches, where a pass has them in memory.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from common.messages import SamplingParams
from common.model import kernels
from common.model.linears import Linear, linear_of
from common.model.precision import WeightForm
from common.model.sampling import SamplingRow, sample
from services.profiling.operators.laps import Laps
from services.profiling.operators.sizes import Shard

WEIGHT_BYTES = 1 << 29
"""So many of layers are made, and one at least: more than caches hold, less than a large model has."""
SCALE = 0.02
EPSILON = 1e-5
ROTARY_BASE = 10_000.0
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A layer's attention: q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], views as slices
hand them out → [tokens, heads, head_dim]. Marks what it takes."""


class LayerOperators(Protocol):
    def run(self, x: torch.Tensor, attend: Attend, laps: Laps) -> torch.Tensor:
        """The next layer's ``x`` [1, tokens, hidden]; marks every operator."""


class Weights:
    """Random ones of a device, by one seed."""

    def __init__(self, dtype: torch.dtype, device: torch.device, form: WeightForm) -> None:
        self.dtype, self.device, self._form = dtype, device, form
        self._generator = torch.Generator(device).manual_seed(0)

    def tensor(self, *sizes: int) -> torch.Tensor:
        return self.fill(torch.empty(*sizes, dtype=self.dtype, device=self.device))

    def fill(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.uniform_(-SCALE, SCALE, generator=self._generator)

    def token_ids(self, count: int, below: int) -> torch.Tensor:
        return torch.randint(below, (1, count), generator=self._generator, device=self.device)

    def linear(self, outs: int, ins: int, *, has_bias: bool = False) -> Linear:
        return linear_of(self.tensor(outs, ins), self.tensor(outs) if has_bias else None, self._form)


class GatedLayer:
    """LLaMA's."""

    def __init__(self, shard: Shard, weights: Weights) -> None:
        hidden, head_dim = shard.shape.hidden_size, shard.shape.head_dim
        self._heads, self._kv_heads = shard.heads, shard.kv_heads
        self._head_dim, self._hidden = head_dim, hidden
        self._norms = weights.tensor(hidden), weights.tensor(hidden)
        self._q = weights.linear(shard.heads * head_dim, hidden)
        self._kv = weights.linear(2 * shard.kv_heads * head_dim, hidden)
        self._out = weights.linear(hidden, shard.heads * head_dim)
        self._up = weights.linear(2 * shard.intermediate_size, hidden)
        self._down = weights.linear(hidden, shard.intermediate_size)

    def run(self, x: torch.Tensor, attend: Attend, laps: Laps) -> torch.Tensor:
        tokens = x.shape[1]
        cos, sin = rotation(tokens, self._head_dim, x)
        laps.begin()
        normed = self._norm(x, 0)
        laps.mark("input_layernorm")
        q, kv = self._q(normed), self._kv(normed)
        laps.mark("attn_pre_proj")
        q = kernels.rotate_heads(q, cos, sin, 0, self._heads)
        k = kernels.rotate_heads(kv, cos, sin, 0, self._kv_heads)
        laps.mark("attn_rope")
        v = kv.narrow(2, kv.shape[2] // 2, kv.shape[2] // 2)
        attended = attend(q[0], k[0], v.reshape(tokens, self._kv_heads, self._head_dim))
        return _run_behind_attention(self, x, attended, laps)

    def _norm(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return kernels.rms_norm(x, [self._hidden], self._norms[index], EPSILON)

    def _act(self, wide: torch.Tensor) -> torch.Tensor:
        return kernels.silu_multiply_halves(wide)


class PlainLayer:
    """GPT's: without gates and rotation, with biases."""

    def __init__(self, shard: Shard, weights: Weights) -> None:
        hidden, head_dim = shard.shape.hidden_size, shard.shape.head_dim
        self._heads, self._kv_heads = (-1, shard.heads, head_dim), (-1, shard.kv_heads, head_dim)
        attended = shard.heads * head_dim
        self._norms = [(weights.tensor(hidden), weights.tensor(hidden)) for _ in range(2)]
        self._q = weights.linear(attended, hidden, has_bias=True)
        self._kv = weights.linear(2 * shard.kv_heads * head_dim, hidden, has_bias=True)
        self._out = weights.linear(hidden, attended, has_bias=True)
        self._up = weights.linear(shard.intermediate_size, hidden, has_bias=True)
        self._down = weights.linear(hidden, shard.intermediate_size, has_bias=True)

    def run(self, x: torch.Tensor, attend: Attend, laps: Laps) -> torch.Tensor:
        laps.begin()
        normed = self._norm(x, 0)
        laps.mark("input_layernorm")
        q, kv = self._q(normed), self._kv(normed)
        laps.mark("attn_pre_proj")
        k, v = kv.chunk(2, dim=2)
        attended = attend(q.reshape(self._heads), k.reshape(self._kv_heads), v.reshape(self._kv_heads))
        return _run_behind_attention(self, x, attended, laps)

    def _norm(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return F.layer_norm(x, [x.shape[-1]], *self._norms[index], EPSILON)

    def _act(self, wide: torch.Tensor) -> torch.Tensor:
        return F.gelu(wide)


def _run_behind_attention(
    layer: GatedLayer | PlainLayer, x: torch.Tensor, attended: torch.Tensor, laps: Laps
) -> torch.Tensor:
    """The rest of either's operators."""
    attended = attended.reshape(1, x.shape[1], -1)
    laps.mark(None)
    projected = layer._out(attended)
    laps.mark("attn_post_proj")
    x = x + projected
    laps.mark("add")
    normed = layer._norm(x, 1)
    laps.mark("post_attention_layernorm")
    wide = layer._up(normed)
    laps.mark("mlp_up_proj")
    inner = layer._act(wide)
    laps.mark("mlp_act")
    narrow = layer._down(inner)
    laps.mark("mlp_down_proj")
    x = x + narrow
    laps.mark("add")
    return x


class PassEnds:
    """What a pass computes once: its tokens' embedding, and the output matrix and the draw for sequences that
    get a token. The embedding is whole on every device, of the output matrix each has its columns."""

    def __init__(self, shard: Shard, weights: Weights) -> None:
        shape = shard.shape
        self._shard, self._weights = shard, weights
        self._table = weights.tensor(shape.vocab_size, shape.hidden_size)
        self._norm = weights.tensor(shape.hidden_size)
        self._matrix = weights.linear(shard.vocab_size, shape.hidden_size)

    def begin(self, tokens: int, laps: Laps) -> torch.Tensor:
        """[1, tokens, hidden]."""
        token_ids = self._weights.token_ids(tokens, self._shard.shape.vocab_size)
        laps.begin()
        x = F.embedding(token_ids, self._table)
        if self._shard.is_gated:
            rotation(tokens, self._shard.shape.head_dim, x)
        laps.mark("embedding")
        return x

    def end(self, sequences: int, laps: Laps) -> None:
        shape = self._shard.shape
        x = self._weights.tensor(1, sequences, shape.hidden_size)
        whole = self._weights.tensor(sequences, shape.vocab_size)
        rows = [SamplingRow(GREEDY, (), (), frozenset()) for _ in range(sequences)]
        laps.begin()
        self._matrix(self._normed(x))
        laps.mark("output_matrix")
        sample(whole, rows)
        laps.mark("sampling")

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        if self._shard.is_gated:
            return kernels.rms_norm(x, [x.shape[-1]], self._norm, EPSILON)
        return F.layer_norm(x, [x.shape[-1]], self._norm, self._norm, EPSILON)


def layers_of(shard: Shard, weights: Weights) -> list[LayerOperators]:
    kind = GatedLayer if shard.is_gated else PlainLayer
    held = WEIGHT_BYTES // (shard.layer_parameters() * weights.dtype.itemsize)
    return [kind(shard, weights) for _ in range(max(1, min(shard.shape.layers, held)))]


def rotation(tokens: int, width: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, and sin with the first half's sign turned: [1, 1, tokens, width] each, of ``like``'s kind."""
    exponents = torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width
    positions = torch.arange(tokens, device=like.device, dtype=torch.float32)
    angles = torch.outer(positions, ROTARY_BASE**-exponents)
    cos, sin = angles.cos(), angles.sin()
    tables = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return tables[0][None, None].to(like.dtype), tables[1][None, None].to(like.dtype)
