"""Model-Attention Disaggregation, Figure 10: decoding at equal cost, simulated and by the cost formulas."""

from dataclasses import dataclass
from functools import partial

from common.cost import Throughput
from common.devices import H100
from services.bench.lengths import LengthPair
from services.reproduce.data import DataFiles
from services.reproduce.lamina_decoding import (
    ASSUMPTIONS,
    CALCULATED_SO,
    DEVICES_USED,
    NINE_TENTHS,
    ONE_BATCH,
    REQUESTS,
    SETTINGS,
    SIMULATED_ASSUMPTIONS,
    SIMULATED_SO,
    SOURCE,
    TRAFFIC,
    VLLM_NINE_TENTHS,
    WHOLE,
    Assumed,
    Setting,
    fitting,
    held_context,
    lamina,
    vllm,
)
from services.reproduce.lamina_simulated import Saturated, Saturation, saturate_lamina, saturate_vllm
from services.reproduce.row import Reproduced, Row, Table, sentences
from services.reproduce.running import scaled

FORMULAS = {
    "ours: formula": NINE_TENTHS,
    "ours: formula, one batch": ONE_BATCH,
    "ours: formula, all memory": WHOLE,
    "ours: formula, nine tenths of vLLM's alone": VLLM_NINE_TENTHS,
}
SIMULATED, SIMULATED_ONE = "ours: simulated", "ours: simulated, one batch"
COLUMNS = (SIMULATED, SIMULATED_ONE, *FORMULAS)
DETAILED = (SIMULATED, "ours: formula")


@dataclass(frozen=True, slots=True)
class Cell:
    """vLLM's and Lamina's, by the formulas or simulated."""

    vllm: Throughput | Saturated
    lamina: Throughput | Saturated

    @property
    def gain(self) -> float:
        return self.lamina.tokens_s / self.vllm.tokens_s - 1

    @property
    def batches(self) -> float:
        return self.lamina.batch / self.vllm.batch


def by_formula(setting: Setting, context: int, assumed: Assumed) -> tuple[Throughput, Throughput] | None:
    """vLLM's and Lamina's; None where one holds no sequence."""
    base = vllm(setting.shape, context, setting.devices, assumed)
    ours = lamina(setting.shape, context, setting.dop, assumed)
    return None if base is None or ours is None else (base, ours)


def cells_of(setting: Setting, pairs: tuple[LengthPair, ...], size: float) -> dict[str, Cell]:
    """By column; none where a deployment holds no sequence of the mean's length."""
    context = held_context(pairs)
    found = {name: by_formula(setting, context, assumed) for name, assumed in FORMULAS.items()}
    cells = {name: Cell(*both) for name, both in found.items() if both is not None}
    two, one = found["ours: formula"], found["ours: formula, one batch"]
    if two is None or one is None:
        return cells
    shape, load = setting.shape, partial(Saturation, pairs, size=size)
    base = saturate_vllm(shape, setting.devices, load(guess=two[0]))
    ours = saturate_lamina(shape, setting.dop, load(guess=two[1]))
    alone = saturate_lamina(shape, setting.dop, load(guess=one[1]), is_staggered=False)
    return {SIMULATED: Cell(base, ours), SIMULATED_ONE: Cell(base, alone), **cells}


def run(files: DataFiles, size: float) -> Reproduced:
    described, details = [], []
    found: dict[str, list[Cell]] = {name: [] for name in COLUMNS}
    for traffic in TRAFFIC:
        lengths = traffic.lengths(files, scaled(REQUESTS, size))
        described.append(f"{traffic.name}: {lengths.described}")
        for setting in SETTINGS:
            pairs = fitting(lengths, setting.shape, setting.devices, H100)
            cells = cells_of(setting, pairs, size)
            for name, cell in cells.items():
                found[name].append(cell)
            left = 1 - len(pairs) / len(lengths.pairs)
            name = f"{setting.shape.name}, {left:.1%} left out" if left else setting.shape.name
            texts = (_texts(cells[each]) if each in cells else ("-",) * 3 for each in DETAILED)
            details.append(
                (traffic.name, name, f"{held_context(pairs):,}", *(t for each in texts for t in each))
            )
    rows = (
        ("throughput over vLLM's", "+16.1 to +90.1 %", *(_range(found[name]) for name in COLUMNS)),
        ("batch over vLLM's, on average", "2.39", *(_mean_batches(found[name]) for name in COLUMNS)),
    )
    more = [f"{who}{how}" for how in ("", ", by formula") for who in ("vLLM", "Lamina", "gain")]
    title = "Batch, tokens/s, ms from token to token; simulated, and by formula"
    return Reproduced(
        (
            Table(("Lamina", "paper", *COLUMNS), rows),
            Table(("trace", "model", "context", *more), tuple(details), title),
        ),
        (*described, *DEVICES_USED, *SIMULATED_SO, *CALCULATED_SO),
        (*ASSUMPTIONS, *SIMULATED_ASSUMPTIONS),
        CAUSES,
    )


def _texts(cell: Cell) -> tuple[str, str, str]:
    return (text_of(cell.vllm), text_of(cell.lamina), f"{100 * cell.gain:+.0f} %")


def text_of(found: Throughput | Saturated) -> str:
    return f"{found.batch:,.0f}, {found.tokens_s:,.0f}, {1e3 * found.step_s:.1f}"


def _range(cells: list[Cell]) -> str:
    gains = [100 * each.gain for each in cells]
    return f"{min(gains):+.1f} to {max(gains):+.1f} %" if gains else "-"


def _mean_batches(cells: list[Cell]) -> str:
    return f"{sum(each.batches for each in cells) / len(cells):.2f}" if cells else "-"


CAUSES = sentences(
    """
Batch: as the paper's, on average. The simulator keeps memory as full as the formulas say but for
Azure-Code: whoever comes in holds memory before its first step, which weighs where an answer has 28 tokens;
with four times as many the batch is 47 where 44 fit by the formulas.

Throughput: the gain is half of the paper's at the most. By the roofline vLLM's two H100s with llama-33b and
Azure-Conv take 12 ms for the weights and 14 for the KV; Lamina's one takes 24 for the weights, twice a
round as there are two batches, and its H20s have read all KV meanwhile. So 2.2 times the batch takes 1.8
times as long. For +90 % vLLM's step would have to take 41 ms in place of 27: launches, and reductions slower
than 10 microseconds each, of which no figure is printed.

Simulated and by formula: reductions between GPUs, which the formulas leave out, cost vLLM's four H100s
more than Lamina's two, so that llama3-70b with Azure-Conv loses less. Where a step waits for weights
alone, as llama-33b's on one H100, both say the same time from token to token.

llama3-70b with Azure-Conv loses by both: with that batch two H100s are bound by computing, where vLLM's
four are just not. The paper says of that case alone that it saturates the model workers (section 6.1).

Kimi: a batch is of few sequences, of which the longest take a quarter of the memory each, so that a gain
hangs on who came: of three draws of some hundred requests with llama3-70b and Kimi-Conv two gained 14
and 25 %, and the third 110 %. Memory was full in each; in the third whoever was there on vLLM's held 22,443
tokens on average, where it was 12,901 in the second. The 60 % of simulator.md are of the trace's first 260
requests in their order, which gain 25 % where a queue stands from the start and does not grow.
"""
)
ROW = Row(
    id="lamina-fig10",
    title="decoding at equal cost, four traces and three models",
    source=f"{SOURCE} 10, Tables 3 to 5",
    files=tuple(each.file for each in TRAFFIC),
    run=run,
)
