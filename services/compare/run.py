"""Runs a comparison: every mesh is up all the time, and they take turns at the same requests.

They alternate within a workload and a round, so what else the machine does falls on all of them alike. A mesh
that waits takes 1 % of a core an instance, and as much again. What has been run is written at once: a
comparison that was ended goes on where it was.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import msgspec

from common.config import MeshConfig
from common.signals import run_until_signal
from services.bench.client import Outcome
from services.bench.plan import FOREGROUND, RequestMaker, make_foreground, plan_foreground
from services.bench.prompts import BodyTemplate, TokenIdPrompts
from services.bench.run import run_bench
from services.compare.between import check_profiled, passes_between
from services.compare.capacity import Rates
from services.compare.comparison import Candidate, Comparison, Offer, bench_config, config_of, plan_of
from services.compare.engine_times import EngineProcess, counted_of, times_between
from services.compare.records import RUNS_FILE, RunKey, RunRecord, ServedRequest, keep, read_kept
from services.compare.usage import computing_s, processor_s, resource_time_of, watch_use
from services.launcher import local
from services.launcher.control import MeshStatus
from services.length_predictor.oracle import KnownLength, digest_of
from services.prepare import prepare_model
from services.profiling.probe import Probe

RATES_FILE, LENGTHS_FILE = "rates.jsonl", "lengths.jsonl"
INSTANCE_ROLES = ("prefill", "decode", "mixed")
WARMUP_ROUND = 10_000
"""Its seed is no measured round's."""
WARMUP_REQUESTS, WARMUP_RATE_PER_S = 10, 4.0
"""Of each kind of lengths."""
ANY_RATE_PER_S = 1.0
"""Prompts do not hang on when they come."""
IDLE_LOOK_S = 5.0
"""For so long nothing is asked before a calibration, to see what meshes take then."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """One configuration's, as it runs."""

    candidate: Candidate
    url: str
    probe: Probe
    settings: MeshConfig
    instance_pids: tuple[int, ...]
    engines: tuple[EngineProcess, ...]
    service_pids: tuple[int, ...]


def run_comparison(
    comparison: Comparison,
    chosen: Comparison,
    output: Path,
    limit_s: float | None,
    tell: Callable[[str], None],
) -> list[RunRecord]:
    """Runs of ``comparison`` what ``chosen`` names and ``output`` does not hold yet; all that it then holds.

    No turn begins that would probably end after ``limit_s``, and no mesh where no turn would. ConfigError,
    LauncherError, BenchError and NeighbourLost end it; every mesh has ended when it returns.
    """
    ends_s = float("inf") if limit_s is None else time.monotonic() + limit_s
    records = read_kept(output / RUNS_FILE, RunRecord, comparison)
    rates = Rates(comparison, output / RATES_FILE, tell)
    done = {record.key for record in records}
    if all(key in done for key in _keys(chosen)):
        return records
    if time.monotonic() + _least_s(chosen, records, rates) > ends_s:
        tell(f"no mesh is started: nothing that is left would end within --limit-s {limit_s:g}")
        return records
    _write_lengths(chosen, output / LENGTHS_FILE)
    with local.ended_by_any_signal(), ExitStack() as stack:
        meshes = [
            stack.enter_context(_running_mesh(comparison, candidate, output, tell))
            for candidate in chosen.configuration
        ]
        for mesh in meshes:
            run_until_signal(_warm_up(chosen, mesh))
        takers = {
            mesh.candidate.name: stack.enter_context(passes_between(comparison, mesh.candidate, output))
            for mesh in meshes
        }
        part_s = 0.0
        for round_number, offer in product(range(chosen.rounds), chosen.workload):
            # Each round begins with another one: whoever comes after whom is nobody's advantage.
            turns = deque(meshes)
            turns.rotate(-round_number)
            left = [mesh for mesh in turns if (round_number, offer.name, mesh.candidate.name) not in done]
            expected_s = sum(
                part_s + _expected_s(records, offer, rates.known_rate(mesh.candidate, offer)) for mesh in left
            )
            if time.monotonic() + expected_s > ends_s:
                tell(f"round {round_number}, {offer.name}: left out, it would not end in time")
                continue
            for mesh in left:
                rate_per_s = rates.rate_per_s(mesh.candidate, offer, records)
                began_s = time.monotonic()
                takers[mesh.candidate.name]((round_number, offer.name, mesh.candidate.name))
                part_s = time.monotonic() - began_s
                measuring = _measure(comparison, mesh, meshes, offer, rate_per_s, round_number)
                record = run_until_signal(measuring)
                keep(output / RUNS_FILE, record)
                records.append(record)
                tell(_describe(record))
        for take in takers.values():
            take(None)
    return records


