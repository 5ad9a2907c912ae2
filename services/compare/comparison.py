"""What a comparison is: configurations of a mesh, workloads, and how often each pair is run.

It is read from TOML, as in ``bench/comparison.toml``. ``[settings]`` is of every configuration,
``[configuration.settings]`` of one; both are what ``--config`` takes. The first configuration is the one that
others are compared with.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from common.config import Config
from common.config_file import config_from_tree, read_toml, told_of
from common.errors import ConfigError
from common.ids import is_valid_id
from common.latency import ServiceObjectives
from common.messages import Role
from common.phases import missing_phases
from common.toml_tables import read_table
from services.bench.config import BenchConfig
from services.bench.lengths import WORKLOADS
from services.launcher.launch_plan import LaunchPlan, check_plan

Settings = dict[str, dict[str, Any]]
"""Sections of a configuration file, as they are read: checked by ``common.config_file``."""
InstanceRole = Literal["prefill", "decode", "mixed", "attention"]
UNDECISIVE = ("rounds", "calibration", "costs", "saturated", "profiled_between")
"""Keys of a comparison that decide no run's figures."""


class Offer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One workload: Poisson arrivals, and the objectives that goodput counts (seconds). Meshes know them, as
    of a class of service with the workload's name: some rules place by what is promised. ``lengths``: whose
    it has where that is not its name, for several rates of one. It comes at a rate, or at a share of what
    each configuration serves here (``capacity``)."""

    name: str
    requests: int
    ttft_s: float
    tpot_s: float
    rate_per_s: float | None = None
    capacity_share: float | None = None
    lengths: str | None = None

    @property
    def drawn_from(self) -> str:
        """Of ``services.bench.lengths.WORKLOADS``."""
        return self.lengths or self.name

    @property
    def objectives(self) -> ServiceObjectives:
        return ServiceObjectives(ttft_s=self.ttft_s, tpot_s=self.tpot_s)


class Candidate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One configuration. ``knows_lengths``: a predictor that is always right runs beside the scheduler.
    ``rates_per_s``: of workloads, by their names, that come at another rate here."""

    name: str
    instances: dict[InstanceRole, int]
    settings: Settings = {}
    knows_lengths: bool = False
    rates_per_s: dict[str, float] = {}

    def given_rate(self, offer: Offer) -> float | None:
        """This configuration's own, or that of all; None: it is to be found."""
        return self.rates_per_s.get(offer.name, offer.rate_per_s)


