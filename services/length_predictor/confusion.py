"""A length classifier's confusion matrix as a picture."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot as plt

MOST_NUMBERED = 20
"""Buckets of which the cells still have room for their numbers."""


def write_confusion(path: Path, confusion: Sequence[Sequence[int]], granularity: int) -> None:
    """``confusion``: prompts by true bucket (rows) and named bucket (columns). Colors: shares of a row."""
    counts = np.array(confusion)
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    figure, axis = plt.subplots(figsize=(6.4, 5.6), layout="constrained")
    image = axis.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    labels = [str(bucket * granularity) for bucket in range(len(counts))]
    axis.set_xticks(range(len(labels)), labels, rotation=90)
    axis.set_yticks(range(len(labels)), labels)
    axis.set_xlabel("named: output tokens from")
    axis.set_ylabel("true: output tokens from")
    axis.set_title(f"{int(counts.sum())} held-out prompts, buckets of {granularity} tokens", fontsize=10)
    if len(counts) <= MOST_NUMBERED:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                color = "white" if shares[row, column] > 0.5 else "black"
                axis.text(column, row, str(count), ha="center", va="center", fontsize=8, color=color)
    figure.colorbar(image, label="share of the true bucket")
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)
