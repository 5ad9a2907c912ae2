"""What Lamina's two papers state, beside what the roofline gives: each reading with its own verdict.

The papers measure, the roofline idealises, so a statement that does not hold here is not thereby false. Where
it depends on something that the paper leaves open (context, devices per pool), each choice is a reading of
its own. Nothing is fitted: Table 3 of Offloading rests on a measured MFU that it does not print, and the MFU
that each entry implies is shown beside the roofline's.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import msgspec

from common.cost import (
    DISAGGREGATION_LINK,
    ELEMENT_BYTES,
    OFFLOADING_LINK,
    Utilisation,
    attention_work,
    implied_mfu,
    kv_token_bytes,
    link_implied_mfu,
    minimum_link_bytes_s,
    model_work,
    roofline_s,
    weight_bytes,
)
from common.devices import A100, H20, H100, DeviceSpec
from common.shapes import LLAMA3_70B, LLAMA_13B, LLAMA_33B, LLAMA_65B, ModelShape

ELEMENT = ELEMENT_BYTES["fp16"]
"""Both papers store weights and KV in fp16."""

LONGEST_CONTEXT = 1 << 20
TABLE_3_BATCHES = (128, 256, 512, 1024)
TABLE_3_GB_S = (
    (LLAMA_13B, 1, (4.90, 8.12, 9.08, 10.06)),
    (LLAMA_33B, 2, (5.94, 9.31, 11.56, 12.53)),
    (LLAMA_65B, 4, (7.55, 11.78, 13.92, 15.90)),
)
"""Offloading, Table 3: model, its A100s, GB/s at each batch."""

WEIGHTS_GB = ((LLAMA_33B, 64.7), (LLAMA_65B, 130.1), (LLAMA3_70B, 137.5))
"""Disaggregation, Table 3."""

PRICES_USD_H = (((1, 2), 20.32), ((2, 4), 40.64), ((2, 0), 22.12), ((4, 0), 44.24))
"""Disaggregation, Table 5: (H100s, H20s) and their price."""


class Statement(msgspec.Struct, frozen=True):
    """One statement in one reading. ``paper`` and ``ours`` are in ``unit``."""

    source: str
    claim: str
    reading: str
    paper: float
    ours: float
    unit: str
    holds: bool
    remark: str = ""


class ImpliedMfu(msgspec.Struct, frozen=True):
    """One entry of Offloading's Table 3: what it implies, and what the roofline gives in its place."""

    model: str
    devices: int
    batch: int
    paper_gb_s: float
    implied_mfu: float
    roofline_mfu: float
    roofline_gb_s: float


def check_statements(utilisation: Utilisation) -> tuple[Statement, ...]:
    return (
        *_link_of_llama3_70b(utilisation),
        *_link_of_offloading(utilisation),
        *_attention_share(utilisation),
        _requests_in_one_h100(),
        _small_batch_mfu(utilisation),
        *_attention_mfu(utilisation),
        *_sizes(),
        *_prices(),
    )


def table_3(utilisation: Utilisation) -> tuple[ImpliedMfu, ...]:
    """Offloading's Table 3, entry by entry."""
    entries = []
    for shape, devices, figures in TABLE_3_GB_S:
        for batch, gb_s in zip(TABLE_3_BATCHES, figures, strict=True):
            work = model_work(shape, batch, ELEMENT)
            elapsed_s = roofline_s(work, A100, devices=devices, utilisation=utilisation)
            entries.append(
                ImpliedMfu(
                    model=shape.name,
                    devices=devices,
                    batch=batch,
                    paper_gb_s=gb_s,
                    implied_mfu=link_implied_mfu(gb_s * 1e9, shape, ELEMENT, A100, devices),
                    roofline_mfu=implied_mfu(work.flops, elapsed_s, A100, devices),
                    roofline_gb_s=_offloading_gb_s(shape, batch, devices, utilisation),
                )
            )
    return tuple(entries)


def _model_s(
    shape: ModelShape, batch: int, device: DeviceSpec, devices: int, utilisation: Utilisation
) -> float:
    return roofline_s(model_work(shape, batch, ELEMENT), device, devices=devices, utilisation=utilisation)


def _attention_s(
    shape: ModelShape, batch: int, context: int, device: DeviceSpec, devices: int, utilisation: Utilisation
) -> float:
    work = attention_work(shape, batch, context, ELEMENT)
    return roofline_s(work, device, devices=devices, utilisation=utilisation)


def _offloading_gb_s(shape: ModelShape, batch: int, devices: int, utilisation: Utilisation) -> float:
    needed = minimum_link_bytes_s(
        shape,
        batch,
        ELEMENT,
        model_s=_model_s(shape, batch, A100, devices, utilisation),
        attention_s=0.0,
        assumptions=OFFLOADING_LINK,
    )
    return needed / 1e9


def _link_of_llama3_70b(utilisation: Utilisation) -> Iterator[Statement]:
    """The context is not stated: 4096 and 8192 are what its section 6.2 measures, (2, 4) what 6.1 runs."""
    for dop, context in product(((1, 1), (2, 4)), (4096, 8192)):
        needed = partial(_llama3_70b_gb_s, dop, utilisation)
        yield Statement(
            source="Disaggregation, 3.1",
            claim="LLaMA3-70B on H100 and H20: at most 30 GB/s at batch 300 with 20 % slack",
            reading=f"context {context}, DOP {dop}, each H100's link",
            paper=30,
            ours=needed(context),
            unit="GB/s",
            holds=needed(context) <= 30,
            remark=f"holds from context {_first_context(needed, 30)}",
        )


