"""A comparison's runs again in virtual time: the same requests at the same times through a simulated mesh of
the same settings, to hold the simulator to what a live mesh did.

What a mesh costs beside the model is from its own runs of the ``calibration`` workloads, which should be so
thin that requests hardly wait. What every pass takes more than its profile says is how long instances of its
role counted that models rest before the next one, by tokens that are drawn and prompts that end; where those
that decode did not count, by how much emulated passes end late, and what a message takes, it is the median of
what these runs say, in which each request is held to itself. Where there are ``costs``, all run on one host,
and what is taken of its cores beside passes is from the processor time of these workloads, in other
configurations, too; how much of that costs engines nothing, as they rest, is from how long they waited for
cores amid passes. Over attention workers, what a token's exchange with them takes of a step is what requests'
times per token are off by on average in those of the ``costs`` in which many sequences are computed at once,
and how much longer workers and model replicas take in turns what they are off by in the ``saturated`` one, as
most waits are short and some are long. Nothing else is fitted: no other workload's figures are looked at.
"""

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

import msgspec
from scipy.stats import trim_mean

from common.errors import ConfigError
from services.bench.plan import FOREGROUND, RequestMaker, make_arrivals_s, make_foreground, plan_foreground
from services.bench.prompts import BodyTemplate, TokenIdPrompts
from services.compare.between import Between
from services.compare.comparison import (
    Candidate,
    Comparison,
    InstanceRole,
    Offer,
    bench_config,
    check_calibration,
)
from services.compare.engine_times import PassCounts, counts_of_all
from services.compare.host_costs import Counted, host_of
from services.compare.pass_rests import APART, NO_RESTS, Rests, fit_rests
from services.compare.records import RunRecord
from services.compare.simulated_mesh import Overhead, is_emulated, pace_of, simulated_of
from services.profiling.probe import looking_s
from services.simulator.cluster import Cluster
from services.simulator.host_config import HostConfig
from services.simulator.metrics import DONE, Metrics, latency_of, measure
from services.simulator.run import Load, Offered, simulate

NOWHERE = "http://127.0.0.1"
PROBE_S = 1e-3
"""How much longer messages are made, to see how many of them come before a first token."""
SERVED_NOTHING = "has no request that was served live (kept by its number) and simulated: run it again"
CORRECTIONS, SWEEPS = 4, 2
DECODING: tuple[InstanceRole, ...] = ("decode", "mixed")
MOST_TURNS_SHARE, HALVINGS = 1.0, 8
"""How much longer threads take in turns at most, and how finely that is found."""
MOST_TOKEN_S = 2e-3
"""That a token's exchange with attention workers takes of a step, at most."""
NEARLY_THE_MOST = 1 - 2.0**-HALVINGS
"""Of the most: from here on it was too little, or nearly."""
FARTHEST_SHARE = 0.05
"""Of a run's requests at either end, off farthest, which do not count: one stall of a shared machine, where
there are twenty requests or more."""


class Tried(NamedTuple):
    """A run that an overhead is held to."""

    candidate: Candidate
    record: RunRecord
    overhead: Overhead


@dataclass(frozen=True, slots=True)
class Pair:
    """One run, live and simulated. ``pace``: of the simulated passes, as ``Overhead`` has it."""

    record: RunRecord
    metrics: Metrics
    pace: float = 1.0

    @property
    def attainment_points(self) -> float | None:
        """How many points more of the simulated requests met their objectives."""
        live, virtual = self.record.load.attainment, self.metrics.attainment
        return None if live is None or virtual is None else round(100.0 * (virtual.share - live.share), 6)


