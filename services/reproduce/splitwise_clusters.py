"""Splitwise's clusters (Table V) and objectives (Table VI), to be simulated with its performance model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.planner.provisioning import SLOWDOWNS
from services.reproduce.data import DataFiles, PublishedLength, PublishedLengths
from services.reproduce.running import NOBODY_IS_TURNED_AWAY, run_cluster
from services.simulator import slowdowns
from services.simulator.performance.splitwise import (
    CorrectedSplitwiseModel,
    SplitwiseModel,
    read_splitwise,
)
from services.simulator.run import Offered

PERF_MODEL = "splitwise/perf_model.csv"
MODEL, DEVICES = "bloom-176b", 8
KV_TOKENS = 89_234
"""Of a machine: eight times 80 GiB less 329e9 bytes of weights, all of it for KV, as its simulator has it."""
LINK_BYTES_S = 200 * 2**30
HARDWARE = {"a100": "a100-80gb", "h100": "h100-80gb", "h100cap": "h100-80gb-pcap"}
POWER = {"a100": 1.0, "h100": 1.75, "h100cap": 1.23}
COST = {"a100": 1.0, "h100": 2.35, "h100cap": 2.35}
"""Of a machine, in DGX-A100s (Table V; there a token machine's H100 costs 2.5, a prompt machine's 2.35)."""
CONVERSATION = PublishedLengths(
    "Lamina's Table 4", PublishedLength(1154.7, 1020), PublishedLength(211.1, 129), 16_384
)
CODING = PublishedLengths(
    "Lamina's Table 4", PublishedLength(2047.8, 1500), PublishedLength(27.9, 13), 16_384
)
"""Means by Lamina's Table 4, medians by Splitwise's section III."""
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Design:
    """Of machines of a kind each: those of ``prompt`` alone compute everything where ``token`` is none."""

    name: str
    prompt: tuple[str, int]
    token: tuple[str, int] | None = None

    @property
    def machines(self) -> tuple[tuple[str, int], ...]:
        return (self.prompt,) if self.token is None else (self.prompt, self.token)

    @property
    def power(self) -> float:
        return sum(POWER[kind] * count for kind, count in self.machines)

    @property
    def cost(self) -> float:
        return sum(COST[kind] * count for kind, count in self.machines)

    @property
    def count(self) -> int:
        return sum(count for _, count in self.machines)

    def __str__(self) -> str:
        if self.token is None:
            return f"{self.name} ({self.prompt[1]}P/T)"
        return f"{self.name} ({self.prompt[1]}P, {self.token[1]}T)"


BASELINE_A100 = Design("Baseline-A100", ("a100", 70))
BASELINE_H100 = Design("Baseline-H100", ("h100", 40))
AA = Design("Splitwise-AA", ("a100", 45), ("a100", 25))
HH = Design("Splitwise-HH", ("h100", 25), ("h100", 15))
HA = Design("Splitwise-HA", ("h100", 25), ("a100", 26))
HHCAP = Design("Splitwise-HHcap", ("h100", 25), ("h100cap", 21))
ISO_POWER = (BASELINE_A100, BASELINE_H100, AA, HH, HA, HHCAP)
"""For conversations (Figure 16's legend)."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """``is_corrected``: decode steps by batch and context, too, which the published model leaves out.
    ``roles``: overflow, machines help the other pool when it is short; fixed, none does. ``has_turns``:
    sequences' KV takes turns at a machine's link; else any number share it at once. In splitwise-sim each has
    as much to itself."""

    is_corrected: bool = False
    roles: str = "overflow"
    has_turns: bool = False


PUBLISHED, CORRECTED = Assumed(), Assumed(is_corrected=True)


def tree_of(design: Design, files: DataFiles, assumed: Assumed) -> dict[str, Any]:
    """As splitwise-sim has it, as far as settings go (``bench/splitwise_hh.toml``): a prompt machine computes
    whole prompts, up to 2,048 tokens of several, and one that does both decodes beside them as far as these
    leave room."""
    path = str(files.require(PERF_MODEL).resolve())

    def pool(role: str, kind: str, count: int) -> dict[str, Any]:
        performance = {"kind": "splitwise", "path": path, "model": MODEL, "hardware": HARDWARE[kind]}
        return {
            "name": role,
            "role": role,
            "count": count,
            "devices": DEVICES,
            "kv_tokens": KV_TOKENS,
            "performance": performance | {"is_corrected": assumed.is_corrected},
        }

    if design.token is None:
        pools = [pool("mixed", *design.prompt)]
    else:
        pools = [pool("prefill", *design.prompt), pool("decode", *design.token)]
        pools[1]["link_bytes_per_s"] = 1e16
    transfer = {"mode": "pull", "pull_share": 1.0} if assumed.has_turns else {"mode": "push"}
    return {
        "cluster": {"model": MODEL, "hop_s": 0.0, "link_bytes_per_s": LINK_BYTES_S},
        "transfer": {"layerwise_min_tokens": 1_000_000, **transfer},
        "instance": {
            "block_size": 16,
            "chunk_tokens": 2048,
            "prefill_batching": "saturation",
            "mixed_policy": "splitwise",
            "max_decode_batch": 512,
            "max_waiting_requests": 1_000_000,
        },
        "scheduler": NOBODY_IS_TURNED_AWAY | {"prefill_policy": "token_jsq"},
        "roles": {"policy": "fixed" if design.token is None else assumed.roles},
        "pool": pools,
    }


@dataclass(frozen=True, slots=True)
class Slowdowns:
    """``of``: by latency, its percentiles over those of the requests alone on a DGX-A100."""

    of: dict[str, tuple[float, ...]]

    @property
    def broken(self) -> tuple[str, ...]:
        """Which of the nine objectives, the worst first."""
        ratios = {
            f"{name} P{rank}": self.of[name][place] / bounds[place]
            for name, bounds in SLOWDOWNS.items()
            for place, rank in enumerate(PERCENTILES)
        }
        return tuple(sorted((each for each in ratios if ratios[each] > 1), key=lambda each: -ratios[each]))

    def text(self, name: str) -> str:
        return " / ".join(f"{each:.2f}" for each in self.of[name])


def slowdowns_of(
    design: Design, requests: Sequence[Offered], files: DataFiles, assumed: Assumed
) -> Slowdowns:
    """Over what each request takes alone on a DGX-A100 by the same performance model, its prompt whole."""
    records = run_cluster(tree_of(design, files, assumed), requests).records
    profile = read_splitwise(files.require(PERF_MODEL), MODEL, HARDWARE["a100"], DEVICES)
    alone = CorrectedSplitwiseModel(profile) if assumed.is_corrected else SplitwiseModel(profile)
    found = slowdowns.slowdowns_of(records, alone, None)
    named = {"TTFT": found.ttft, "TBT": found.tbt, "E2E": found.end_to_end}
    return Slowdowns({name: tuple(np.percentile(each, PERCENTILES).tolist()) for name, each in named.items()})
