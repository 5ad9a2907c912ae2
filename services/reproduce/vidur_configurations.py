"""What Vidur, section 7.3 searches: models under three workloads, on up to four nodes of four GPUs; and how
the planner searches it here, over measured kernels of NVIDIA's and the links of Vidur's own nodes."""

import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import msgspec

from common.devices import DEVICES
from common.latency import ServiceObjectives
from common.shapes import SHAPES
from services.bench.traces import TraceRequest
from services.planner.bounds import Bound
from services.planner.budget import Budget
from services.planner.candidates import InstanceKind, SearchSpace, kinds_of
from services.planner.checkpoint import Checkpoint
from services.planner.demand import Demand
from services.planner.driver import Found, drive, simulating
from services.planner.preparing import Prepared, bounds_of
from services.planner.probes import Search
from services.planner.samples import Sample
from services.planner.simulating import Conditions
from services.planner.vidur_search import VidurBest, VidurPoint, search_best, search_capacities
from services.planner.workload import workload_of
from services.reproduce.data import DataFiles, Lengths, PublishedLength, PublishedLengths
from services.reproduce.running import NOBODY_IS_TURNED_AWAY

SHORT, LONG = 0.5, 1.0
"""Lengths of samples (``services.planner.samples``)."""
WHOLE_SPACE = 0.1
"""Of the usual size, under which few configurations are looked at."""
OBJECTIVES = ServiceObjectives(ttft_s=2.0, tbt_s=0.2)
GOAL = 0.9
"""Of requests that keep TTFT's objective, a 90th percentile: a run in which fewer can ends there."""
PRICES = {"a100-sxm": 3.72, "h100-sxm": 6.98}
"""Dollars an hour, of Vidur's published script for its Pareto curves (the paper prints none)."""
KERNELS = {"a100-sxm": "aiconfigurator/a100_sxm", "h100-sxm": "aiconfigurator/h100_sxm"}
CATALOGUE = {name: replace(DEVICES[name], price_usd_h=price) for name, price in PRICES.items()}
NODES = {"a100-sxm": "a100_pairwise_nvlink", "h100-sxm": "h100_pairwise_nvlink"}
LINKS = {
    device: {key: f"vidur/profiling/network/{node}/{key}.csv.gz" for key in ("all_reduce", "send_recv")}
    for device, node in NODES.items()
}
LONGEST = 4096
MODELS = ("llama2-7b", "internlm-20b", "llama2-70b", "qwen-72b")
SETTINGS: Mapping[str, Any] = {
    "instance": {
        "block_size": 16,
        "mixed_max_wait_s": 86_400.0,
        "max_waiting_requests": 1_000_000,
        # Of one instance nobody asks where there is room.
        "report_interval_s": 1.0,
        "report_gap_s": 1.0,
    },
    "scheduler": dict(NOBODY_IS_TURNED_AWAY),
}
POLICIES = {"prefill_first": "vLLM", "orca": "Orca+"}


@dataclass(frozen=True, slots=True)
class Workload:
    """Of Table 1."""

    name: str
    file: str
    lengths: PublishedLengths


def _published(prompt: tuple[float, float], output: tuple[float, float]) -> PublishedLengths:
    return PublishedLengths("Table 1", PublishedLength(*prompt), PublishedLength(*output), LONGEST)


WORKLOADS = (
    Workload(
        "Chat-1M",
        "vidur/processed_traces/lmsys_chat_1m.csv.gz",
        _published((686, 417), (197, 139)),
    ),
    Workload(
        "Arxiv-4K",
        "vidur/processed_traces/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv.gz",
        _published((2588, 2400), (291, 167)),
    ),
    Workload(
        "BWB-4K",
        "vidur/processed_traces/bwb_4k.csv.gz",
        _published((1067, 1037), (1612, 1601)),
    ),
)


def space_of(device: str, size: float) -> SearchSpace:
    """Section 7.3's; part of it where the size is small."""
    if size < WHOLE_SPACE:
        return SearchSpace(
            devices=(CATALOGUE[device],),
            tensors=(4,),
            pipelines=(1,),
            batches=(64, 256),
            policies=(("chunked", 512),),
        )
    return SearchSpace(
        devices=(CATALOGUE[device],),
        tensors=(1, 2, 4),
        pipelines=(1, 2, 4),
        node_devices=4,
        nodes=4,
        batches=(32, 64, 128, 256, 512),
    )


