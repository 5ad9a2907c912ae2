"""A candidate's mesh as the simulator has it: its settings, and what a live one takes beside its model."""

import dataclasses
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from common.config import Config
from common.config_file import config_from_tree
from common.errors import ConfigError
from common.kv.layout import KVLayout
from common.model.device import accelerator_name
from common.model.precision import precision_of
from common.model.waiting import WANTED_S
from common.profile import profile_path, read_profile
from common.shapes import ModelShape
from common.spec import ELEMENT_BYTES
from services.analysis.model_shape import read_shape
from services.compare.comparison import Candidate, Comparison, InstanceRole, settings_of
from services.compare.pass_rests import NO_RESTS, Rests
from services.compare.records import RunRecord
from services.hosts.engines import pull_share_of
from services.model_directory import model_directory
from services.simulator.config import Simulated, simulated_from_tree
from services.simulator.host_config import HostConfig
from services.simulator.performance.profiled import read_machine_profile

UNREAD = Path("lengths.jsonl")
EMULATED = ModelShape("emulated", 1, 1, 1, 1, 1, 1, 1, 1, 0)
"""An emulated engine's: its KV is a few bytes a token."""


class Overhead(NamedTuple):
    """Of a mesh, seconds. ``pass_s``: of every pass beside the model's, and ``token_s`` of each token that a
    step over attention workers draws; ``hop_s``: of a message. ``host``: on which all run, if it is known
    what they take of it. ``pace``: how many times as long as the profile says the model's passes take.
    ``rests``: of roles whose instances counted theirs, in place of both. ``hidden``: what of the host's costs
    is done on the cores of engines that rest then. ``late_s``: by how much later than they say emulated
    passes of who counted rests end."""

    pass_s: float = 0.0
    hop_s: float = 0.0
    host: HostConfig | None = None
    pace: float = 1.0
    rests: tuple[Rests, ...] = ()
    hidden: Rests = NO_RESTS
    token_s: float = 0.0
    late_s: float = 0.0

    def rests_of(self, role: str) -> Rests:
        found = (each for each in self.rests if each.role == role)
        token_s = self.token_s if role == "decode" else 0.0
        return next(found, Rests(role, self.pass_s, token_s))

    def with_host(self, **costs: float) -> "Overhead":
        """With some of the host's costs replaced, where there is one."""
        return self if self.host is None else self._replace(host=msgspec.structs.replace(self.host, **costs))


def simulated_of(
    comparison: Comparison, candidate: Candidate, overhead: Overhead, profile: Path | None = None
) -> Simulated:
    """The candidate's mesh; its model's passes by ``profile``, None: the one that its instances took. Raises
    ConfigError for what cannot be simulated."""
    settings = settings_of(comparison, candidate, UNREAD)
    workers = candidate.instances.get("attention", 0)
    if workers:
        instance = {**settings.get("instance", {}), "attention_workers": workers}
        settings = {**settings, "instance": instance}
    config = config_from_tree(settings)
    # A simulated mesh's settings do not say what its KV lies on.
    decoding = msgspec.structs.replace(config.instance, role="decode")
    share = pull_share_of(msgspec.structs.replace(config, instance=decoding))
    transfer = {**settings.get("transfer", {}), "pull_share": share}
    settings = {**settings, "transfer": transfer}
    shape, element_bytes = _model_of(config)
    cluster = {
        "shape": dataclasses.asdict(shape),
        "element_bytes": element_bytes,
        "hop_s": overhead.hop_s,
    }
    pools = [
        _pool(role, count, config, shape, element_bytes, overhead, profile)
        for role, count in candidate.instances.items()
        if count
    ]
    host = {}
    if overhead.host is not None:
        costs = _host(overhead.host, overhead.hidden) | _contention(config, overhead, profile)
        host["host"] = costs | (_host_of_workers(config) if workers else {})
    return simulated_from_tree({**settings, "cluster": cluster, "pool": pools, **host})