@dataclass(frozen=True, slots=True)
class Simulation:
    """Of a comparison's meshes. How long the model's passes take, alone and beside one another, is from the
    profile that the instances took, too (``lamella profile``), at the pace that the machine had in each run
    by looks (``pace_of``); or, by configuration, as they were taken ``between`` runs. How long emulated ones
    take is from their settings."""

    comparison: Comparison
    between: Mapping[str, Between] = field(default_factory=dict)

    def pairs(
        self, records: Sequence[RunRecord], others: Sequence[RunRecord] = ()
    ) -> tuple[dict[str, Overhead], list[Pair]]:
        """Each configuration's overhead, and every run of ``records`` beside its simulation. ``others``: runs
        of other configurations, which say what messages cost, too. Raises ConfigError where a configuration
        was not run at the calibration's workload."""
        candidates = {each.name: each for each in self.comparison.configuration}
        overheads: dict[str, Overhead] = {}
        pairs = []
        for record in records:
            candidate = candidates[record.configuration]
            if candidate.name not in overheads:
                overheads[candidate.name] = self.calibrate(candidate, [*records, *others])
            overhead = self._in_its_minutes(candidate, record, overheads[candidate.name])
            pairs.append(Pair(record, self.run(candidate, record, overhead), overhead.pace))
        return overheads, pairs

    def calibrate(self, candidate: Candidate, records: Sequence[RunRecord]) -> Overhead:
        """By medians over the calibrating runs, but for rests, which are all fitted runs'. A time that the
        profile's is over counts as nothing. Each is found beside what the others were found to be, the first
        time beside nothing: in ``SWEEPS``."""
        names = self.comparison.calibration
        own = [each for each in records if each.configuration == candidate.name]
        runs = [each for each in own if each.workload in names]
        missing = sorted(set(names) - {each.workload for each in runs})
        check_calibration(self.comparison)
        if missing:
            raise ConfigError("calibration", list(names), _run_at(candidate, *missing))
        overhead = Overhead(rests=self._rests(own))
        for _ in range(SWEEPS):
            overhead = overhead._replace(host=self._host_of(candidate, records, overhead))
            overhead = overhead._replace(hidden=self._hidden(candidate, own, overhead))
            found = [self._overhead_of(candidate, record, overhead) for record in runs]
            overhead = overhead._replace(
                pass_s=statistics.median(each.pass_s for each in found),
                hop_s=statistics.median(each.hop_s for each in found),
                late_s=statistics.median(each.late_s for each in found),
            )
            overhead = self._with_exchanged(candidate, own, overhead)
            overhead = self._with_turns(candidate, own, overhead)
        return overhead

    def _with_exchanged(self, candidate: Candidate, own: Sequence[RunRecord], overhead: Overhead) -> Overhead:
        """With what a step over attention workers takes longer for each token that it draws, which crosses
        between processes in every layer: so that the times per token come out of those runs in which many
        times as many sequences are computed at once as in the calibration's, one like another. These stay as
        they are. Where there is no such run, nothing."""
        if overhead.host is None or not candidate.instances.get("attention", 0):
            return overhead
        at_once: dict[str, list[tuple[float, Tried]]] = {}
        for record in own:
            if record.workload in self.comparison.fitted - {self.comparison.saturated}:
                tried = Tried(candidate, record, self._in_its_minutes(candidate, record, overhead))
                sequences = _sequences_at_once(self.again(*tried))
                if any(each.tpot_s is not None for each in record.served):
                    at_once.setdefault(record.workload, []).append((sequences, tried))
        few = [each for name in self.comparison.calibration for each, _ in at_once.get(name, ())]
        least = statistics.fmean(few) if few else 0.0
        many = [tried for runs in at_once.values() for each, tried in runs if each > APART * least > 0]
        if not many:
            return overhead

        def with_token(of: Overhead, token_s: float) -> Overhead:
            pass_s = of.pass_s - least * (token_s - of.token_s)
            return of._replace(token_s=token_s, pass_s=max(0.0, pass_s))

        def off_s(token_s: float) -> float:
            return sum(
                self._off_per_token(each._replace(overhead=with_token(each.overhead, token_s)))
                for each in many
            )

        return with_token(overhead, _root(off_s, MOST_TOKEN_S))

    def _off_per_token(self, tried: Tried) -> float:
        """By how much requests' times per token are longer than live on average."""
        return _trimmed_mean(_longer_s("costs", tried.record, self.again(*tried), "tpot_s"))

    def _with_turns(self, candidate: Candidate, own: Sequence[RunRecord], overhead: Overhead) -> Overhead:
        """With what layers over attention workers take longer while cores are short, so that the saturated
        workload's time per token comes out. Raises ConfigError where nobody ran that."""
        saturated = self.comparison.saturated
        if overhead.host is None or saturated is None or not candidate.instances.get("attention", 0):
            return overhead
        values = []
        for record in own:
            if record.workload == saturated:
                tried = Tried(candidate, record, self._in_its_minutes(candidate, record, overhead))
                values.append(_root(partial(self._off_in_turns, tried), MOST_TURNS_SHARE))
        if not values:
            raise ConfigError("saturated", saturated, _run_at(candidate, saturated))
        return overhead.with_host(turns_share=statistics.median(values))

    def _off_in_turns(self, tried: Tried, turns_share: float) -> float:
        """By how much requests' times per token are longer than live on average, with that."""
        candidate, record, overhead = tried
        cluster = self.again(candidate, record, overhead.with_host(turns_share=turns_share))
        return _trimmed_mean(_longer_s("saturated", record, cluster, "tpot_s"))

    def _counts(self, own: Sequence[RunRecord]) -> list[dict[str, PassCounts]]:
        """Of the fitted runs in which somebody counted gaps, by role. While all cores are wanted models wait
        in them for one, too: of the saturated workload nothing is said by it."""
        names = self.comparison.fitted - {self.comparison.saturated}
        found = (
            {each.role: each.passes for each in record.engines if each.passes and each.passes.gaps}
            for record in own
            if record.workload in names
        )
        return [each for each in found if each]

    def _rests(self, own: Sequence[RunRecord]) -> tuple[Rests, ...]:
        """Of the roles that counted them."""
        counts = self._counts(own)
        roles = sorted({role for each in counts for role in each})
        return tuple(fit_rests(role, [each[role] for each in counts if role in each]) for role in roles)

    def _hidden(self, candidate: Candidate, own: Sequence[RunRecord], overhead: Overhead) -> Rests:
        """Of what is done beside passes that part which takes nothing of engines, as they rest then: so much
        of what they rest that who counted it waits for cores as long as in the runs that say what it costs.
        Where nobody counted it, all that passes take more; none over attention workers, where that is steps'
        exchange."""
        host = overhead.host
        if host is None:
            return NO_RESTS
        if not overhead.rests:
            has_workers = candidate.instances.get("attention", 0) > 0
            return NO_RESTS if has_workers else Rests("", overhead.pass_s)
        of_all = fit_rests("", [counts_of_all(each.values()) for each in self._counts(own)])
        rests = of_all.at_most(host.pass_s, host.token_s, host.prompt_s)
        roles = {each.role for each in overhead.rests}
        runs = [each for each in own if each.workload in self.comparison.costs]
        counted = [(each, waited_s) for each in runs if (waited_s := _waited_s(each, roles)) is not None]

        def over_s(hidden: Rests) -> float:
            tried = overhead._replace(hidden=hidden)
            return sum(
                _engines_waited_s(
                    self.again(candidate, record, self._in_its_minutes(candidate, record, tried)), roles
                )
                - waited_s
                for record, waited_s in counted
            )

        most_s, least_s = over_s(NO_RESTS), over_s(rests)
        share = most_s / (most_s - least_s) if most_s > least_s else 0.0
        return rests.times(min(1.0, max(0.0, share)))

    def _host_of(
        self, candidate: Candidate, records: Sequence[RunRecord], overhead: Overhead
    ) -> HostConfig | None:
        """By the runs of all configurations with the same settings. How much was computed is simulated with
        that overhead, whose turns it keeps."""
        alike = {
            each.name: each
            for each in self.comparison.configuration
            if each.settings == candidate.settings and each.knows_lengths == candidate.knows_lengths
        }
        rests = {
            name: self._rests([each for each in records if each.configuration == name]) for name in alike
        }
        counted = []
        for each in records:
            if each.configuration in alike and each.workload in self.comparison.costs:
                who = alike[each.configuration]
                tried = overhead._replace(rests=rests[who.name])
                if not who.instances.get("attention", 0):
                    tried = tried._replace(token_s=0.0)
                cluster = self.again(who, each, self._in_its_minutes(who, each, tried))
                counted.append((each, _counted(cluster, who)))
        found, before = host_of(counted, candidate.name), overhead.host
        if found is None or before is None:
            return found
        return msgspec.structs.replace(found, turns_share=before.turns_share)

    def _overhead_of(self, candidate: Candidate, record: RunRecord, known: Overhead) -> Overhead:
        """A time to first token is made of messages and passes, a time per token of steps and, in its first
        gap, of messages: each is corrected by what it is off, a few times. ``known``: all that is found
        otherwise, of which rests are what passes take more, where those that decode counted them; emulated
        ones end late beside that, as a process is woken when it has waited long enough."""

        @cache
        def off(tried: Overhead) -> tuple[float, float]:
            cluster = self.again(candidate, record, tried)
            longer_s = partial(_longer_s, "calibration", record, cluster)
            return -statistics.median(longer_s("ttft_s")), -statistics.median(longer_s("tpot_s"))

        counting = {each.role for each in known.rests}
        is_counted = {each for each in DECODING if candidate.instances.get(each, 0)} <= counting
        is_late = is_counted and is_emulated(self.comparison, candidate)
        found = self._in_its_minutes(candidate, record, known._replace(pass_s=0.0, hop_s=0.0, late_s=0.0))
        hops = (off(found)[0] - off(found._replace(hop_s=PROBE_S))[0]) / PROBE_S
        for _ in range(CORRECTIONS):
            if is_late:
                found = found._replace(late_s=max(0.0, found.late_s + off(found)[1]))
            elif not is_counted:
                found = found._replace(pass_s=max(0.0, found.pass_s + off(found)[1]))
            found = found._replace(hop_s=max(0.0, found.hop_s + off(found)[0] / hops))
        return found

    def run(self, candidate: Candidate, record: RunRecord, overhead: Overhead) -> Metrics:
        offer = self.comparison.offer(record.workload)
        return measure(self.again(candidate, record, overhead), offer.objectives)

    def again(self, candidate: Candidate, record: RunRecord, overhead: Overhead) -> Cluster:
        """The requests of that run, as they came."""
        offer = self.comparison.offer(record.workload)
        return self.simulate(candidate, offer, record.rate_per_s, record.round_number, overhead)

    def simulate(
        self, candidate: Candidate, offer: Offer, rate_per_s: float, round_number: int, overhead: Overhead
    ) -> Cluster:
        """The same requests at the same times as live ones at that rate, through the candidate's mesh."""
        config = bench_config(self.comparison, offer, rate_per_s, round_number, NOWHERE)
        plan = plan_foreground(config)
        maker = RequestMaker(FOREGROUND, TokenIdPrompts(config.seed), BodyTemplate("completions", ""), None)
        requests = make_foreground(config, plan, maker)
        offered = [
            Offered(arrival_s, request.prompt_tokens, request.output_tokens)
            for arrival_s, request in zip(make_arrivals_s(config, plan), requests, strict=False)
        ]
        between = self.between.get(candidate.name)
        profile = None if between is None else between.profile
        return simulate(simulated_of(self.comparison, candidate, overhead, profile), Load(offered))

    def _in_its_minutes(self, candidate: Candidate, record: RunRecord, overhead: Overhead) -> Overhead:
        """As the machine was when that run was, looks at it included, which take of a core."""
        if overhead.host is not None:
            looked = looking_s(record.looks_s) / record.duration_s
            overhead = overhead.with_host(idle_cores=overhead.host.idle_cores + looked)
        between = self.between.get(candidate.name)
        if between is None:
            return overhead._replace(pace=pace_of(self.comparison, candidate, record))
        return overhead._replace(pace=between.paces.get(record.key, overhead.pace))


