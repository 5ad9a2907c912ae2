"""A comparison's runs again in virtual time: the same requests at the same times through a simulated mesh of
the same settings, to hold the simulator to what a live mesh did.

What a mesh costs beside the model is taken from its own runs of the ``calibration`` workload, which should be
so thin that requests are alone: what every pass takes more than its profile says, and what a message takes.
Where there are ``costs``, all run on one host, and what is taken of its cores beside passes is from the
processor time of these workloads. Nothing else is fitted: no other workload's figures are looked at.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from common.config import Config
from common.config_file import config_from_tree
from common.errors import ConfigError
from common.kv.layout import KVLayout
from common.latency import Distribution
from common.model.device import accelerator_name
from common.model.precision import precision_of
from common.profile import profile_path
from common.shapes import ModelShape
from common.spec import ELEMENT_BYTES
from services.analysis.model_shape import read_shape
from services.bench.plan import FOREGROUND, RequestMaker, make_arrivals_s, make_foreground, plan_foreground
from services.bench.prompts import BodyTemplate, TokenIdPrompts
from services.compare.comparison import (
    Candidate,
    Comparison,
    InstanceRole,
    Offer,
    bench_config,
    settings_of,
)
from services.compare.host_costs import Counted, host_of
from services.compare.records import RunRecord
from services.model_directory import model_directory
from services.simulator.cluster import Cluster
from services.simulator.config import Simulated, simulated_from_tree
from services.simulator.host import HostConfig
from services.simulator.metrics import Metrics, measure
from services.simulator.run import Load, Offered, simulate

NOWHERE, UNREAD = "http://127.0.0.1", Path("lengths.jsonl")
MEASURES = ("ttft", "tpot", "end_to_end")
EMULATED = ModelShape("emulated", 1, 1, 1, 1, 1, 1, 1, 1, 0)
"""An emulated engine's: its KV is a few bytes a token."""
PROBE_S = 1e-3
"""How much longer messages are made, to see how many of them come before a first token."""

CORRECTIONS = 4
MOST_WAIT_S, HALVINGS = 0.04, 9
"""For a core, while all are busy: some slices of the system's scheduler."""


class Overhead(NamedTuple):
    """Of a mesh, seconds. ``pass_s``: of every pass beside the model's; ``hop_s``: of a message. ``host``: on
    which all run, if it is known what they take of it."""

    pass_s: float = 0.0
    hop_s: float = 0.0
    host: HostConfig | None = None

    def with_host(self, **costs: float) -> "Overhead":
        """With some of the host's costs replaced, where there is one."""
        return self if self.host is None else self._replace(host=msgspec.structs.replace(self.host, **costs))


class Tried(NamedTuple):
    """A run that an overhead is held to."""

    candidate: Candidate
    offer: Offer
    record: RunRecord
    overhead: Overhead


@dataclass(frozen=True, slots=True)
class Pair:
    """One run, live and simulated."""

    record: RunRecord
    metrics: Metrics

    def errors(self, percentile: str) -> dict[str, float]:
        """Relative, of each of MEASURES at one of ``Distribution``'s percentiles: over 0 where the simulated
        one is longer. Without those that nothing was measured of."""
        found = {}
        for measure_name in MEASURES:
            live: Distribution | None = getattr(self.record.load, measure_name)
            virtual: Distribution | None = getattr(self.metrics, measure_name)
            if live is not None and virtual is not None and getattr(live, percentile) > 0:
                found[measure_name] = getattr(virtual, percentile) / getattr(live, percentile) - 1.0
        return found

    @property
    def attainment_points(self) -> float | None:
        """How many points more of the simulated requests met their objectives."""
        live, virtual = self.record.load.attainment, self.metrics.attainment
        return None if live is None or virtual is None else 100.0 * (virtual.share - live.share)


