"""Attention Offloading, Table 3: how fast the link between model and attention workers must be.

The paper computes it from an MFU that it measured and did not print, so a cell of its table says what that
was. Beside it stands what the roofline gives by the same formula, and where their tables are in the data
directory measured kernels of an A100.
"""

from dataclasses import dataclass

import numpy as np

from common.cost import (
    ELEMENT_BYTES,
    OFFLOADING_LINK,
    PLAIN_ROOFLINE,
    exchanged_bytes,
    implied_mfu,
    link_implied_mfu,
    model_work,
    roofline_s,
)
from common.devices import A100
from common.shapes import LLAMA_13B, LLAMA_33B, LLAMA_65B, ModelShape
from services.reproduce.data import DataFiles
from services.reproduce.row import Reproduced, Row, Table, sentences
from services.simulator.performance.aiconfigurator import KernelOperators, read_kernels
from services.simulator.performance.roofline import Parallelism, RooflineModel
from services.simulator.shape import PassShape

FP16_BYTES = ELEMENT_BYTES["fp16"]
GB = 1e9
KERNELS = "aiconfigurator/a100_sxm"


@dataclass(frozen=True, slots=True)
class Setting:
    """``printed``: GB/s by batch, as the paper has them."""

    shape: ModelShape
    devices: int
    printed: dict[int, float]


SETTINGS = (
    Setting(LLAMA_13B, 1, {128: 4.90, 256: 8.12, 512: 9.08, 1024: 10.06}),
    Setting(LLAMA_33B, 2, {128: 5.94, 256: 9.31, 512: 11.56, 1024: 12.53}),
    Setting(LLAMA_65B, 4, {128: 7.55, 256: 11.78, 512: 13.92, 1024: 15.90}),
)


def roofline_model_s(setting: Setting, batch: int) -> float:
    """At the shares of the peaks that kernels usually reach, with reductions."""
    parallelism = Parallelism(tensor=setting.devices)
    model = RooflineModel(setting.shape, A100, parallelism=parallelism)
    return model.pass_s(PassShape((), batch, 0))


def kernels_of(files: DataFiles, setting: Setting) -> KernelOperators | None:
    """None where the tables are not there."""
    directory = files.find(KERNELS)
    if directory is None:
        return None
    tables = read_kernels(directory, setting.shape, setting.devices)
    return KernelOperators(tables, setting.shape, A100, parallelism=Parallelism(tensor=setting.devices))


def kernel_s(operators: KernelOperators, batch: int) -> float:
    """All products, reductions, and what moves through memory between them."""
    rows = np.array([float(batch)])
    seconds = sum(operators.row_operators_s(rows).values(), operators.heads_s(rows))
    return float(seconds[0])


def run(files: DataFiles, size: float) -> Reproduced:
    bandwidth, times = [], []
    for setting in SETTINGS:
        measured = kernels_of(files, setting)
        for batch, printed in setting.printed.items():
            name = (f"{setting.shape.name} @ {setting.devices} A100", str(batch))
            moved = exchanged_bytes(setting.shape, batch, FP16_BYTES, OFFLOADING_LINK)
            work = model_work(setting.shape, batch, FP16_BYTES)
            implied = link_implied_mfu(printed * GB, setting.shape, FP16_BYTES, A100, setting.devices)
            seconds = [
                roofline_s(work, A100, devices=setting.devices, utilisation=PLAIN_ROOFLINE),
                roofline_model_s(setting, batch),
            ]
            if measured is not None:
                seconds.append(kernel_s(measured, batch))
            bandwidth.append((*name, f"{printed:.2f}", *(f"{moved / each / GB:.2f}" for each in seconds)))
            times.append(
                (
                    *name,
                    f"{1e3 * moved / (printed * GB):.1f} ms, {implied:.1%}",
                    *(_time_text(each, work.flops, setting.devices) for each in seconds),
                )
            )
    has_kernels = files.find(KERNELS) is not None
    columns = (*COLUMNS, KERNELS_COLUMN) if has_kernels else COLUMNS
    return Reproduced(
        tables=(
            Table(columns, tuple(bandwidth), "Least bandwidth, GB/s"),
            Table(columns, tuple(times), "What that says of a step without attention: time, MFU"),
        ),
        setup=SETUP if has_kernels else SETUP_OF_ROOFLINES,
        assumptions=ASSUMPTIONS,
        causes=CAUSES if has_kernels else CAUSES_OF_ROOFLINES,
    )


def _time_text(seconds: float, flops: float, devices: int) -> str:
    return f"{1e3 * seconds:.1f} ms, {implied_mfu(flops, seconds, A100, devices):.1%}"


COLUMNS = (
    "model",
    "batch",
    "paper",
    "ours: roofline",
    "ours: at usual shares of it",
)
KERNELS_COLUMN = "ours: measured kernels"
SETUP = sentences(
    """
4edBL over the time of a step without attention (section 4.2), no simulation. That time by the roofline at
the peaks; at 75 % and 80 % of them, with reductions; and by aiconfigurator's kernels of an A100 SXM.
"""
)
SETUP_OF_ROOFLINES = sentences(
    f"""
4edBL over the time of a step without attention (section 4.2), no simulation. That time by the roofline at
the peaks, and at 75 % and 80 % of them, with reductions. Not by measured kernels, for want of {KERNELS} in
the data directory (--data).
"""
)
ASSUMPTIONS = sentences(
    """
Peaks are an A100 PCIe's with 80 GB (Table 1: 1,935 GB/s); which A100 Table 3 is of is not said, section 6
has one with 40 GB.

The paper's MFU is measured (its Figure 3), and no figure of it is printed.
"""
)
CAUSES = sentences(
    """
A cell is the time of a step and nothing else: by what is printed llama-13b takes 42.8 ms at batch 128,
where reading its weights takes 13.3 and today's kernels 22.0. The formula is the same, the paper's
kernels were slower: from batch 512 to 1,024 the further rows alone come to an MFU of 57 % there, and of
93 % by the measured kernels.

From one device to four its MFU at 1,024 falls from 51 % to 32 %, with as much work on each. So does that
of the measured kernels, from 83 % to 58 %: narrower products, and reductions.

With faster kernels the link must be faster: up to 2.4 times the table's figures, and the paper's 20 GB/s
no longer do for llama-65b on four devices.
"""
)
CAUSES_OF_ROOFLINES = sentences(
    """
A cell is the time of a step and nothing else: by what is printed llama-13b takes 42.8 ms at batch 128,
where reading its weights takes 13.3. The formula is the same, the paper's kernels were slower than a
roofline says: from batch 512 to 1,024 the further rows alone come to an MFU of 57 % there.

From one device to four its MFU at 1,024 falls from 51 % to 32 %, with as much work on each.

With faster kernels the link must be faster, and the paper's 20 GB/s no longer do for llama-65b on four
devices.
"""
)


ROW = Row(
    id="lamina-table3",
    title="bandwidth between model and attention workers",
    source="Attention Offloading, section 4.2, Table 3",
    files=(f"{KERNELS}/ (optional)",),
    run=run,
)