def _host(host: HostConfig, hidden: Rests) -> dict[str, Any]:
    """Without those seconds in which the engine's thread waits for what is done then: its core is taken in
    their place, as they are in its passes."""
    return msgspec.structs.asdict(host) | {
        "pass_s": max(0.0, host.pass_s - hidden.pass_s),
        "token_s": max(0.0, host.token_s - hidden.token_s),
        "prompt_s": max(0.0, host.prompt_s - hidden.prompt_s),
    }


def _host_of_workers(config: Config) -> dict[str, Any]:
    """Who has waited for attention where cores are short sleeps from then on, live, until it looks again
    whether they still are: what is left of that when they are no longer is half of it on average. Batches
    that take turns look out all the time."""
    hold_s = WANTED_S / 2 if config.instance.pipeline == "off" else 0.0
    return {"turns_hold_s": hold_s}


def _contention(config: Config, overhead: Overhead, path: Path | None) -> dict[str, float]:
    """What of ``[host]`` is known of passes beside one another's."""
    if config.instance.engine != "model":
        return {}
    found = read_machine_profile(profile_of_instances(config) if path is None else path).contention
    if found is None:
        return {}
    # A neighbour at that pace computes fewer passes, each of which costs as much more.
    return {"beside_s_per_rate": overhead.pace**2 * found.s_per_rate, "beside_share": found.share}


def is_emulated(comparison: Comparison, candidate: Candidate) -> bool:
    return config_from_tree(settings_of(comparison, candidate, UNREAD)).instance.engine == "emulated"


def pace_of(comparison: Comparison, candidate: Candidate, record: RunRecord) -> float:
    """How many times as long as when it was profiled passes took in that run, by a fixed piece of work
    that was timed then and now; 1 where it was not."""
    config = config_from_tree(settings_of(comparison, candidate, UNREAD))
    if config.instance.engine != "model" or not record.looks_s:
        return 1.0
    profile = read_profile(_instances_path(config))
    if profile is None or profile.look_s is None:
        return 1.0
    return statistics.fmean(record.looks_s) / profile.look_s


def profile_of_instances(config: Config) -> Path:
    """The one that they took. Raises ConfigError where there is none."""
    path = _instances_path(config)
    if not path.exists():
        rule = (
            "was not profiled with these settings on this machine: `lamella profile --config FILE`, FILE with"
            " the comparison's [settings]"
        )
        raise ConfigError("model.directory", str(model_directory(config.model)), rule)
    return path


def _instances_path(config: Config) -> Path:
    model, directory = config.model, model_directory(config.model)
    return profile_path(model, directory, precision_of(model).compute, accelerator_name(model.device))


def _performance(
    role: InstanceRole, config: Config, overhead: Overhead, profile: Path | None
) -> dict[str, Any]:
    rests = overhead.rests_of(role)
    if config.instance.engine == "model":
        path = profile_of_instances(config) if profile is None else profile
        beside = {
            "overhead_s": rests.pass_s,
            "overhead_token_s": rests.token_s,
            "overhead_prompt_s": rests.prompt_s,
        }
        return {"kind": "profile", "path": str(path), "pace": overhead.pace, **beside}
    emulation, pace, pass_s = config.emulation, overhead.pace, rests.pass_s + overhead.late_s
    return {
        "kind": "linear",
        "prefill_s": pace * emulation.prefill_base_s + pass_s,
        "per_prompt_token_s": pace * emulation.prefill_per_token_s,
        "per_ended_prompt_s": rests.prompt_s,
        "step_s": pace * emulation.decode_base_s + pass_s,
        "per_sequence_s": pace * emulation.decode_per_sequence_s + rests.token_s,
        "per_context_token_s": pace * emulation.decode_per_context_token_s,
    }


def _pool(
    role: InstanceRole,
    count: int,
    config: Config,
    shape: ModelShape,
    element_bytes: int,
    overhead: Overhead,
    profile: Path | None,
) -> dict[str, Any]:
    """Attention workers hold decode instances' KV, whose own passes are then the rest of the model's."""
    performance = _performance(role, config, overhead, profile)
    pool: dict[str, Any] = {"name": role, "role": role, "count": count, "performance": performance}
    if config.instance.attention_workers and role in ("decode", "attention"):
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
