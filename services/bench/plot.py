"""A run's latency distributions as one picture: the cumulative share of TTFT, TPOT, TBT and end-to-end."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, PercentFormatter

from services.bench.run import BenchRun
from services.bench.summary import LoadResult

COLORS = {"foreground": "#0b6e99", "background": "#d9730d"}
INK, QUIET, GRID = "#22272e", "#6b7480", "#e4e7eb"
MOST_POINTS = 4000
"""A curve of more points looks the same and makes the file large."""
WIDE_SPAN = 8.0
"""From this ratio of p99.9 to minimum on, the axis is logarithmic."""

PANELS = (
    ("ttft_s", "TTFT · time to first token"),
    ("tpot_s", "TPOT · time per output token (a request's mean)"),
    ("tbt_s", "TBT · every gap between tokens"),
    ("end_to_end_s", "End to end"),
)


def write_plot(path: Path, run: BenchRun) -> None:
    """Draw ``run`` into ``path``; the ending says the format (png, svg, pdf)."""
    with plt.rc_context({"font.size": 9, "font.family": "sans-serif", "text.color": INK}):
        layout = ConstrainedLayoutEngine(rect=(0.0, 0.0, 1.0, 0.91), hspace=0.06, wspace=0.04)
        figure, axes = plt.subplots(2, 2, figsize=(11.0, 7.6), layout=layout)
        for axis, (name, title) in zip(axes.flat, PANELS, strict=True):
            curves = {load: values for load, one in run.samples.items() if (values := getattr(one, name))}
            objectives = run.result.config.objectives
            bound_s = None if objectives is None else getattr(objectives, name)
            draw_distributions(axis, title, curves, COLORS, bound_s)
        _draw_title(figure, run)
        figure.savefig(path, dpi=150, facecolor="white")
        plt.close(figure)


def draw_distributions(
    axis: Any,
    title: str,
    drawn: Mapping[str, Sequence[float]],
    colors: Mapping[str, str],
    bound_s: float | None = None,
) -> None:
    """The cumulative shares of each of ``drawn``, none of them empty; ``bound_s`` is what was promised."""
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK, pad=30)
    for load, values in drawn.items():
        _draw_curve(axis, load, values, colors[load])
    everything = np.concatenate([np.asarray(values) for values in drawn.values()]) if drawn else np.empty(0)
    if everything.size == 0:
        axis.text(
            0.5, 0.5, "nothing measured", ha="center", va="center", color=QUIET, transform=axis.transAxes
        )
    else:
        _scale(axis, everything)
    if bound_s is not None:
        axis.axvline(bound_s * 1e3, color="#b3261e", linewidth=1, linestyle=(0, (4, 3)))
        axis.annotate(
            f"SLO {bound_s * 1e3:g} ms", (bound_s * 1e3, 0.02), rotation=90, color="#b3261e", fontsize=8,
            ha="left", va="bottom", textcoords="offset points", xytext=(3, 2),
        )  # fmt: skip
    axis.set_ylim(0.0, 1.02)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.set_xlabel("ms", color=QUIET)
    finish_axis(axis, has_legend=bool(drawn))


def finish_axis(axis: Any, *, has_legend: bool) -> None:
    axis.grid(color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(QUIET)
    axis.tick_params(colors=QUIET, which="both")
    if has_legend:
        # Above the axes: a curve may go anywhere inside.
        legend = axis.legend(
            frameon=False, loc="lower left", bbox_to_anchor=(-0.01, 0.99), fontsize=8,
            borderpad=0.2, labelspacing=0.2, handlelength=1.2,
        )  # fmt: skip
        legend.set_in_layout(False)


def _draw_curve(axis: Any, load: str, values_s: Sequence[float], color: str) -> None:
    ordered_ms = np.sort(np.asarray(values_s)) * 1e3
    p50_ms, p99_ms = np.percentile(ordered_ms, [50, 99])
    shares = np.arange(1, ordered_ms.size + 1) / ordered_ms.size
    if ordered_ms.size > MOST_POINTS:
        chosen = np.linspace(0, ordered_ms.size - 1, MOST_POINTS).astype(int)
        ordered_ms, shares = ordered_ms[chosen], shares[chosen]
    label = f"{load}: p50 {_digits(p50_ms)}, p99 {_digits(p99_ms)} ms (n = {len(values_s):,})"
    axis.step(ordered_ms, shares, where="post", color=color, linewidth=1.8, label=label)
    axis.plot([p50_ms, p99_ms], [0.5, 0.99], "o", color=color, markersize=4, zorder=3)


def _digits(milliseconds: float) -> str:
    return f"{milliseconds:,.0f}" if milliseconds >= 1000 else f"{milliseconds:.1f}"


def _scale(axis: Any, values_s: Any) -> None:
    lowest_ms, highest_ms = float(values_s.min()) * 1e3, float(values_s.max()) * 1e3
    if lowest_ms > 0 and highest_ms / lowest_ms > WIDE_SPAN:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.xaxis.set_minor_formatter("")
    else:
        axis.set_xlim(left=0.0, right=highest_ms * 1.05)


def _draw_title(figure: Any, run: BenchRun) -> None:
    result = run.result
    figure.text(
        0.012, 0.975, f"{result.model} · {result.config.url}", fontsize=12, fontweight="bold", color=INK
    )
    figure.text(0.012, 0.963, "\n".join(map(_describe, result.loads)), fontsize=9, color=QUIET, va="top")


def _describe(load: LoadResult) -> str:
    goodput = "" if load.goodput_per_s is None else f", goodput {load.goodput_per_s:.2f} req/s"
    return (
        f"{load.name}: {load.offered}; {load.output_tokens_per_s:,.0f} tok/s, "
        f"{load.served}/{load.requests} served{goodput}"
    )