def _keys(comparison: Comparison) -> Iterator[RunKey]:
    for round_number, offer, candidate in product(
        range(comparison.rounds), comparison.workload, comparison.configuration
    ):
        yield round_number, offer.name, candidate.name


def _least_s(chosen: Comparison, records: list[RunRecord], rates: Rates) -> float:
    """Until the first turns of those that are left end, with the warm-up's arrivals before them."""
    done = {record.key for record in records}
    turns_s = [
        sum(_expected_s(records, offer, rates.known_rate(each, offer)) for each in left)
        for round_number, offer in product(range(chosen.rounds), chosen.workload)
        if (
            left := [
                each for each in chosen.configuration if (round_number, offer.name, each.name) not in done
            ]
        )
    ]
    warmup_s = len(_kinds(chosen)) * WARMUP_REQUESTS / WARMUP_RATE_PER_S
    return len(chosen.configuration) * warmup_s + min(turns_s)


def _kinds(comparison: Comparison) -> list[Offer]:
    """The first workload of each kind of lengths."""
    found: dict[str, Offer] = {}
    for offer in comparison.workload:
        found.setdefault(offer.drawn_from, offer)
    return list(found.values())


def _expected_s(records: list[RunRecord], offer: Offer, rate_per_s: float | None) -> float:
    """Of one run: as the slowest so far, or its arrivals alone; nothing where its rate is not found yet."""
    known = [record.duration_s for record in records if record.workload == offer.name]
    return max(known, default=0.0 if rate_per_s is None else offer.requests / rate_per_s)


@contextmanager
def _running_mesh(
    comparison: Comparison, candidate: Candidate, output: Path, tell: Callable[[str], None]
) -> Iterator[Mesh]:
    """With servers and ports of its own."""
    directory = output / "meshes" / candidate.name
    config = config_of(comparison, candidate, output / LENGTHS_FILE)
    prepare_model(config, lambda stage: tell(f"{candidate.name}: {stage}"))
    check_profiled(comparison, candidate, output)
    tell(f"starting {candidate.name}")
    status = local.up_detached(directory, plan_of(candidate), config)
    assert status.url is not None, "it serves"
    try:
        pids = [(process.role in INSTANCE_ROLES, process.pid) for process in status.processes]
        yield Mesh(
            candidate=candidate,
            url=status.url,
            settings=local.mesh_config(directory).mesh,
            instance_pids=tuple(pid for is_instance, pid in pids if is_instance and pid is not None),
            engines=_engines_of(candidate, status),
            service_pids=tuple(pid for is_instance, pid in pids if not is_instance and pid is not None),
            probe=Probe(config),
        )
    finally:
        local.down(directory)


def _engines_of(candidate: Candidate, status: MeshStatus) -> tuple[EngineProcess, ...]:
    """Gaps are asked of who computes its own attention: who has workers for it rests between layers, too."""
    roles = (*INSTANCE_ROLES, "attention")
    own = ("prefill",) if candidate.instances.get("attention", 0) else INSTANCE_ROLES
    return tuple(
        EngineProcess(each.role, each.pid, each.url if each.role in own else None)
        for each in status.processes
        if each.role in roles and each.pid is not None
    )


async def _warm_up(comparison: Comparison, mesh: Mesh) -> None:
    """First requests find memory that was never touched, connections that are not there yet, and products of
    so many rows as were never computed, which take 6 ms longer on a processor that compiles them."""
    for offer in _kinds(comparison):
        few = msgspec.structs.replace(offer, requests=WARMUP_REQUESTS)
        await run_bench(bench_config(comparison, few, WARMUP_RATE_PER_S, WARMUP_ROUND, mesh.url))