@dataclass(frozen=True, slots=True)
class Searched:
    """The kinds of one device for one model under one workload. ``bounds``: of all of them."""

    prepared: Prepared
    bounds: Mapping[InstanceKind, Bound]
    best: VidurBest

    @property
    def sample(self) -> Sample:
        return Sample(len(self.prepared.conditions.rows), LONG)

    def name_of(self, kind: InstanceKind) -> str:
        """In the paper's words, with the smallest batch from which on a larger one changes nothing."""
        alike = [
            each.max_decode_batch
            for each, bound in self.bounds.items()
            if bound == self.bounds[kind] and _unbatched(each) == _unbatched(kind)
        ]
        stages = f" PP{kind.pipeline}" if kind.pipeline > 1 else ""
        policy = POLICIES.get(kind.mixed_policy, f"Sarathi-{kind.chunk_tokens}")
        batch = f"batch {min(alike)}{'' if len(alike) == 1 else ' or more'}"
        return f"{device_name(kind.device)}, TP{kind.tensor}{stages}, {policy}, {batch}"

    def measure(self, kind: InstanceKind) -> VidurPoint | None:
        """At the highest rate that keeps the objectives, be it the best or not; None where none does."""
        asked = search_capacities((kind,), self.bounds, CATALOGUE, self.sample, OBJECTIVES)
        found = driven(asked, self.prepared.conditions)
        return found[0] if found else None


def _unbatched(kind: InstanceKind) -> InstanceKind:
    return msgspec.structs.replace(kind, max_decode_batch=0)


def device_name(device: str) -> str:
    return device.removesuffix("-sxm").upper()


Searches = dict[tuple[str, str, str], Searched]
"""By model, workload and device."""


def search_all(lengths: Mapping[str, Lengths], files: DataFiles, size: float) -> Searches:
    """``lengths``: by workload. A process a core, each for a model on a device, whose tables it reads once;
    what is small is done in this one."""
    pairs = list(product(MODELS, KERNELS))
    one = partial(search_pair, lengths=lengths, files=files, size=size)
    if size < WHOLE_SPACE:
        found = [one(pair) for pair in pairs]
    else:
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            found = list(pool.map(one, pairs))
    return {key: each for part in found for key, each in part.items()}


def search_pair(
    pair: tuple[str, str], lengths: Mapping[str, Lengths], files: DataFiles, size: float
) -> Searches:
    """Of a model on a device."""
    model, device = pair
    return {
        (model, workload, device): search(prepared_of(model, device, each, files, size))
        for workload, each in lengths.items()
    }


def search(prepared: Prepared) -> Searched:
    bounds = bounds_of(prepared, has_objectives=False)
    short, long = (Sample(len(prepared.conditions.rows), each) for each in (SHORT, LONG))
    asked = search_best(prepared.kinds.mixed, bounds, CATALOGUE, OBJECTIVES, short, long)
    return Searched(prepared, bounds, driven(asked, prepared.conditions))


def prepared_of(model: str, device: str, lengths: Lengths, files: DataFiles, size: float) -> Prepared:
    rows = tuple(TraceRequest(None, each.prompt_tokens, each.output_tokens) for each in lengths.pairs)
    performance = {key: str(files.require(name)) for key, name in LINKS[device].items()}
    performance |= {"kind": "aiconfigurator", "directory": str(files.require(KERNELS[device]))}
    conditions = Conditions(
        shape=SHAPES[model],
        rows=rows,
        objectives=OBJECTIVES,
        settings=SETTINGS,
        catalogue=CATALOGUE,
        performance={device: performance},
        goal=GOAL,
    )
    demand = Demand(
        objective="cost",
        rate_per_s=0.0,
        budget=Budget(),
        catalogue=CATALOGUE,
        objectives=OBJECTIVES,
        goal=GOAL,
    )
    space = space_of(device, size)
    kinds = kinds_of(space, conditions.shape, conditions.element_bytes, Budget())
    return Prepared(demand, conditions, workload_of(rows), kinds, (CATALOGUE[device],), space.node_devices)


def driven(asked: Search[Found], conditions: Conditions) -> Found:
    """In this process: others search for other models."""
    with simulating(conditions, 1) as simulator, Checkpoint(None) as kept:
        return drive(asked, simulator, kept, b"")
