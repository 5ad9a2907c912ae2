"""DistServe's second algorithm against simdistserve's search for a placement: OPT-13B on a node of four A100,
its own requests, constants and assumptions, TTFT 200 ms and TPOT 100 ms each at its 90th percentile."""

import tomllib
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from common.devices import DEVICES
from common.latency import ServiceObjectives
from common.messages import Role
from services.bench.traces import TraceRequest, read_trace
from services.planner.bounds import Bound, Speed, capacity_bound
from services.planner.candidates import InstanceKind
from services.planner.checkpoint import Checkpoint
from services.planner.distserve_search import PairPlacement, place_with_low_affinity
from services.planner.driver import Here, drive
from services.planner.goodput import FINE, served_by
from services.planner.probes import Point, Probe
from services.planner.samples import Sample
from services.planner.simulating import point_of
from services.planner.workload import workload_of
from services.simulator.config import Simulated, simulated_from_tree
from services.simulator.metrics import measure
from services.simulator.run import Load, Offered, simulate

BENCH = Path(__file__).resolve().parents[3] / "bench"
OBJECTIVES = ServiceObjectives(ttft_s=0.2, tpot_s=0.1)
GOAL = 0.9
POINTS = 2.0
NODE_GPUS = 4
REQUESTS = 300
"""Of each of its runs. A longer one begins with the same."""
STEP = 5 / 32
"""Requests a second a GPU: it halves what lies between 0 and 5 until no more than 0.25 is left."""

Pair = tuple[InstanceKind, InstanceKind]
"""One for prompts, one that decodes."""


def kind_of(role: Role, tensor: int, pipeline: int) -> InstanceKind:
    return InstanceKind(
        role=role,
        device="a100",
        tensor=tensor,
        pipeline=pipeline,
        chunk_tokens=66_144,
        prefill_batching="saturation",
        max_decode_batch=10_000,
    )


SIZES = ((1, 1), (1, 2), (2, 1))
"""Tensor and pipeline parallelism: with more an instance leaves the other no GPU of the node, and neither
heads nor layers have a third."""
PREFILL, DECODE = ([kind_of(role, *size) for size in SIZES] for role in ("prefill", "decode"))
PAIRS = [pair for pair in product(PREFILL, DECODE) if sum(kind.devices for kind in pair) <= NODE_GPUS]
BEST: Pair = (kind_of("prefill", 2, 1), kind_of("decode", 1, 1))
BEST_PER_GPU = 2.1875
"""Of workload B, under either affinity."""
LEAST: Pair = (kind_of("prefill", 1, 1), kind_of("decode", 1, 1))
CAP_PER_GPU = 4.84375
"""The last rate that it tries, of workload A: of those that serve it who has the fewest GPUs is named."""
ITS_OF_1000 = {"B": 28.0, "A": 37.9}
"""Per cent of 1,000 requests within both, at those rates."""


def mesh_of(shared: Path, kinds: Sequence[InstanceKind]) -> Simulated:
    """KV moves in no time and no memory is counted, as there."""
    tree = tomllib.loads((BENCH / "distserve_p1d1.toml").read_text())
    for table, kind in zip(tree["pool"], kinds, strict=True):
        table |= {"devices": kind.tensor, "pipeline": kind.pipeline}
        table["performance"]["path"] = str(shared / "data/distserve/profiler-a100-80g.distserve.json")
    return simulated_from_tree(tree)


@cache
def rows_of(shared: Path, workload: str) -> tuple[TraceRequest, ...]:
    """Of an output it computes as many decode steps: the token that the prompt itself draws comes on top."""
    rows = read_trace(shared / f"data/distserve/workload_{workload}_n1000_seed0.csv.gz").requests
    return tuple(TraceRequest(row.arrival_s, row.prompt_tokens, row.output_tokens + 1) for row in rows)


def point_at(
    shared: Path, workload: str, kinds: Sequence[InstanceKind], rate_per_s: float, requests: int = REQUESTS
) -> Point:
    offered = [
        Offered((row.arrival_s or 0.0) / rate_per_s, row.prompt_tokens, row.output_tokens)
        for row in rows_of(shared, workload)[:requests]
    ]
    cluster = simulate(mesh_of(shared, kinds), Load(offered))
    return point_of(cluster, measure(cluster, OBJECTIVES), len(kinds))


def is_served_there(point: Point) -> bool:
    """Each percentile by itself, whatever piles up."""
    return point.ttft_s[1] < 0.2 and point.tpot_s[1] < 0.1


def gpus(pair: Pair) -> int:
    return sum(kind.devices for kind in pair)


def bounds_in(shared: Path) -> dict[InstanceKind, Bound]:
    workload = workload_of(rows_of(shared, "B")[:REQUESTS])
    bounds = {}
    for pair in zip(PREFILL, DECODE, strict=True):
        for kind, pool in zip(pair, mesh_of(shared, pair).pools, strict=True):
            speed = Speed(pool.performance, pool.total_blocks * pool.settings.instance.block_size)
            bounds[kind] = capacity_bound(kind, speed, workload, OBJECTIVES, GOAL)
    return bounds


@pytest.fixture(scope="module")
def placed(shared_directory: Path) -> list[PairPlacement]:
    """By the algorithm as ``lamella plan`` has it, over simdistserve's requests and by what that calls
    served."""

    def run(probe: Probe) -> Point:
        assert probe.requests == REQUESTS
        return point_at(shared_directory, "B", [pool.kind for pool in probe.pools], probe.rate_per_s)

    search = place_with_low_affinity(
        PREFILL,
        DECODE,
        bounds_in(shared_directory),
        is_served_there,
        Sample(REQUESTS),
        1.0,
        DEVICES,
        NODE_GPUS,
    )
    with Checkpoint(None) as kept:
        return drive(search, Here(run), kept, b"")


def test_the_placement_and_its_rate_are_those_that_its_search_finds(
    shared_directory: Path, placed: list[PairPlacement]
) -> None:
    pairs = [tuple(pool.kind for pool in each.deployment.pools) for each in placed]
    assert len(PAIRS) == 9
    assert set(pairs) == set(PAIRS)
    assert pairs[0] == BEST
    # The highest rate that is served lies within a step of its search, ours within a share.
    assert BEST_PER_GPU / FINE < placed[0].per_device < BEST_PER_GPU + STEP
    point = point_at(shared_directory, "B", BEST, BEST_PER_GPU * gpus(BEST))
    assert is_served_there(point)
    assert 100 * point.attainment == pytest.approx(90.0, abs=POINTS)


def test_its_cap_binds_for_short_prompts(shared_directory: Path) -> None:
    """Two GPUs are the fewest, and serve the last rate that it tries."""
    assert min(PAIRS, key=gpus) == LEAST
    point = point_at(shared_directory, "A", LEAST, CAP_PER_GPU * gpus(LEAST))
    assert is_served_there(point)
    assert 100 * point.attainment == pytest.approx(99.0, abs=POINTS)


def test_its_rates_are_of_a_start(shared_directory: Path) -> None:
    """Of longer runs fewer are in time, as few as there, and the planner takes the backlog for none that is
    served."""
    for workload, pair, rate_per_gpu in (("B", BEST, BEST_PER_GPU), ("A", LEAST, CAP_PER_GPU)):
        point = point_at(shared_directory, workload, pair, rate_per_gpu * gpus(pair), requests=1000)
        assert 100 * point.attainment == pytest.approx(ITS_OF_1000[workload], abs=0.2)
        assert point.left_share > 0
        assert not served_by(GOAL)(point)
