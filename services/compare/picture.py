"""A comparison as one picture: a panel a figure, a group of bars a workload, a bar a configuration."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from services.bench.plot import GRID, INK, QUIET
from services.compare.comparison import Comparison
from services.compare.figures import DRAWN, Cell, Figure

COLORS = ("#8a929c", "#c9ccd1", "#0b6e99", "#5ba7c4", "#2f7d4f", "#8fc39f", "#d9730d", "#f0b27a")
GROUP_WIDTH = 0.82


def draw_comparison(path: Path, comparison: Comparison, cells: Sequence[Cell]) -> None:
    """Bars are medians, lines from the least to the greatest round; the ending says the format."""
    with plt.rc_context({"font.size": 9, "font.family": "sans-serif", "text.color": INK}):
        figure, axes = plt.subplots(2, 3, figsize=(13.0, 6.4), layout="constrained")
        for axis, drawn in zip(axes.flat, DRAWN, strict=True):
            _draw_panel(axis, drawn, comparison, cells)
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False, fontsize=9
        )
        figure.savefig(path, dpi=150, facecolor="white")
        plt.close(figure)


def _draw_panel(axis: Any, drawn: Figure, comparison: Comparison, cells: Sequence[Cell]) -> None:
    workloads = list(dict.fromkeys(cell.workload for cell in cells))
    names = [candidate.name for candidate in comparison.configuration]
    width = GROUP_WIDTH / len(names)
    for index, name in enumerate(names):
        left = [
            workloads.index(cell.workload) - GROUP_WIDTH / 2 + (index + 0.5) * width
            for cell in cells
            if cell.configuration == name
        ]
        values = [
            [value * drawn.scale for value in cell.values(drawn)] or [0.0]
            for cell in cells
            if cell.configuration == name
        ]
        medians = [(cell.median(drawn) or 0.0) * drawn.scale for cell in cells if cell.configuration == name]
        spread = [
            [median - min(each) for median, each in zip(medians, values, strict=True)],
            [max(each) - median for median, each in zip(medians, values, strict=True)],
        ]
        axis.bar(left, medians, 0.92 * width, color=COLORS[index % len(COLORS)], label=name)
        axis.errorbar(left, medians, yerr=spread, fmt="none", ecolor=INK, elinewidth=0.8)
    axis.set_title(f"{drawn.name}, {drawn.unit}", loc="left", fontsize=10, fontweight="bold", color=INK)
    axis.set_xticks(range(len(workloads)), [name.upper() for name in workloads])
    axis.grid(axis="y", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(QUIET)
    axis.tick_params(colors=QUIET)