async def _measure(
    comparison: Comparison,
    mesh: Mesh,
    meshes: Sequence[Mesh],
    offer: Offer,
    rate_per_s: float,
    round_number: int,
) -> RunRecord:
    config = bench_config(comparison, offer, rate_per_s, round_number, mesh.url)
    async with watch_use(mesh.settings, len(mesh.instance_pids)) as watch:
        await watch.wait_idle()
        idle_cores = await _idle_cores(meshes) if offer.name in comparison.costs else None
        counted = await asyncio.to_thread(counted_of, mesh.engines)
        started_at, began_s = datetime.now(UTC), time.monotonic()
        before = _processor_time(mesh, meshes)
        with mesh.probe.watch() as pieces:
            run = await run_bench(config)
            await watch.wait_idle()
        after = _processor_time(mesh, meshes)
        duration_s = time.monotonic() - began_s
        engines = times_between(counted, await asyncio.to_thread(counted_of, mesh.engines))
        uses = tuple(watch.recorder.uses())
    instances_s, services_s, beside_s = (late - early for early, late in zip(before, after, strict=True))
    return RunRecord(
        fingerprint=comparison.fingerprint,
        round_number=round_number,
        workload=offer.name,
        configuration=mesh.candidate.name,
        rate_per_s=rate_per_s,
        started_at=started_at.isoformat(timespec="seconds"),
        duration_s=duration_s,
        load=run.result.loads[0],
        uses=uses,
        resource_time_s=resource_time_of(uses),
        instances_cpu_s=instances_s,
        services_cpu_s=services_s,
        client_cpu_share=run.result.client_cpu_share - pieces.processor_s / duration_s,
        beside_cpu_s=beside_s - pieces.processor_s,
        idle_cores=idle_cores,
        cores=len(os.sched_getaffinity(0)),
        looks_s=tuple(pieces.taken_s),
        engines=engines,
        served=tuple(_served(run.outcomes)),
    )


def _served(outcomes: Sequence[Outcome]) -> Iterator[ServedRequest]:
    began_s = min((one.arrival_s for one in outcomes), default=0.0)
    for one in sorted(outcomes, key=lambda one: one.index):
        if one.is_served:
            latency = one.latency
            yield ServedRequest(
                one.index,
                one.arrival_s - began_s,
                one.prompt_tokens,
                one.counted_output_tokens,
                latency.ttft_s,
                latency.tpot_s,
                latency.end_to_end_s,
            )


def _processor_time(mesh: Mesh, meshes: Sequence[Mesh]) -> tuple[float, float, float]:
    """Seconds so far: of a mesh's instances and of its other processes, and of all meshes and this process
    but for threads that compute."""
    return (
        processor_s(mesh.instance_pids),
        processor_s(mesh.service_pids),
        time.process_time() + _beside_s(meshes),
    )


def _beside_s(meshes: Sequence[Mesh]) -> float:
    process_ids = [pid for mesh in meshes for pid in (*mesh.instance_pids, *mesh.service_pids)]
    return processor_s(process_ids) - computing_s(process_ids)


async def _idle_cores(meshes: Sequence[Mesh]) -> float:
    before_s, began_s = _beside_s(meshes), time.monotonic()
    await asyncio.sleep(IDLE_LOOK_S)
    return (_beside_s(meshes) - before_s) / (time.monotonic() - began_s)


def _write_lengths(comparison: Comparison, path: Path) -> None:
    """What a predictor that is always right knows: every prompt of every round, and its output's length.

    A prompt that has to be cut to the model's context is not among them.
    """
    known = []
    for round_number in (*range(comparison.rounds), WARMUP_ROUND):
        for offer in comparison.workload:
            config = bench_config(comparison, offer, ANY_RATE_PER_S, round_number, "http://127.0.0.1")
            maker = RequestMaker(
                FOREGROUND, TokenIdPrompts(config.seed), BodyTemplate("completions", ""), None
            )
            for request in make_foreground(config, plan_foreground(config), maker):
                prompt = msgspec.json.decode(request.body)["prompt"]
                known.append(KnownLength(request.output_tokens, digest_of(prompt)))
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in known))


def _describe(record: RunRecord) -> str:
    load = record.load
    text = f"round {record.round_number}, {record.workload}, {record.configuration}: "
    if load.ttft is not None and load.end_to_end is not None:
        text += f"TTFT {load.ttft.mean_s:.2f} s, JCT {load.end_to_end.mean_s:.1f} s, "
    text += f"{load.served}/{load.requests} served in {load.elapsed_s:.1f} s"
    return f"{text}, resource time {record.resource_time_s:.1f} s"
