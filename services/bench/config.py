"""What a benchmark run is asked to do, checked before the first byte is sent.

A run has a foreground load and, for interference, a background load: streams that decode without pause while
the foreground's prompts arrive. Each is reported by itself.
"""

from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError, ServiceError
from common.latency import ServiceObjectives
from services.bench.arrivals import ARRIVAL_PROCESSES, POISSON_BURSTINESS, check_burstiness
from services.bench.lengths import WORKLOADS, FixedLength, Length
from services.bench.prompts import ENDPOINTS

DEFAULT_REQUESTS = 100
DEFAULT_PROMPT: Length = FixedLength(128)
DEFAULT_OUTPUT: Length = FixedLength(64)
BACKGROUND_OUTPUT: Length = FixedLength(512)
"""Long, so that a background stream is decoding nearly all of the time."""
MOST_SCALE = 100_000.0
"""With more a workload's longest prompts would be none (``MOST_TOKENS``)."""


class BenchError(ServiceError):
    """The run cannot go on: the server does not answer, or names no model."""


@dataclass(frozen=True, slots=True)
class BackgroundLoad:
    """Streams that are always decoding: each sends its next request when the one before ends."""

    concurrency: int
    prompt: Length = DEFAULT_PROMPT
    output: Length = BACKGROUND_OUTPUT


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """One run: ``rate_per_s`` (open loop), ``concurrency`` (closed loop), or a trace with its own times."""

    url: str
    model: str | None = None
    endpoint: str = "completions"
    rate_per_s: float | None = None
    concurrency: int | None = None
    arrivals: str = "poisson"
    burstiness: float = POISSON_BURSTINESS
    requests: int | None = None
    duration_s: float | None = None
    prompt: Length = DEFAULT_PROMPT
    output: Length = DEFAULT_OUTPUT
    workload: str | None = None
    length_scale: float = 1.0
    trace: Path | None = None
    trace_scale: float = 1.0
    background: BackgroundLoad | None = None
    objectives: ServiceObjectives | None = None
    seed: int = 0
    warmup: int = 0
    context_tokens: int | None = None
    tokenizer: Path | None = None
    ignores_eos: bool = True
    checks_tokens: bool = True
    temperature: float = 0.0
    extra_body: tuple[tuple[str, object], ...] = ()
    request_timeout_s: float = 600.0
    connect_timeout_s: float = 10.0
    most_in_flight: int = 4096

    @property
    def replays_trace(self) -> bool:
        """The trace's own arrival times are used: neither a rate nor a concurrency was given."""
        return self.trace is not None and self.rate_per_s is None and self.concurrency is None


def check_config(config: BenchConfig) -> None:
    """ConfigError for the first rule that is broken."""
    _check_load(config)
    if config.endpoint not in ENDPOINTS:
        raise ConfigError("--endpoint", config.endpoint, f"must be one of {', '.join(ENDPOINTS)}")
    if config.endpoint == "chat" and config.tokenizer is None:
        raise ConfigError("--endpoint", "chat", "needs --tokenizer DIR to make text of an exact length")
    check_workload(config.workload, config.length_scale, config.trace)
    if config.arrivals not in ARRIVAL_PROCESSES:
        raise ConfigError("--arrivals", config.arrivals, f"must be one of {', '.join(ARRIVAL_PROCESSES)}")
    check_burstiness(config.burstiness, config.arrivals)
    if config.burstiness != POISSON_BURSTINESS and config.rate_per_s is None:
        raise ConfigError("--burstiness", config.burstiness, "is of the arrivals at a --rate")
    if config.context_tokens is not None and config.context_tokens < 2:
        raise ConfigError("--context-tokens", config.context_tokens, "must hold a prompt and an output token")
    _check_not_negative("--warmup", config.warmup)
    _check_not_negative("--seed", config.seed)
    _check_not_negative("--temperature", config.temperature)
    _check_positive("--request-timeout-s", config.request_timeout_s)
    _check_positive("--connect-timeout-s", config.connect_timeout_s)
    _check_positive("--max-in-flight", config.most_in_flight)
    _check_positive("--trace-scale", config.trace_scale)


def check_workload(workload: str | None, length_scale: float, trace: Path | None) -> None:
    """ConfigError for one that is none, and for a scale of nothing."""
    if workload is not None and workload not in WORKLOADS:
        raise ConfigError("--workload", workload, f"must be one of {', '.join(WORKLOADS)}")
    if not 0.0 < length_scale <= MOST_SCALE:
        raise ConfigError("--length-scale", length_scale, f"must be positive, and at most {MOST_SCALE:,g}")
    if length_scale != 1.0 and (workload is None or trace is not None):
        raise ConfigError("--length-scale", length_scale, "scales a --workload without --trace")


def _check_load(config: BenchConfig) -> None:
    if config.rate_per_s is not None and config.concurrency is not None:
        raise ConfigError("--rate", config.rate_per_s, "cannot go together with --concurrency")
    if config.rate_per_s is None and config.concurrency is None and config.trace is None:
        raise ConfigError("--rate", None, "give --rate R, --concurrency C or --trace FILE")
    for key, value in (
        ("--rate", config.rate_per_s),
        ("--concurrency", config.concurrency),
        ("--requests", config.requests),
        ("--duration-s", config.duration_s),
    ):
        if value is not None:
            _check_positive(key, value)
    if config.background is not None:
        _check_positive("--background-concurrency", config.background.concurrency)


def _check_positive(key: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError(key, value, "must be positive")


def _check_not_negative(key: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ConfigError(key, value, "must not be negative")


OBJECTIVE_NAMES = {"ttft": "ttft_s", "tpot": "tpot_s", "tbt": "tbt_s", "e2e": "end_to_end_s"}


def parse_objectives(text: str) -> ServiceObjectives:
    """Read ``ttft=0.5,tpot=0.1`` (seconds; also ``tbt`` for every gap, and ``e2e``)."""
    bounds_s: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in OBJECTIVE_NAMES:
            raise ConfigError("--slo", text, f"knows no {name!r}, but {', '.join(OBJECTIVE_NAMES)}")
        if OBJECTIVE_NAMES[name] in bounds_s:
            raise ConfigError("--slo", text, f"must name each of {', '.join(OBJECTIVE_NAMES)} at most once")
        try:
            bound_s = float(value)
        except ValueError:
            raise ConfigError("--slo", text, f"{name} must be a number of seconds") from None
        if not 0 < bound_s < float("inf"):
            raise ConfigError("--slo", text, f"{name} must be over 0 seconds")
        bounds_s[OBJECTIVE_NAMES[name]] = bound_s
    return ServiceObjectives(**bounds_s)