class Comparison(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole file. ``length_scale`` multiplies the workloads' lengths; a round's seed is ``seed`` and its
    number. ``calibration`` names workloads whose requests hardly wait, ``costs`` those whose processor time
    is shared out among passes, tokens and prompts, and which say what a token's exchange with attention
    workers takes, ``saturated`` one of these that hardly ever wants fewer
    cores than there are: what a mesh costs beside its model is taken from these (``simulated``).
    ``capacity_requests``: of the simulations that say what a mesh serves. ``profiled_between``: runs take
    turns with passes of a profile (``between``)."""

    name: str
    workload: tuple[Offer, ...]
    configuration: tuple[Candidate, ...]
    settings: Settings = {}
    length_scale: float = 1.0
    rounds: int = 3
    seed: int = 0
    calibration: tuple[str, ...] = ()
    costs: tuple[str, ...] = ()
    saturated: str | None = None
    capacity_requests: int = 1000
    profiled_between: bool = False

    def offer(self, name: str) -> Offer:
        """Raises StopIteration."""
        return next(offer for offer in self.workload if offer.name == name)

    @property
    def fitted(self) -> frozenset[str]:
        """Workloads whose live figures simulated meshes were fitted to: they judge nothing."""
        return frozenset((*self.calibration, *self.costs))

    @property
    def fingerprint(self) -> str:
        """Of all that decides a run's figures: runs of comparisons with another one are not of this."""
        fields = msgspec.structs.asdict(self)
        decisive = {key: value for key, value in fields.items() if key not in UNDECISIVE}
        return hashlib.blake2b(msgspec.json.encode(decisive), digest_size=8).hexdigest()


def read_comparison(path: Path) -> Comparison:
    """Raises ConfigError, which names the file, also for settings that a mesh would refuse."""
    tree = read_toml("comparison", path)
    with told_of(path):
        comparison: Comparison = read_table("", tree, Comparison)
        check_comparison(comparison)
    return comparison


def check_comparison(comparison: Comparison) -> None:
    """Raises ConfigError for the first rule that is broken."""
    if not (comparison.workload and comparison.configuration):
        raise ConfigError("comparison", comparison.name, "must have a workload and a configuration")
    _check_names("workload", (offer.name for offer in comparison.workload))
    for key, names in (
        ("calibration", comparison.calibration),
        ("costs", comparison.costs),
        ("saturated", (comparison.saturated,)),
    ):
        for name in names:
            if name not in (None, *(offer.name for offer in comparison.workload)):
                raise ConfigError(key, name, "must be a workload's name")
    if comparison.saturated not in (None, *comparison.costs):
        rule = "must be one of costs: what is fitted judges nothing"
        raise ConfigError("saturated", comparison.saturated, rule)
    _check_names("configuration", (candidate.name for candidate in comparison.configuration))
    for offer in comparison.workload:
        if offer.drawn_from not in WORKLOADS:
            key = "workload.name" if offer.lengths is None else "workload.lengths"
            raise ConfigError(key, offer.drawn_from, f"must be one of {', '.join(WORKLOADS)}")
        for key in ("requests", "rate_per_s", "capacity_share", "ttft_s", "tpot_s"):
            value = getattr(offer, key)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"workload.{key}", value, f"of {offer.name}: must be positive")
        if (offer.rate_per_s is None) == (offer.capacity_share is None):
            raise ConfigError("workload", offer.name, "must have either rate_per_s or capacity_share")
    _check_order(comparison)
    for candidate in comparison.configuration:
        counts = candidate.instances
        for role, count in counts.items():
            if count < 0:
                rule = f"of {candidate.name}: must be at least 0"
                raise ConfigError(f"configuration.instances.{role}", count, rule)
        if missing := missing_phases(role for role in get_args(Role) if counts.get(role, 0) > 0):
            rule = f"of {candidate.name}: nobody would do {' and '.join(missing)}"
            raise ConfigError("configuration.instances", counts, rule)
        for name, rate_per_s in candidate.rates_per_s.items():
            if name not in {offer.name for offer in comparison.workload}:
                rule = f"of {candidate.name}: must be a workload's name"
                raise ConfigError("configuration.rates_per_s", name, rule)
            if not 0 < rate_per_s < float("inf"):
                rule = f"of {candidate.name}, for {name}: must be positive"
                raise ConfigError("configuration.rates_per_s", rate_per_s, rule)
    for key in ("rounds", "capacity_requests"):
        if getattr(comparison, key) < 1:
            raise ConfigError(key, getattr(comparison, key), "must be at least 1")
    if not 0 < comparison.length_scale < float("inf"):
        raise ConfigError("length_scale", comparison.length_scale, "must be positive")
    for candidate in comparison.configuration:
        config = config_of(comparison, candidate, lengths_file=Path("lengths.jsonl"))
        check_plan(plan_of(candidate), config)
        if config.instance.engine == "model":
            _check_threads(comparison, config.model.threads)
        elif comparison.costs:
            rule = (
                f"must not be named beside emulated engines ({candidate.name}): they wait, and share no cores"
            )
            raise ConfigError("costs", list(comparison.costs), rule)


def check_calibration(comparison: Comparison) -> None:
    """That its runs can be simulated. Raises ConfigError."""
    if not comparison.calibration:
        rule = (
            "must be named to simulate: workloads whose requests hardly wait, which tell what a mesh costs"
            " beside its model"
        )
        raise ConfigError("calibration", None, rule)


