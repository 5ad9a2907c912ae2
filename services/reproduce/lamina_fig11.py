"""Model-Attention Disaggregation, Figure 11: throughput over the ratio of devices, by the cost formulas."""

from common.cost import Throughput
from common.devices import H100
from common.shapes import LLAMA3_70B, LLAMA_33B, ModelShape
from services.reproduce.data import DataFiles
from services.reproduce.lamina_decoding import (
    ASSUMPTIONS,
    CALCULATED_SO,
    DEVICES_USED,
    NINE_TENTHS,
    ONE_BATCH,
    REQUESTS,
    SETTINGS,
    SOURCE,
    TRAFFIC,
    fitting,
    held_context,
    lamina,
    vllm,
)
from services.reproduce.lamina_fig10 import text_of
from services.reproduce.row import Reproduced, Row, Table, sentences
from services.reproduce.running import scaled

SMALL_DOPS = ((1, 1), (1, 2), (1, 4), (2, 2))
LARGE_DOPS = ((2, 2), (2, 4), (2, 8), (4, 4))
"""Attention workers that KV heads share out among."""
MODES = (NINE_TENTHS, ONE_BATCH)
Dop = tuple[int, int]


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
        for dop in dops:
            cells = _cost_text(formulas[NINE_TENTHS][dop])
            details.append((shape.name, f"Lamina, DOP {dop}", *cells))
        for count in tensors:
            cells = _cost_text(vllm(shape, context, count, NINE_TENTHS))
            details.append((shape.name, f"vLLM, {count} H100", *cells))
        for what, claim, less, more in _claims(shape, dops):
            gained = [_gain(each.get(more), each.get(less)) for each in formulas.values()]
            rows.append((f"{shape.name}: more {what}, {less} to {more}", claim, *gained))
        if shape is LLAMA3_70B:
            batches = [_batch(each[2, 4]) for each in formulas.values()]
            rows.append((f"{shape.name}: batch at (2, 4)", "800", *batches))
    headings = ("throughput", "paper", "ours: formula", "ours: formula, one batch")
    more_columns = ("model", "devices", "batch, tokens/s, ms from token to token", "$/h", "tokens a dollar")
    return Reproduced(
        (Table(headings, tuple(rows)), Table(more_columns, tuple(details))),
        (f"{traffic.name}: {lengths.described}", *DEVICES_USED, *CALCULATED_SO),
        (*ASSUMPTIONS, *DRAWN),
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


def _gain(more: Throughput | None, less: Throughput | None) -> str:
    if more is None or less is None:
        return "-"
    return f"{100 * (more.tokens_s / less.tokens_s - 1):+.0f} %"


def _batch(found: Throughput | None) -> str:
    return "-" if found is None else f"{found.batch:,.0f}"


def _cost_text(found: Throughput | None) -> tuple[str, str, str]:
    if found is None:
        return ("does not fit", "-", "-")
    return (text_of(found), f"{found.price_usd_h:.2f}", f"{found.tokens_usd:,.0f}")


DRAWN = sentences(
    """
Which ratios the paper has is drawn, not printed: here are those whose attention workers share the KV heads
evenly, as it has them.
"""
)
CAUSES = sentences(
    """
Attention workers: as the paper has it, and llama3-70b saturates with four of them.

Model workers: doubled, they halve the longest part of a step by the roofline, and throughput rises by a
third (one batch at a time) to twice as much, where the paper has a mild rise. Its model part must be the
smaller one: its attention workers and network took longer than by their peaks, or its model workers did
not get twice as fast.

Batch: by the formula memory holds 864, beside the paper's 800.
"""
)
ROW = Row(
    id="lamina-fig11",
    title="throughput over the ratio of devices",
    source=f"{SOURCE} 11",
    files=(TRAFFIC[0].file,),
    run=run,
)