@dataclass(frozen=True, slots=True)
class Simulation:
    """Of a comparison's meshes. How long the model's passes take is from the profile that the instances took,
    too (``lamella profile``); how long emulated ones, from their settings."""

    comparison: Comparison

    def pairs(self, records: Sequence[RunRecord]) -> tuple[dict[str, Overhead], list[Pair]]:
        """Each configuration's overhead, and every run beside its simulation. Raises ConfigError where a
        configuration was not run at the calibration's workload."""
        offers = {offer.name: offer for offer in self.comparison.workload}
        candidates = {each.name: each for each in self.comparison.configuration}
        overheads: dict[str, Overhead] = {}
        pairs = []
        for record in records:
            candidate = candidates[record.configuration]
            if candidate.name not in overheads:
                overheads[candidate.name] = self.calibrate(candidate, offers, records)
            offer = offers[record.workload]
            metrics = self.run(candidate, offer, record.round_number, overheads[candidate.name])
            pairs.append(Pair(record, metrics))
        return overheads, pairs

    def calibrate(
        self, candidate: Candidate, offers: Mapping[str, Offer], records: Sequence[RunRecord]
    ) -> Overhead:
        """By medians over the calibration's rounds. A time that the profile's is over counts as nothing."""
        name = self.comparison.calibration
        runs = [each for each in records if (each.workload, each.configuration) == (name, candidate.name)]
        if name is None or not runs:
            rule = "must name a workload that every configuration was run at"
            raise ConfigError("calibration", name, rule)
        host = self._host_of(candidate, offers, records)
        found = [self._overhead_of(candidate, offers[name], record, host) for record in runs]
        overhead = Overhead(
            statistics.median(each.pass_s for each in found),
            statistics.median(each.hop_s for each in found),
            host,
        )
        return self._with_waits(candidate, offers, records, overhead)

    def _with_waits(
        self,
        candidate: Candidate,
        offers: Mapping[str, Offer],
        records: Sequence[RunRecord],
        overhead: Overhead,
    ) -> Overhead:
        """How much longer layers over attention workers, and messages, take while more cores are wanted than
        there are: so that the crowded run's median time per token, then to the first token, comes out."""
        name = (self.comparison.crowded, candidate.name)
        runs = [each for each in records if (each.workload, each.configuration) == name]
        if overhead.host is None or not runs:
            return overhead
        kinds = {"exchange_s": "tpot"} if candidate.instances.get("attention", 0) else {}
        for key, measure_name in {**kinds, "wake_s": "ttft"}.items():
            waits_s = []
            for record in runs:
                tried = Tried(candidate, offers[record.workload], record, overhead)
                off = partial(self._off, tried, key, measure_name)
                waits_s.append(_root(off, MOST_WAIT_S))
            overhead = overhead.with_host(**{key: statistics.median(waits_s)})
        return overhead

    def _off(self, tried: "Tried", key: str, measure_name: str, wait_s: float) -> float:
        """By how much the simulated median is over the live one, with that wait."""
        candidate, offer, record, overhead = tried
        metrics = self.run(candidate, offer, record.round_number, overhead.with_host(**{key: wait_s}))
        return _median(getattr(metrics, measure_name)) - _median(getattr(record.load, measure_name))

    def _host_of(
        self, candidate: Candidate, offers: Mapping[str, Offer], records: Sequence[RunRecord]
    ) -> HostConfig | None:
        """How much was computed is simulated: what it cost hardly changes that."""
        counted = []
        for each in records:
            if each.workload in self.comparison.costs and each.configuration == candidate.name:
                cluster = self._simulate(candidate, offers[each.workload], each.round_number, Overhead())
                counted.append((each, _counted(cluster)))
        return host_of(counted)

    def _overhead_of(
        self, candidate: Candidate, offer: Offer, record: RunRecord, host: HostConfig | None
    ) -> Overhead:
        """A time to first token is made of messages and passes, a time per token of steps and, in its first
        gap, of messages: each is corrected by what it is off, a few times."""
        number = record.round_number

        @cache
        def off(tried: Overhead) -> tuple[float, float]:
            metrics = self.run(candidate, offer, number, tried)
            load = record.load
            return _median(load.ttft) - _median(metrics.ttft), _median(load.tpot) - _median(metrics.tpot)

        found = Overhead(host=host)
        hops = (off(found)[0] - off(Overhead(hop_s=PROBE_S, host=host))[0]) / PROBE_S
        for _ in range(CORRECTIONS):
            pass_s = max(0.0, found.pass_s + off(found)[1])
            hop_s = max(0.0, found.hop_s + off(Overhead(pass_s, found.hop_s, host))[0] / hops)
            found = Overhead(pass_s, hop_s, host)
        return found

    def run(self, candidate: Candidate, offer: Offer, round_number: int, overhead: Overhead) -> Metrics:
        config = bench_config(self.comparison, offer, round_number, NOWHERE)
        return measure(self._simulate(candidate, offer, round_number, overhead), config.objectives)

    def _simulate(self, candidate: Candidate, offer: Offer, round_number: int, overhead: Overhead) -> Cluster:
        config = bench_config(self.comparison, candidate.offered(offer), round_number, NOWHERE)
        plan = plan_foreground(config)
        maker = RequestMaker(FOREGROUND, TokenIdPrompts(config.seed), BodyTemplate("completions", ""), None)
        requests = make_foreground(config, plan, maker)
        offered = [
            Offered(arrival_s, request.prompt_tokens, request.output_tokens)
            for arrival_s, request in zip(make_arrivals_s(config, plan), requests, strict=False)
        ]
        return simulate(self.simulated(candidate, overhead), Load(offered))

    def simulated(self, candidate: Candidate, overhead: Overhead) -> Simulated:
        """The candidate's mesh. Raises ConfigError for what cannot be simulated."""
        settings = settings_of(self.comparison, candidate, UNREAD)
        workers = candidate.instances.get("attention", 0)
        if workers:
            instance = {**settings.get("instance", {}), "attention_workers": workers}
            settings = {**settings, "instance": instance}
        config = config_from_tree(settings)
        shape, element_bytes = _model_of(config)
        cluster = {
            "shape": dataclasses.asdict(shape),
            "element_bytes": element_bytes,
            "hop_s": overhead.hop_s,
        }
        pools = [
            _pool(role, count, config, shape, element_bytes, overhead)
            for role, count in candidate.instances.items()
            if count
        ]
        host = {} if overhead.host is None else {"host": msgspec.structs.asdict(overhead.host)}
        return simulated_from_tree({**settings, "cluster": cluster, "pool": pools, **host})