def _check_threads(comparison: Comparison, threads: int | None) -> None:
    """Raises ConfigError."""
    if comparison.costs and threads != 1:
        rule = "must be 1 beside costs: of shared cores each simulated pass takes one"
        raise ConfigError("model.threads", threads, rule)
    if comparison.profiled_between and threads is None:
        rule = (
            "must be given beside profiled_between: instances would leave cores to who takes passes between"
        )
        raise ConfigError("model.threads", threads, rule)


def _check_order(comparison: Comparison) -> None:
    """Raises ConfigError where a share is asked for of what nobody can know yet."""
    judged = None
    for offer in comparison.workload:
        if offer.name not in comparison.fitted and offer.capacity_share is not None:
            judged = offer.name
        elif offer.name in comparison.fitted and judged is not None:
            rule = f"must come before {judged}, whose share is of a capacity that hangs on its runs"
            raise ConfigError("workload", offer.name, rule)


def _check_names(key: str, names: Iterable[str]) -> None:
    seen = set()
    for name in names:
        if not is_valid_id(name) or name in seen:
            raise ConfigError(f"{key}.name", name, "must match [a-z0-9-]{1,64}, each once")
        seen.add(name)


def choose(comparison: Comparison, workloads: Iterable[str], configurations: Iterable[str]) -> Comparison:
    """Of the whole the named workloads and configurations; all where none is named. Raises ConfigError."""
    wanted_workloads = set(workloads) or {offer.name for offer in comparison.workload}
    wanted_configurations = set(configurations) or {each.name for each in comparison.configuration}
    chosen = msgspec.structs.replace(
        comparison,
        workload=tuple(offer for offer in comparison.workload if offer.name in wanted_workloads),
        configuration=tuple(each for each in comparison.configuration if each.name in wanted_configurations),
    )
    _check_known("--workload", wanted_workloads, comparison.workload)
    _check_known("--configuration", wanted_configurations, comparison.configuration)
    return chosen


def _check_known(option: str, wanted: set[str], there: Sequence[Offer | Candidate]) -> None:
    names = [each.name for each in there]
    unknown = wanted - set(names)
    if unknown:
        raise ConfigError(option, ", ".join(sorted(unknown)), f"must be one of {', '.join(names)}")


def plan_of(candidate: Candidate) -> LaunchPlan:
    return msgspec.structs.replace(LaunchPlan(port=0, prefill=0, decode=0), **candidate.instances)


def config_of(comparison: Comparison, candidate: Candidate, lengths_file: Path) -> Config:
    """Raises ConfigError."""
    return config_from_tree(settings_of(comparison, candidate, lengths_file))


def settings_of(comparison: Comparison, candidate: Candidate, lengths_file: Path) -> Settings:
    """The candidate's own settings over those of all. Raises ConfigError."""
    classes = {offer.name: {"ttft_s": offer.ttft_s, "tpot_s": offer.tpot_s} for offer in comparison.workload}
    tree: Settings = {"service_classes": dict(classes)}
    tree |= {section: dict(values) for section, values in comparison.settings.items()}
    own: list[Mapping[str, Mapping[str, Any]]] = [candidate.settings]
    if candidate.knows_lengths:
        own.append({"predictor": {"kind": "oracle", "lengths_file": str(lengths_file)}})
    for settings in own:
        for section, values in settings.items():
            tree[section] = {**tree.get(section, {}), **values}
    for key in ("nats_url", "redis_url"):
        if key in tree.get("mesh", {}):
            raise ConfigError(f"mesh.{key}", tree["mesh"][key], "cannot be set: each mesh brings its own")
    return tree


def bench_config(
    comparison: Comparison, offer: Offer, rate_per_s: float, round_number: int, url: str
) -> BenchConfig:
    """The same for every configuration that it comes to at one rate: same seed, so same prompts, lengths and
    arrivals."""
    return BenchConfig(
        url=url,
        rate_per_s=rate_per_s,
        requests=offer.requests,
        workload=offer.drawn_from,
        length_scale=comparison.length_scale,
        objectives=offer.objectives,
        seed=comparison.seed + round_number,
        extra_body=(("service_tier", offer.name),),
    )
