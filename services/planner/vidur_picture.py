"""Vidur's Figure 5: what a dollar buys, over what first tokens and gaps take, with the fronts and the
objectives."""

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from common.latency import ServiceObjectives
from services.bench.plot import INK, QUIET
from services.planner.vidur_search import VidurPoint, pareto_front, within

KEEPS = "#2f7d4f"
MISSES = "#c9ccd1"
FRONT = "#0b6e99"


def draw_pareto(path: Path, points: Sequence[VidurPoint], objectives: ServiceObjectives) -> None:
    """The file's ending says the format (png, svg, pdf)."""
    ttft_s, tbt_s = objectives.ttft_s, objectives.tbt_s
    kept = {each.kind for each in within(points, objectives)}
    panels = (
        (attrgetter("ttft_p90_s"), "TTFT P90, s", ttft_s),
        (attrgetter("tbt_p99_s"), "gaps P99, s", tbt_s),
    )
    with plt.rc_context({"font.size": 9, "font.family": "sans-serif", "text.color": INK}):
        figure, axes = plt.subplots(1, 2, figsize=(10.0, 4.2), layout="constrained", sharey=True)
        for axis, (latency_s, label, bound_s) in zip(axes, panels, strict=True):
            for is_kept, color in ((False, MISSES), (True, KEEPS)):
                shown = [each for each in points if (each.kind in kept) is is_kept]
                axis.scatter(
                    [latency_s(each) for each in shown],
                    [each.requests_per_usd for each in shown],
                    s=14,
                    color=color,
                    label="keeps the objectives" if is_kept else "misses one",
                )
            front = pareto_front(points, latency_s)
            axis.step(
                [latency_s(each) for each in front],
                [each.requests_per_usd for each in front],
                where="post",
                color=FRONT,
                label="Pareto front",
            )
            if bound_s is not None:
                axis.axvspan(0, bound_s, color=KEEPS, alpha=0.08)
            axis.set_xlabel(label, color=QUIET)
            axis.set_xscale("log")
        axes[0].set_ylabel("requests per dollar", color=QUIET)
        axes[1].legend(frameon=False, fontsize=8)
        figure.savefig(path, dpi=150, facecolor="white")
        plt.close(figure)
