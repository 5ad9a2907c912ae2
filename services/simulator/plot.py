"""Simulated runs as one picture: the cumulative shares of TTFT and TPOT, and who waits when."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from numpy.typing import NDArray

from common.latency import ServiceObjectives
from services.bench.plot import INK, QUIET, draw_distributions, finish_axis
from services.simulator.records import Records
from services.simulator.request_files import RequestTable

PALETTE = ("#0b6e99", "#d9730d", "#4f7f3f", "#7b4ea3", "#b3261e", "#6b7480")
PANELS = (("ttft_s", "TTFT · time to first token"), ("tpot_s", "TPOT · time per output token"))


def write_plot(
    path: Path,
    tables: Mapping[str, RequestTable],
    records: Mapping[str, Records],
    objectives: ServiceObjectives | None,
) -> None:
    """By each run's name. The file's ending says the format (png, svg, pdf)."""
    colors = {name: PALETTE[number % len(PALETTE)] for number, name in enumerate(tables)}
    with plt.rc_context({"font.size": 9, "font.family": "sans-serif", "text.color": INK}):
        figure, axes = plt.subplots(3, 1, figsize=(8.0, 10.0), layout="constrained")
        for axis, (column, title) in zip(axes, PANELS, strict=False):
            curves = {name: known for name, table in tables.items() if (known := _known(table, column))}
            bound_s = None if objectives is None else getattr(objectives, column)
            draw_distributions(axis, title, curves, colors, bound_s)
        _draw_waiting(axes[2], records, colors)
        figure.savefig(path, dpi=150, facecolor="white")
        plt.close(figure)


def _known(table: RequestTable, column: str) -> list[float]:
    return [float(each) for each in table.columns[column] if each is not None]


def _draw_waiting(axis: Any, records: Mapping[str, Records], colors: Mapping[str, str]) -> None:
    axis.set_title(
        "Requests without a first token", loc="left", fontsize=10, fontweight="bold", color=INK, pad=30
    )
    for name, each in records.items():
        axis.step(*waiting_over_time(each), where="post", color=colors[name], linewidth=1.2, label=name)
    axis.set_xlabel("s", color=QUIET)
    axis.set_ylim(bottom=0)
    finish_axis(axis, has_legend=bool(records))


def waiting_over_time(records: Records) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """(times, how many there are from then on) who have come, and have neither a token nor ended."""
    columns = records.columns()
    first_s, end_s = columns["first_token_s"], columns["end_s"]
    left_s = np.where(np.isnan(first_s), end_s, first_s)
    times_s = np.concatenate([columns["arrival_s"], left_s])
    changes = np.repeat([1, -1], len(records))
    order = np.argsort(times_s, kind="stable")
    return times_s[order], np.cumsum(changes[order])
