"""What Model-Attention Disaggregation, Figures 10 and 11 set against one another: decoding on H100s and H20s
and on H100s alone, and what the cost formulas (``common.cost``) say of each: as many sequences as memory
holds, and the roofline of a step of theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.cost import (
    ELEMENT_BYTES,
    Throughput,
    disaggregated_throughput,
    homogeneous_throughput,
    largest_batch,
)
from common.devices import H20, H100, DeviceSpec
from common.shapes import LLAMA3_70B, LLAMA_33B, LLAMA_65B, ModelShape
from services.bench.lengths import LengthPair
from services.reproduce.data import (
    CODING_TRACE,
    CONVERSATION_TRACE,
    DataFiles,
    Lengths,
    PublishedLength,
    PublishedLengths,
    lengths_of,
)
from services.reproduce.row import sentences
from services.simulator.performance.roofline import REACHED

FP16_BYTES = ELEMENT_BYTES["fp16"]
REQUESTS = 8000
"""Whose lengths are looked at."""
SPARE_TOKENS = 64
"""Of blocks that are not full."""
MEMORY_SHARE = 0.9
"""Of the devices' memory, for weights and KV: vLLM's default, and the simulator's."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """A trace of Table 4."""

    name: str
    file: str
    prompt: float
    output: float

    def lengths(self, files: DataFiles, count: int) -> Lengths:
        published = PublishedLengths(
            "Table 4", PublishedLength(self.prompt), PublishedLength(self.output), 131_072
        )
        return lengths_of(files, self.file, published, count)


@dataclass(frozen=True, slots=True)
class Setting:
    """Of Table 5. ``devices``: H100s of vLLM; ``dop``: H100s and H20s of Lamina."""

    shape: ModelShape
    devices: int
    dop: tuple[int, int]


TRAFFIC = (
    Traffic("Azure-Conv", CONVERSATION_TRACE, 1154.7, 211.1),
    Traffic("Azure-Code", CODING_TRACE, 2047.8, 27.9),
    Traffic("Kimi-Conv", "mooncake/conversation_trace.jsonl.gz", 12035.1, 342.6),
    Traffic("Kimi-TA", "mooncake/toolagent_trace.jsonl.gz", 8560.0, 182.1),
)
SETTINGS = (
    Setting(LLAMA_33B, 2, (1, 2)),
    Setting(LLAMA_65B, 4, (2, 4)),
    Setting(LLAMA3_70B, 4, (2, 4)),
)


def held_context(pairs: Sequence[LengthPair]) -> int:
    """Tokens of KV of a sequence amid a step: those that draw more are there in more steps."""
    steps = sum(each.output_tokens for each in pairs)
    held = sum(each.output_tokens * (each.prompt_tokens + (each.output_tokens + 1) / 2) for each in pairs)
    return max(1, round(held / steps))


def fitting(lengths: Lengths, shape: ModelShape, devices: int, device: DeviceSpec) -> tuple[LengthPair, ...]:
    """Those that so many devices could hold one of beside the weights."""
    share = replace(device, memory_gb=MEMORY_SHARE * device.memory_gb)
    room = largest_batch(shape, 1, FP16_BYTES, share, devices=devices, holds_weights=True)
    return tuple(
        each for each in lengths.pairs if each.prompt_tokens + each.output_tokens < room - SPARE_TOKENS
    )


@dataclass(frozen=True, slots=True)
class Assumed:
    """``lamina_share`` and ``vllm_share``: of their devices' memory that they use."""

    is_staggered: bool = True
    lamina_share: float = 1.0
    vllm_share: float = 1.0


NINE_TENTHS = Assumed(lamina_share=MEMORY_SHARE, vllm_share=MEMORY_SHARE)
ONE_BATCH = replace(NINE_TENTHS, is_staggered=False)
WHOLE, VLLM_NINE_TENTHS = Assumed(), Assumed(vllm_share=MEMORY_SHARE)


def lamina(shape: ModelShape, context: int, dop: tuple[int, int], assumed: Assumed) -> Throughput | None:
    return disaggregated_throughput(
        shape,
        context,
        FP16_BYTES,
        H100,
        replace(H20, memory_gb=assumed.lamina_share * H20.memory_gb),
        dop,
        is_staggered=assumed.is_staggered,
        utilisation=REACHED,
    )


def vllm(shape: ModelShape, context: int, devices: int, assumed: Assumed) -> Throughput | None:
    device = replace(H100, memory_gb=assumed.vllm_share * H100.memory_gb)
    return homogeneous_throughput(shape, context, FP16_BYTES, device, devices, utilisation=REACHED)


SOURCE = "Model-Attention Disaggregation, section 6.1, Figure"
DEVICES_USED = sentences(
    """
Devices and costs of Tables 1 and 5; nine tenths of each device's memory hold weights and KV, vLLM's default,
but where a column says otherwise.
"""
)
SIMULATED_SO = sentences(
    """
Simulated: KV by heads on the attention workers, two batches that take turns (section 4.3), the network
that 6.3 measured (45.7 GB/s, 16.5 microseconds one way). Requests come half as fast again as the formula
says; whoever finds a third more there than memory holds goes away, so that a queue stands at all times.
Counted from the middle of the arrivals to the last, of at least 300 and five times as long as a sequence
stays. What is longer than all of vLLM's memory is left out for both.
"""
)
CALCULATED_SO = sentences(
    """
By formula: a batch is what the KV of its mean context leaves room for, sequences that draw more counted
more often; a step's time is the roofline at 75 % and 80 % of the peaks, and what the pools exchange at the
speed of their adapters. Two batches take turns, unless it says otherwise.
"""
)
ASSUMPTIONS = sentences(
    """
No time for scheduling or for launches. The paper's are measurements, of which the text prints the ranges.
"""
)
SIMULATED_ASSUMPTIONS = sentences(
    """
None for prompts or for their KV on its way, as the paper leaves prefill out: Azure-Code's with llama-33b
would need 127 GB/s of the two H20s' 91. Reductions between GPUs take 10 microseconds and their bytes; the
formulas have none.
"""
)
