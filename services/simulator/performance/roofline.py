"""The roofline of any model on any device (``common.cost``), with parallelism and its communication.

Where nothing was measured this is what there is. Each of a pass's two kinds of work, matrices and attention,
takes the larger of its computing and its memory time on the devices of a stage, one stage after another;
reductions and transfers between stages come on top of it, and a fixed time a pass.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.cost import ELEMENT_BYTES, PLAIN_ROOFLINE, Utilisation, attention_work, model_work
from common.devices import DeviceSpec
from common.errors import ConfigError
from common.laws import pairs_of
from common.shapes import ModelShape
from services.simulator.shape import PassShape, attended_tokens

REACHED = Utilisation(compute=0.75, memory=0.8)
"""Of the peaks, where nobody says otherwise. Memory: aiconfigurator's mem_bw_empirical_scaling_factor.
Compute: matrices of 8,192 tokens reach 0.75–0.94 of an A100's peak in aiconfigurator's table."""
REDUCTIONS = 2
"""A layer's with tensor parallelism: after attention, after the feed-forward network."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """``tensor`` ways within a stage, by the chips' own links; ``pipeline`` stages, from one to the next by
    those too, or over the network. Latencies are of one reduction, and of one transfer; ``pass_s`` is of
    each pass: what the processor does before it, launches that no graph hides."""

    tensor: int = 1
    pipeline: int = 1
    is_pipeline_on_network: bool = False
    reduction_latency_s: float = 10e-6
    transfer_latency_s: float = 10e-6
    pass_s: float = 0.0

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline


ALONE = Parallelism()
Line = tuple[float, float]
"""Seconds: (of none, of each)."""


class RooflineModel:
    """A lower bound at ``PLAIN_ROOFLINE`` and no latencies."""

    def __init__(
        self,
        shape: ModelShape,
        device: DeviceSpec,
        *,
        parallelism: Parallelism = ALONE,
        utilisation: Utilisation | None = None,
        dtype: str = "bf16",
    ) -> None:
        """``utilisation`` None: the device's usual one. Raises ConfigError where the heads or layers cannot
        be cut so."""
        check_parallelism(shape, parallelism.tensor, parallelism.pipeline)
        if utilisation is None:
            utilisation = usual_utilisation(device)
        element_bytes = ELEMENT_BYTES[dtype]
        # A stage has all tensor devices of its own, and a pass goes through one after the other.
        computing = 1 / (parallelism.tensor * device.peak_flop_s * utilisation.compute)
        memory = 1 / (parallelism.tensor * device.memory_bytes_s * utilisation.memory)
        self.stages = parallelism.pipeline
        empty, row = (model_work(shape, rows, element_bytes) for rows in (0, 1))
        # The output matrix is multiplied for those alone that get a token, and read in any case.
        head_flops = 2.0 * shape.head_parameters
        self._row_s = (row.flops - head_flops) * computing
        self._head_s = head_flops * computing
        self._weights_s: Line = (empty.bytes_moved * memory, (row.bytes_moved - empty.bytes_moved) * memory)
        query, token = (attention_work(shape, 1, context, element_bytes) for context in (0, 1))
        self._pair_s = token.flops * computing
        self._kv_s = (token.bytes_moved - query.bytes_moved) * memory
        self._query_s = query.bytes_moved * memory
        self._others_s: dict[str, Line] = {
            "all_reduce": reductions_s(shape, device, parallelism, element_bytes),
            "send_recv": transfers_s(shape, device, parallelism, element_bytes),
            "launch": (parallelism.pass_s, 0.0),
        }
        fixed, each = zip(*self._others_s.values(), strict=True)
        self._other_s: Line = (sum(fixed), sum(each))

    def pass_s(self, shape: PassShape) -> float:
        rows = sequences = shape.sequences
        seconds = self._decode_attention_s(sequences, shape.context_tokens) if sequences else 0.0
        for before, tokens in shape.chunks:
            rows += tokens
            seconds += self._chunk_attention_s(before, tokens)
        return seconds + self._rows_s(rows, sequences + len(shape.chunks)) if rows else 0.0

    def step_s_of(self, sequences: int) -> Callable[[int], float]:
        rows_s = self._rows_s(sequences, sequences)
        return lambda context_tokens: self._decode_attention_s(sequences, context_tokens) + rows_s

    def steps_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        rows_s = self._rows_s(sequences, sequences)
        return steps * rows_s + self.steps_attention_s(sequences, context_tokens, steps)

    def row_operators_s(self, rows: int, heads: int) -> Mapping[str, float]:
        others = {name: fixed + rows * each for name, (fixed, each) in self._others_s.items()}
        return {"matrices": self._matrices_s(rows, heads), **{k: v for k, v in others.items() if v}}

    def chunks_attention_s(self, chunks: tuple[tuple[int, int], ...]) -> float:
        return sum(self._chunk_attention_s(before, tokens) for before, tokens in chunks)

    def model_s(self, sequences: int) -> float:
        return self._rows_s(sequences, sequences)

    def attention_s(self, sequences: int, context_tokens: int) -> float:
        return self._decode_attention_s(sequences, context_tokens)

    def _rows_s(self, rows: int, heads: int) -> float:
        return self._matrices_s(rows, heads) + self._other_s[0] + rows * self._other_s[1]

    def _matrices_s(self, rows: int, heads: int) -> float:
        computing_s = rows * self._row_s + heads * self._head_s
        memory_s = self._weights_s[0] + rows * self._weights_s[1]
        return max(computing_s, memory_s)

    def _decode_attention_s(self, sequences: int, context_tokens: int) -> float:
        return max(self._pair_s * context_tokens, self._kv_s * context_tokens + self._query_s * sequences)

    def _chunk_attention_s(self, before: int, tokens: int) -> float:
        """Each token looks at those before it and at itself; KV is read once for all of them."""
        pairs = pairs_of(before, tokens) + tokens
        return max(self._pair_s * pairs, self._kv_s * (before + tokens) + self._query_s * tokens)

    def steps_attention_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        """Both bounds are lines over the context: memory's is the larger up to where they cross."""
        slope = self._pair_s - self._kv_s
        in_memory = steps
        if slope > 0:
            crossing = self._query_s * sequences / slope
            in_memory = min(steps, max(0, math.floor((crossing - context_tokens) / sequences) + 1))
        first = attended_tokens(sequences, context_tokens, in_memory)
        rest = attended_tokens(sequences, context_tokens + in_memory * sequences, steps - in_memory)
        return self._kv_s * first + self._query_s * sequences * in_memory + self._pair_s * rest


