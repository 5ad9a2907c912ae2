"""Model-Attention Disaggregation, Figure 11: throughput over the ratio of devices, simulated and by the cost
formulas."""

from collections.abc import Mapping

from common.cost import SECONDS_PER_HOUR, Throughput
from common.devices import H100
from common.shapes import LLAMA3_70B, LLAMA_33B, ModelShape
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
    fitting,
    held_context,
    lamina,
    vllm,
)
from services.reproduce.lamina_fig10 import text_of
from services.reproduce.lamina_simulated import Saturated, Saturation, saturate_lamina, saturate_vllm
from services.reproduce.row import Reproduced, Row, Table, sentences
from services.reproduce.running import scaled

SMALL_DOPS = ((1, 1), (1, 2), (1, 4), (2, 2))
LARGE_DOPS = ((2, 2), (2, 4), (2, 8), (4, 4))
"""Attention workers that KV heads share out among."""
MODES = (NINE_TENTHS, ONE_BATCH)
Dop = tuple[int, int]


def simulated_dop(
    shape: ModelShape, dop: Dop, pairs: tuple[LengthPair, ...], size: float
) -> Saturated | None:
    """None where it holds no sequence, or not the weights."""
    guess = lamina(shape, held_context(pairs), dop, NINE_TENTHS)
    return None if guess is None else saturate_lamina(shape, dop, Saturation(pairs, guess, size))


def simulated_vllm(
    shape: ModelShape, devices: int, pairs: tuple[LengthPair, ...], size: float
) -> Saturated | None:
    guess = vllm(shape, held_context(pairs), devices, NINE_TENTHS)
    return None if guess is None else saturate_vllm(shape, devices, Saturation(pairs, guess, size))


def run(files: DataFiles, size: float) -> Reproduced:
    traffic = TRAFFIC[0]
    lengths = traffic.lengths(files, scaled(REQUESTS, size))
    rows, details = [], []
    for setting in SETTINGS:
        shape, is_small = setting.shape, setting.shape is LLAMA_33B
        pairs = fitting(lengths, shape, setting.devices, H100)
        context = held_context(pairs)
        dops, tensors = (SMALL_DOPS, (1, 2, 4)) if is_small else (LARGE_DOPS, (2, 4, 8))
        formulas = {mode: {dop: lamina(shape, context, dop, mode) for dop in dops} for mode in MODES}
        simulated = {dop: simulated_dop(shape, dop, pairs, size) for dop in dops}
        columns: list[Mapping[Dop, Throughput | Saturated | None]] = [simulated, *formulas.values()]
        for dop in dops:
            cells = _cost_text(simulated[dop], formulas[NINE_TENTHS][dop])
            details.append((shape.name, f"Lamina, DOP {dop}", *cells))
        for count in tensors:
            found = simulated_vllm(shape, count, pairs, size)
            cells = _cost_text(found, vllm(shape, context, count, NINE_TENTHS))
            details.append((shape.name, f"vLLM, {count} H100", *cells))
        for what, claim, less, more in _claims(shape, dops):
            gained = [_gain(each.get(more), each.get(less)) for each in columns]
            rows.append((f"{shape.name}: more {what}, {less} to {more}", claim, *gained))
        if shape is LLAMA3_70B:
            batches = [_batch(each[2, 4]) for each in columns]
            rows.append((f"{shape.name}: batch at (2, 4)", "800", *batches))
    headings = ("throughput", "paper", "ours: simulated", "ours: formula", "ours: formula, one batch")
    more_columns = (
        "model",
        "devices",
        "simulated",
        "tokens a dollar",
        "by formula",
        "tokens a dollar",
        "$/h",
    )
    title = "Batch, tokens/s, ms from token to token"
    return Reproduced(
        (Table(headings, tuple(rows)), Table(more_columns, tuple(details), title)),
        (f"{traffic.name}: {lengths.described}", *DEVICES_USED, *SIMULATED_SO, *CALCULATED_SO),
        (*ASSUMPTIONS, *SIMULATED_ASSUMPTIONS, *DRAWN),
        CAUSES,
    )


def _claims(shape: ModelShape, dops: tuple[Dop, ...]) -> tuple[tuple[str, str, Dop, Dop], ...]:
    """What the paper says of it, from fewer to more."""
    least, middle, attention, *_ = dops
    attention_claim = "not dramatically" if shape is LLAMA3_70B else "rapidly"
    models = ((1, 2), (2, 2)) if shape is LLAMA_33B else ((2, 4), (4, 4))
    return (
        ("attention workers", "rapidly", least, middle),
        ("attention workers", attention_claim, middle, attention),
        ("model workers", "mildly", *models),
    )


def _gain(more: Throughput | Saturated | None, less: Throughput | Saturated | None) -> str:
    if more is None or less is None:
        return "-"
    return f"{100 * (more.tokens_s / less.tokens_s - 1):+.0f} %"


def _batch(found: Throughput | Saturated | None) -> str:
    return "-" if found is None else f"{found.batch:,.0f}"


def _cost_text(simulated: Saturated | None, formula: Throughput | None) -> tuple[str, ...]:
    if simulated is None or formula is None:
        return ("does not fit", "-", "does not fit", "-", "-")
    hour = formula.price_usd_h
    return (
        text_of(simulated),
        f"{simulated.tokens_s * SECONDS_PER_HOUR / hour:,.0f}",
        text_of(formula),
        f"{formula.tokens_usd:,.0f}",
        f"{hour:.2f}",
    )


DRAWN = sentences(
    """
Which ratios the paper has is drawn, not printed: here are those whose attention workers share the KV heads
evenly, as it has them.
"""
)
CAUSES = sentences(
    """
Attention workers: as the paper has it, and llama3-70b saturates with four of them.

Model workers: doubled, they halve the longest part of a step by the roofline, and throughput rises by three
quarters (a third to two thirds with one batch at a time), where the paper has a mild rise. Its model part
must be the smaller one: its attention workers and network took longer than by their peaks, or its model
workers did not get twice as fast.

Batch: 836 simulated, beside the paper's 800.

Simulated and by formula: reductions between GPUs, which grow with the batch, cost up to a fifth of
llama3-70b's steps on four and eight GPUs. Where memory holds three sequences, as llama-33b's on one H100,
some are preempted, 26 times in that run, and their next token comes late.
"""
)
ROW = Row(
    id="lamina-fig11",
    title="throughput over the ratio of devices",
    source=f"{SOURCE} 11",
    files=(TRAFFIC[0].file,),
    run=run,
)