def _root(off: Callable[[float], float], most: float) -> float:
    """Where ``off``, which grows, is nothing: between 0 and ``most``."""
    if off(0.0) >= 0:
        return 0.0
    least = 0.0
    for _ in range(HALVINGS):
        middle = (least + most) / 2
        if off(middle) < 0:
            least = middle
        else:
            most = middle
    return (least + most) / 2


def _counted(cluster: Cluster) -> Counted:
    engines = [each.engine for each in cluster.lives]
    return Counted(
        passes=sum(each.work.passes for each in engines),
        tokens=sum(cluster.records.drawn_tokens),
        prompts=len(cluster.records),
        steps_s=sum(each.engine.busy.decode_s for each in cluster.lives if each.pools is not None),
    )


def _performance(config: Config, overhead: Overhead) -> dict[str, Any]:
    if config.instance.engine == "model":
        model, directory = config.model, model_directory(config.model)
        path = profile_path(model, directory, precision_of(model).compute, accelerator_name(model.device))
        if not path.exists():
            rule = "was not profiled with these settings on this machine: `lamella profile --config FILE`"
            raise ConfigError("model.directory", str(directory), rule)
        return {"kind": "profile", "path": str(path), "overhead_s": overhead.pass_s}
    emulation = config.emulation
    return {
        "kind": "linear",
        "prefill_s": emulation.prefill_base_s + overhead.pass_s,
        "per_prompt_token_s": emulation.prefill_per_token_s,
        "step_s": emulation.decode_base_s + overhead.pass_s,
        "per_sequence_s": emulation.decode_per_sequence_s,
        "per_context_token_s": emulation.decode_per_context_token_s,
    }


