"""Model-Attention Disaggregation, Figures 10 and 11: decoding on H100s and H20s against H100s alone.

By the cost formulas (``common.cost``), not by a simulation: as many sequences as memory holds, and the
roofline of a step of theirs.
"""

from dataclasses import dataclass, replace

from common.cost import (
    ELEMENT_BYTES,
    Throughput,
    disaggregated_throughput,
    homogeneous_throughput,
)
from common.devices import H20, H100
from common.shapes import LLAMA3_70B, LLAMA_33B, LLAMA_65B, ModelShape
from services.reproduce.data import (
    CODING_TRACE,
    CONVERSATION_TRACE,
    DataFiles,
    Lengths,
    PublishedLength,
    PublishedLengths,
    lengths_of,
)
from services.reproduce.row import Reproduced, Row, Table, sentences
from services.reproduce.running import scaled
from services.simulator.performance.roofline import REACHED

FP16_BYTES = ELEMENT_BYTES["fp16"]
REQUESTS = 8000
"""Whose lengths are looked at."""


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


def held_context(lengths: Lengths) -> int:
    """Tokens of KV of a sequence amid a step: those that draw more are there in more steps."""
    steps = sum(each.output_tokens for each in lengths.pairs)
    held = sum(
        each.output_tokens * (each.prompt_tokens + (each.output_tokens + 1) / 2) for each in lengths.pairs
    )
    return max(1, round(held / steps))


@dataclass(frozen=True, slots=True)
class Assumed:
    """``lamina_share`` and ``vllm_share``: of their devices' memory that they use."""

    is_staggered: bool = True
    lamina_share: float = 1.0
    vllm_share: float = 1.0


WHOLE, ONE_BATCH = Assumed(), Assumed(is_staggered=False)
NINE_TENTHS, VLLM_NINE_TENTHS = Assumed(lamina_share=0.9, vllm_share=0.9), Assumed(vllm_share=0.9)
VARIANTS = {
    "ours: whole memory": WHOLE,
    "ours: nine tenths of it": NINE_TENTHS,
    "ours: nine tenths of vLLM's": VLLM_NINE_TENTHS,
    "ours: one batch at a time": ONE_BATCH,
}


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


def run_fig10(files: DataFiles, size: float) -> Reproduced:
    described, details = [], []
    gains: dict[str, list[float]] = {name: [] for name in VARIANTS}
    batches: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for traffic in TRAFFIC:
        lengths = traffic.lengths(files, scaled(REQUESTS, size))
        described.append(f"{traffic.name}: {lengths.described}")
        context = held_context(lengths)
        for setting in SETTINGS:
            for name, assumed in VARIANTS.items():
                ours = lamina(setting.shape, context, setting.dop, assumed)
                base = vllm(setting.shape, context, setting.devices, assumed)
                if ours is not None and base is not None:
                    gains[name].append(ours.tokens_s / base.tokens_s - 1)
                    batches[name].append(ours.batch / base.batch)
                if assumed is WHOLE:
                    cells = (traffic.name, setting.shape.name, f"{context:,}")
                    details.append((*cells, _text(base), _text(ours)))
    rows = (
        ("throughput over vLLM's", "+16.1 to +90.1 %", *map(_range, gains.values())),
        (
            "batch over vLLM's, on average",
            "2.39",
            *(f"{sum(some) / len(some):.2f}" for some in batches.values()),
        ),
    )
    more = ("trace", "model", "context", "vLLM", "Lamina")
    title = "With whole memory: batch, tokens/s, ms from token to token"
    return Reproduced(
        (Table(("Lamina", "paper", *VARIANTS), rows), Table(more, tuple(details), title)),
        (*described, *SETUP),
        ASSUMPTIONS,
        CAUSES_10,
    )


def _text(found: Throughput | None) -> str:
    if found is None:
        return "does not fit"
    return f"{found.batch:,}, {found.tokens_s:,.0f}, {1e3 * found.step_s:.1f}"


def _range(gains: list[float]) -> str:
    return f"{100 * min(gains):+.1f} to {100 * max(gains):+.1f} %"


SMALL_DOPS = ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4))
LARGE_DOPS = ((2, 2), (2, 4), (2, 6), (4, 4), (4, 6))
MODES = (WHOLE, ONE_BATCH)