def _run_at(candidate: Candidate, *missing: str | None) -> str:
    """The rule of keys that name workloads, and who breaks it."""
    where = ", ".join(map(str, missing))
    return f"must name workloads that every configuration was run at; {candidate.name} was not at {where}"


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


def _counted(cluster: Cluster, candidate: Candidate) -> Counted:
    engines = [each.engine for each in cluster.lives]
    return Counted(
        passes=sum(each.work.passes for each in engines),
        tokens=sum(cluster.records.drawn_tokens),
        prompts=len(cluster.records),
        prompt_tokens=sum(cluster.records.prompt_tokens),
        is_handed_over=not candidate.instances.get("mixed", 0),
    )


def _sequences_at_once(cluster: Cluster) -> float:
    """In a step over attention workers, on average."""
    work = [each.engine.work for each in cluster.lives if each.pools is not None]
    return sum(each.rows for each in work) / max(1, sum(each.passes for each in work))


def _waited_s(record: RunRecord, roles: Collection[str]) -> float | None:
    """How long these roles' engines had no core amid passes; None where nobody counted that."""
    counted = [each.passes for each in record.engines if each.passes and each.role in roles]
    return counts_of_all(counted).waited_s if counted else None


def _engines_waited_s(cluster: Cluster, roles: Collection[str]) -> float:
    seats = (each.seat for each in cluster.lives if each.role in roles)
    return sum(each.waited_s for each in seats if each is not None)


def _longer_s(named: str, record: RunRecord, cluster: Cluster, measure: str) -> list[float]:
    """By how much each simulated request is over itself live, as lengths come in lumps between which medians
    jump. Raises ConfigError where there is none, of what the comparison calls ``named``."""
    found: list[float] = []
    for live in record.served:
        if cluster.records.outcome[live.index] == DONE:
            times = getattr(latency_of(cluster.records, live.index), measure), getattr(live, measure)
            if None not in times:
                found.append(times[0] - times[1])
    if not found:
        raise ConfigError(named, record.workload, SERVED_NOTHING)
    return found


def _trimmed_mean(longer_s: Sequence[float]) -> float:
    """Of waits, whose median is less than they take; but for those farthest off."""
    return float(trim_mean(longer_s, FARTHEST_SHARE))