def _pool(
    role: InstanceRole, count: int, config: Config, shape: ModelShape, element_bytes: int, overhead: Overhead
) -> dict[str, Any]:
    """Attention workers hold decode instances' KV, whose own passes are then the rest of the model's."""
    performance = _performance(config, overhead)
    pool: dict[str, Any] = {"name": role, "role": role, "count": count, "performance": performance}
    if config.instance.attention_workers and role in ("decode", "attention"):
        pool["performance"] = performance if performance["kind"] == "linear" else {**performance, "by": "law"}
        if role == "decode":
            return pool
        return pool | {"kv_tokens": _tokens_in(config.attention.kv_bytes, config, shape, element_bytes)}
    if config.instance.engine != "model":
        return pool | {"kv_tokens": config.emulation.total_blocks * config.instance.block_size}
    return pool | {"kv_tokens": _tokens_in(config.instance.kv_bytes, config, shape, element_bytes)}


def _tokens_in(kv_bytes: int, config: Config, shape: ModelShape, element_bytes: int) -> int:
    """Of whole blocks."""
    block_size = config.instance.block_size
    layout = KVLayout(shape.layers, shape.kv_heads, shape.head_dim, block_size, element_bytes)
    return kv_bytes // layout.block_bytes * block_size


def _model_of(config: Config) -> tuple[ModelShape, int]:
    """And the bytes of an element of its KV."""
    if config.instance.engine != "model":
        return EMULATED, 2
    shape = read_shape(str(model_directory(config.model)))
    return shape, ELEMENT_BYTES[precision_of(config.model).compute]


def _median(distribution: Distribution | None) -> float:
    assert distribution is not None, "a calibration that served nothing says nothing"
    return distribution.p50_s


def errors_table(pairs: Sequence[Pair]) -> str:
    """A row a run: what was live, and by how much the simulated one is off."""
    lines = [
        "| workload | configuration | requests/s | TTFT p50, p95, s | TPOT p50, p95, ms"
        " | end to end p50, p95, s | within objectives |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for pair in pairs:
        load = pair.record.load
        columns = [pair.record.workload, pair.record.configuration, f"{load.requests_per_s:.2f}"]
        columns += [
            _cell(pair, name, scale, digits)
            for name, scale, digits in (("ttft", 1.0, 2), ("tpot", 1e3, 1), ("end_to_end", 1.0, 2))
        ]
        points, attainment = pair.attainment_points, load.attainment
        share = "–" if attainment is None else f"{100 * attainment.share:.1f} %"
        columns.append(share if points is None else f"{share} ({points:+.1f})")
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def _cell(pair: Pair, name: str, scale: float, digits: int) -> str:
    live: Distribution | None = getattr(pair.record.load, name)
    if live is None:
        return "–"
    shown = (f"{scale * value:.{digits}f}" for value in (live.p50_s, live.p95_s))
    off = (pair.errors(percentile).get(name) for percentile in ("p50_s", "p95_s"))
    return (
        f"{', '.join(shown)} ({', '.join('–' if each is None else f'{100 * each:+.1f} %' for each in off)})"
    )


def describe_overheads(overheads: Mapping[str, Overhead]) -> str:
    lines = []
    for name, each in overheads.items():
        own = f"{1e3 * each.pass_s:.2f} ms a pass beside the profile's, {1e3 * each.hop_s:.2f} ms a message"
        lines.append(f"{name}: {own}{'' if each.host is None else _describe_host(each.host)}")
    return "\n".join(lines)


def _describe_host(host: HostConfig) -> str:
    return (
        f"; of {host.cores} cores {host.idle_cores:.3f} idle, {1e3 * host.pass_s:.2f} ms a pass,"
        f" {1e3 * host.token_s:.2f} a token, {1e3 * host.prompt_s:.2f} a prompt,"
        f" {host.worker_cores:.2f} cores a worker in steps; while more are wanted"
        f" {1e3 * host.wake_s:.2f} ms a message and {1e3 * host.exchange_s:.2f} a layer more"
    )
