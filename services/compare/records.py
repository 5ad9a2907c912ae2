"""One run of one configuration on one workload, as a line of ``runs.jsonl``, and what is read from it."""

from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from common.errors import ConfigError
from services.bench.summary import LoadResult
from services.compare.comparison import Comparison
from services.compare.engine_times import EngineTimes
from services.compare.usage import InstanceUse

RUNS_FILE = "runs.jsonl"
RunKey = tuple[int, str, str]
"""Round, workload, configuration."""


class OfComparison(Protocol):
    @property
    def fingerprint(self) -> str: ...


Kept = TypeVar("Kept", bound=OfComparison)


class ServedRequest(msgspec.Struct, frozen=True, array_like=True):
    """Of a run: which of its requests, when it came (seconds from the first), and its times in seconds.
    ``tpot_s`` is None where there was one token alone."""

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float | None
    end_to_end_s: float


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """``rate_per_s``: at which its requests came. ``instances_cpu_s`` is the processor time of the instances,
    ``services_cpu_s`` of the mesh's other processes; ``client_cpu_share`` of one core is the load
    generator's. ``duration_s`` is the whole run's. ``beside_cpu_s``: what all meshes and the client took in
    it but for threads that ran the model or looked at the pace. ``idle_cores``: what all meshes took a second
    while nothing was asked of them, where that was looked at. ``looks_s``: what some layers took each
    time meanwhile, where models ran (``services.profiling.probe``). ``engines``: what those of each role did
    with their time, where models ran. ``served``: each request by itself, for whoever wants other objectives,
    or to know which ones a simulation has otherwise."""

    fingerprint: str
    round_number: int
    workload: str
    configuration: str
    rate_per_s: float
    started_at: str
    duration_s: float
    load: LoadResult
    uses: tuple[InstanceUse, ...]
    resource_time_s: float
    instances_cpu_s: float
    services_cpu_s: float
    client_cpu_share: float
    beside_cpu_s: float = 0.0
    idle_cores: float | None = None
    cores: int = 0
    looks_s: tuple[float, ...] = ()
    engines: tuple[EngineTimes, ...] = ()
    served: tuple[ServedRequest, ...] = ()

    @property
    def key(self) -> RunKey:
        return self.round_number, self.workload, self.configuration


def read_kept(
    path: Path, kind: type[Kept], comparison: Comparison | None, option: str = "--output"
) -> list[Kept]:
    """A folder's lines of one kind, in their order, of that comparison, or of any; nothing where there is no
    file. ``option``: that named the folder. Raises ConfigError."""
    if not path.exists():
        return []
    kept = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            one = msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            rule = f"line {number} cannot be read ({exc}): choose another folder"
            raise ConfigError(option, str(path), rule) from exc
        if comparison is not None and one.fingerprint != comparison.fingerprint:
            raise ConfigError(
                option, str(path), f"line {number} is of another comparison: choose another folder"
            )
        kept.append(one)
    return kept


def keep(path: Path, one: msgspec.Struct) -> None:
    """As its next line."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(one) + b"\n")
