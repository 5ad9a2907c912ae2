"""Which requests a simulation or a plan is of: those of a trace, or drawn ones, as long as those that
``lamella bench`` sends for the same options and seed to a server whose context they fit into."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from common.errors import ConfigError
from services.bench.config import check_workload
from services.bench.lengths import WORKLOADS, LengthMix, Workload, parse_length
from services.bench.traces import Trace, TraceRequest, read_trace


@dataclass(frozen=True, slots=True)
class Requested:
    """As the commands' options have it: a trace, a workload, or specifications of both lengths.
    ``requests``: how many; None: the whole trace."""

    trace: Path | None = None
    requests: int | None = None
    workload: Workload | None = None
    length_scale: float = 1.0
    prompt_tokens: str | None = None
    output_tokens: str | None = None


def requests_of(requested: Requested, seed: int) -> Trace:
    """Drawn ones have no arrivals. Raises ConfigError where not just one thing says which they are, and
    TraceError."""
    _check_source(requested)
    if requested.trace is not None:
        return read_trace(requested.trace, requested.requests)
    if requested.requests is None:
        raise ConfigError("--requests", None, "is needed: without --trace nothing says how many there are")
    drawn = islice(_mix_of(requested).draw_all(seed), requested.requests)
    return Trace(tuple(TraceRequest(None, each.prompt_tokens, each.output_tokens) for each in drawn))


def _check_source(requested: Requested) -> None:
    options = {
        "--trace": requested.trace,
        "--workload": requested.workload,
        "--prompt-tokens": requested.prompt_tokens,
        "--output-tokens": requested.output_tokens,
    }
    rule = "give one of --trace, --workload, and --prompt-tokens with --output-tokens"
    match [option for option, value in options.items() if value is not None]:
        case ["--trace"] | ["--workload"] | ["--prompt-tokens", "--output-tokens"]:
            check_workload(requested.workload, requested.length_scale, requested.trace)
        case []:
            raise ConfigError("--trace", None, f"nothing says which requests come: {rule}")
        case ["--prompt-tokens"]:
            raise ConfigError("--output-tokens", None, "is needed beside --prompt-tokens")
        case ["--output-tokens"]:
            raise ConfigError("--prompt-tokens", None, "is needed beside --output-tokens")
        case [first, other, *_]:
            raise ConfigError(other, str(options[other]), f"cannot go together with {first}: {rule}")


def _mix_of(requested: Requested) -> LengthMix:
    if requested.workload is not None:
        return WORKLOADS[requested.workload].scaled(requested.length_scale)
    prompt, output = requested.prompt_tokens, requested.output_tokens
    assert prompt is not None, "it was checked"
    assert output is not None, "it was checked"
    lengths = parse_length("--prompt-tokens", prompt), parse_length("--output-tokens", output)
    return LengthMix(((1.0, *lengths),))