def _llama3_70b_gb_s(dop: tuple[int, int], utilisation: Utilisation, context: int) -> float:
    """For each H100 of ``dop`` = (H100s, H20s), at batch 300."""
    needed = minimum_link_bytes_s(
        LLAMA3_70B,
        300,
        ELEMENT,
        model_s=_model_s(LLAMA3_70B, 300, H100, dop[0], utilisation),
        attention_s=_attention_s(LLAMA3_70B, 300, context, H20, dop[1], utilisation),
        assumptions=DISAGGREGATION_LINK,
    )
    return needed / dop[0] / 1e9


def _first_context(value: Callable[[int], float], bound: float) -> int:
    """The first context at which a value that rises or falls with it has crossed ``bound``."""
    is_rising = value(LONGEST_CONTEXT) > value(1)
    return 1 + bisect_left(
        range(1, LONGEST_CONTEXT),
        True,
        key=lambda context: value(context) > bound if is_rising else value(context) <= bound,
    )


def _link_of_offloading(utilisation: Utilisation) -> Iterator[Statement]:
    for shape, devices, _ in TABLE_3_GB_S:
        ours = max(_offloading_gb_s(shape, batch, devices, utilisation) for batch in TABLE_3_BATCHES)
        yield Statement(
            source="Offloading, 4.2",
            claim="at most 20 GB/s up to batch 1024",
            reading=f"{shape.name} on {devices} A100",
            paper=20,
            ours=ours,
            unit="GB/s",
            holds=ours <= 20,
            remark="rests on a measured MFU, see Table 3",
        )


def _attention_share(utilisation: Utilisation) -> Iterator[Statement]:
    """Offloading's own model and batches; then the other paper's, whose KV is grouped."""
    for shape, device, batch in ((LLAMA_13B, A100, 128), (LLAMA_13B, A100, 512), (LLAMA3_70B, H100, 300)):
        share = partial(_attention_percent, shape, batch, device, utilisation)
        remark = f"holds from context {_first_context(share, 80)}"
        yield Statement(
            source="Offloading, 3.1",
            claim="attention takes more than 80 % of the time beyond 1,500 tokens",
            reading=f"{shape.name}, batch {batch}, {device.name}, context 1501",
            paper=80,
            ours=share(1501),
            unit="%",
            holds=share(1501) > 80,
            remark=remark if shape is LLAMA_13B else f"{remark}; grouped KV, not that paper's case",
        )


def _attention_percent(
    shape: ModelShape, batch: int, device: DeviceSpec, utilisation: Utilisation, context: int
) -> float:
    attention_s = _attention_s(shape, batch, context, device, 1, utilisation)
    return 100 * attention_s / (attention_s + _model_s(shape, batch, device, 1, utilisation))


def _requests_in_one_h100() -> Statement:
    ours = H100.memory_bytes / (8192 * kv_token_bytes(LLAMA3_70B, ELEMENT))
    return Statement(
        source="Disaggregation, 2.2.2",
        claim="a full H100 holds the KV of about 30 requests of 8,192 tokens (±5 %)",
        reading="LLaMA3-70B, 80 GB, no weights",
        paper=30,
        ours=ours,
        unit="requests",
        holds=abs(ours - 30) <= 1.5,
    )


def _small_batch_mfu(utilisation: Utilisation) -> Statement:
    work = model_work(LLAMA3_70B, 99, ELEMENT)
    ours = 100 * implied_mfu(work.flops, _model_s(LLAMA3_70B, 99, H100, 1, utilisation), H100)
    return Statement(
        source="Disaggregation, 2.2.1",
        claim="below batch 100, MFU of all but attention stays under 20 %",
        reading="LLaMA3-70B, batch 99, h100",
        paper=20,
        ours=ours,
        unit="%",
        holds=ours < 20,
        remark="measured in the paper; the roofline is its upper bound",
    )


def _attention_mfu(utilisation: Utilisation) -> Iterator[Statement]:
    for shape, device in ((LLAMA_13B, A100), (LLAMA3_70B, H100), (LLAMA3_70B, H20)):
        work = attention_work(shape, 128, 4096, ELEMENT)
        elapsed_s = roofline_s(work, device, utilisation=utilisation)
        ours = 100 * implied_mfu(work.flops, elapsed_s, device)
        yield Statement(
            source="Offloading, 3.1",
            claim="attention's MFU is less than 5 % in most scenarios",
            reading=f"{shape.name}, {device.name}",
            paper=5,
            ours=ours,
            unit="%",
            holds=ours < 5,
            remark="" if shape is LLAMA_13B else "grouped KV, not that paper's case",
        )


def _sizes() -> Iterator[Statement]:
    for shape, paper_gb in WEIGHTS_GB:
        ours = weight_bytes(shape, ELEMENT) / 1e9
        yield Statement(
            source="Disaggregation, Table 3",
            claim="size of the weights (±1 %)",
            reading=shape.name,
            paper=paper_gb,
            ours=ours,
            unit="GB",
            holds=abs(ours - paper_gb) <= 0.01 * paper_gb,
            remark=f"{shape.multiplied_parameters * ELEMENT / 1e9:.1f} GB without the input embedding",
        )


def _prices() -> Iterator[Statement]:
    for (model_devices, attention_devices), paper_usd_h in PRICES_USD_H:
        ours = model_devices * H100.price_usd_h + attention_devices * H20.price_usd_h
        yield Statement(
            source="Disaggregation, Table 5",
            claim="price of the configuration",
            reading=f"{model_devices} H100, {attention_devices} H20",
            paper=paper_usd_h,
            ours=ours,
            unit="$/h",
            holds=round(ours, 2) == paper_usd_h,
        )