def run_fig11(files: DataFiles, size: float) -> Reproduced:
    traffic = TRAFFIC[0]
    lengths = traffic.lengths(files, scaled(REQUESTS, size))
    context = held_context(lengths)
    rows, details = [], []
    for setting in SETTINGS:
        shape, is_small = setting.shape, setting.shape is LLAMA_33B
        dops, tensors = (SMALL_DOPS, (1, 2, 4)) if is_small else (LARGE_DOPS, (2, 4, 8))
        found = {(dop, mode): lamina(shape, context, dop, mode) for dop in dops for mode in MODES}
        for dop in dops:
            details.append((shape.name, f"Lamina, DOP {dop}", *_cost_text(found[dop, WHOLE])))
        for count in tensors:
            details.append(
                (shape.name, f"vLLM, {count} H100", *_cost_text(vllm(shape, context, count, WHOLE)))
            )
        least, middle, attention, model, _ = dops
        attention_claim = "not dramatically" if shape is LLAMA3_70B else "rapidly"
        for what, claim, more, less in (
            ("attention workers", "rapidly", middle, least),
            ("attention workers", attention_claim, attention, middle),
            ("model workers", "mildly", model if is_small else (4, 4), (1, 2) if is_small else (2, 4)),
        ):
            gained = (_gain(found[more, mode], found[less, mode]) for mode in MODES)
            rows.append((f"{shape.name}: more {what}, {less} to {more}", claim, *gained))
    batches = (lamina(LLAMA3_70B, context, (2, 4), each) for each in MODES)
    rows.append(
        (
            "llama3-70b: batch at (2, 4)",
            "800",
            *("-" if each is None else f"{each.batch:,}" for each in batches),
        )
    )
    columns = ("throughput", "paper", "ours: two batches in turns", "ours: one batch at a time")
    return Reproduced(
        (
            Table(columns, tuple(rows)),
            Table(("model", "devices", "batch", "tokens/s", "$/h", "tokens a dollar"), tuple(details)),
        ),
        (f"{traffic.name}: {lengths.described}", *SETUP),
        ASSUMPTIONS,
        CAUSES_11,
    )


def _gain(more: Throughput | None, less: Throughput | None) -> str:
    if more is None or less is None:
        return "-"
    return f"{100 * (more.tokens_s / less.tokens_s - 1):+.0f} %"


def _cost_text(found: Throughput | None) -> tuple[str, str, str, str]:
    if found is None:
        return ("does not fit", "-", "-", "-")
    usd = f"{found.price_usd_h:.2f}"
    return (f"{found.batch:,}", f"{found.tokens_s:,.0f}", usd, f"{found.tokens_usd:,.0f}")


SETUP = sentences(
    """
Devices and costs of Tables 1 and 5. A batch is what the KV of its mean context leaves room for, sequences
that draw more counted more often; a step's time is the roofline at 75 % and 80 % of the peaks, and what
the pools exchange at the speed of their adapters. Two batches share the model workers in turns (section
4.3), unless it says otherwise.
"""
)
ASSUMPTIONS = sentences(
    """
A calculation, no simulation of arrivals; no time for scheduling, for latencies of the network or, at
vLLM's side, for reductions between its GPUs. The paper's are measurements, of which the text prints the
ranges.

Every block of memory that is not weights holds KV, or nine tenths of it, where a column says so.
"""
)
CAUSES_10 = sentences(
    """
Batch: with nine tenths of each device's memory, as vLLM uses by default, the mean ratio is 2.35, beside
the paper's 2.39.

Throughput: the gain is a third of the paper's at the most. By the roofline vLLM's two H100s with
llama-33b take 12 ms for the weights and 17 for the KV; Lamina's one takes 24 for the weights, twice a
round as there are two batches, and its H20s have read all KV meanwhile. So twice the batch takes 1.6
times as long: +25 %. For +90 % vLLM's step would have to take 45 ms in place of 29: reductions and
launches that tensor parallelism adds to it, of which no figure is printed.

llama3-70b with Azure-Conv loses: with 960 sequences two H100s are bound by computing, where vLLM's four
are just not. The paper says of that case alone that it saturates the model workers (section 6.1).

Simulated with its arrivals, partition and pipeline (simulator.md, Beside Lamina), llama3-70b gains 60 %
with Kimi-Conv and 1 % with Azure-Conv. With Kimi's long sequences memory holds less of what comes than of
the mean: by tokens a second and the gap between them about 20 sequences on the four H100s and 63 beside
the H20s, where nine tenths of the memory are 34 and 80 here, so that the smaller batch loses the larger
part.
"""
)
CAUSES_11 = sentences(
    """
Attention workers: as the paper has it, and llama3-70b saturates with four of them.

Model workers: doubled, they halve the longest part of a step by the roofline, and throughput rises by a
third (one batch at a time) to two thirds, where the paper has a mild rise. Its model part must be the
smaller one: its attention workers and network took longer than by their peaks, or its model workers did
not get twice as fast.

Batch: 864 with nine tenths of the H20s' memory, beside the paper's 800.
"""
)
SOURCE = "Model-Attention Disaggregation, section 6.1, Figure"
ROWS = (
    Row(
        "lamina-fig10",
        "decoding at equal cost, four traces and three models",
        f"{SOURCE} 10, Tables 3 to 5",
        tuple(each.file for each in TRAFFIC),
        run_fig10,
    ),
    Row(
        "lamina-fig11",
        "throughput over the ratio of devices",
        f"{SOURCE} 11",
        (TRAFFIC[0].file,),
        run_fig11,
    ),
)