def usual_utilisation(device: DeviceSpec) -> Utilisation:
    """Of its rates, where nobody says otherwise."""
    return PLAIN_ROOFLINE if device.has_reached_rates else REACHED


def check_parallelism(shape: ModelShape, tensor: int, pipeline: int) -> None:
    """Raises ConfigError."""
    if tensor < 1 or not can_split(shape, tensor):
        rule = (
            f"must divide {shape.name}'s {shape.heads} heads, and its {shape.kv_heads} KV heads or be divided"
        )
        raise ConfigError("tensor_parallel", tensor, rule)
    if pipeline < 1 or pipeline > shape.layers:
        raise ConfigError(
            "pipeline_parallel", pipeline, f"must be 1 to the {shape.layers} layers of {shape.name}"
        )


def can_split(shape: ModelShape, tensor: int) -> bool:
    """KV heads fewer than devices are copied; others are dealt out evenly."""
    return shape.heads % tensor == 0 and (shape.kv_heads % tensor == 0 or tensor % shape.kv_heads == 0)


def transfers_s(shape: ModelShape, device: DeviceSpec, parallelism: Parallelism, element_bytes: int) -> Line:
    """Seconds between a pipeline's stages, of a pass and of each of its tokens."""
    hops = parallelism.pipeline - 1
    link_bytes_s = device.interchip_gb_s * 1e9
    if parallelism.is_pipeline_on_network:
        link_bytes_s = device.network_bytes_s
    return hops * parallelism.transfer_latency_s, hops * shape.hidden_size * element_bytes / link_bytes_s


def reductions_s(shape: ModelShape, device: DeviceSpec, parallelism: Parallelism, element_bytes: int) -> Line:
    """Seconds of all layers' reductions, of a pass and of each of its tokens. A ring's moves 2 (t - 1) / t of
    a message through each chip's link."""
    if parallelism.tensor == 1:
        return 0.0, 0.0
    count = REDUCTIONS * shape.layers
    moved = 2 * (parallelism.tensor - 1) / parallelism.tensor * shape.hidden_size * element_bytes
    return count * parallelism.reduction_latency_s, count * moved / (device.interchip_gb_s * 1e9)
