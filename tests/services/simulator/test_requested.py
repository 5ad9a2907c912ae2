"""Which requests a simulation is of: a trace's, or those that a benchmark would send."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from services.bench.config import BenchConfig
from services.bench.lengths import WORKLOADS, parse_length
from services.bench.plan import FOREGROUND, RequestMaker, make_arrivals_s, make_foreground, plan_foreground
from services.bench.prompts import BodyTemplate, TokenIdPrompts
from services.simulator.requested import Requested, requests_of
from services.simulator.run import offered_of

ONE_SOURCE = "give one of --trace, --workload, and --prompt-tokens with --output-tokens"


def sent_by_bench(**options: Any) -> list[tuple[float, int, int]]:
    """When each request is due and how long it is, nobody cutting it."""
    config = BenchConfig("http://127.0.0.1:9", **options)
    plan = plan_foreground(config)
    maker = RequestMaker(FOREGROUND, TokenIdPrompts(config.seed), BodyTemplate("completions", "m"), None)
    made = make_foreground(config, plan, maker)
    return [
        (due_s, each.prompt_tokens, each.output_tokens)
        for due_s, each in zip(make_arrivals_s(config, plan), made, strict=False)
    ]


def simulated(
    requested: Requested, rate_per_s: float, arrivals: str, seed: int
) -> list[tuple[float, int, int]]:
    offered = offered_of(requests_of(requested, seed), rate_per_s, arrivals, seed)
    return [(each.arrival_s, each.prompt_tokens, each.output_tokens) for each in offered]


@pytest.mark.parametrize("workload", list(WORKLOADS))
@pytest.mark.parametrize(("scale", "arrivals"), [(1.0, "poisson"), (0.35, "fixed")])
def test_a_workloads_requests_are_those_that_bench_sends(workload: str, scale: float, arrivals: str) -> None:
    found = simulated(Requested(requests=40, workload=workload, length_scale=scale), 3.0, arrivals, 7)
    assert found == sent_by_bench(
        workload=workload, length_scale=scale, requests=40, rate_per_s=3.0, arrivals=arrivals, seed=7
    )


def test_lengths_are_those_that_bench_draws() -> None:
    prompt, output = "lognormal:100:0.5:4:2000", "8:64"
    found = simulated(Requested(requests=40, prompt_tokens=prompt, output_tokens=output), 3.0, "poisson", 7)
    assert found == sent_by_bench(
        prompt=parse_length("", prompt), output=parse_length("", output), requests=40, rate_per_s=3.0, seed=7
    )


def test_the_seed_says_which_are_drawn_and_more_begin_with_the_same() -> None:
    first, again, other = (
        requests_of(Requested(requests=30, workload="mixed"), seed).requests for seed in (1, 1, 2)
    )
    assert first == again != other
    more = requests_of(Requested(requests=60, workload="mixed"), 1).requests
    assert tuple(islice(more, 30)) == first


@pytest.mark.parametrize(
    ("requested", "said"),
    [
        (Requested(requests=5), f"--trace is not set: nothing says which requests come: {ONE_SOURCE}"),
        (
            Requested(Path("a.csv"), workload="lpld"),
            f"--workload = 'lpld': cannot go together with --trace: {ONE_SOURCE}",
        ),
        (
            Requested(Path("a.csv"), prompt_tokens="8", output_tokens="8"),
            f"--prompt-tokens = '8': cannot go together with --trace: {ONE_SOURCE}",
        ),
        (
            Requested(workload="lpld", output_tokens="8"),
            f"--output-tokens = '8': cannot go together with --workload: {ONE_SOURCE}",
        ),
        (
            Requested(prompt_tokens="8", requests=5),
            "--output-tokens is needed beside --prompt-tokens",
        ),
        (
            Requested(output_tokens="8", requests=5),
            "--prompt-tokens is needed beside --output-tokens",
        ),
        (
            Requested(workload="lpld"),
            "--requests is needed: without --trace nothing says how many",
        ),
        (Requested(workload="LPLD", requests=5), "--workload = 'LPLD': must be one of lpld, lphd, hpld"),
        (Requested(workload="lpld", length_scale=0.0), "--length-scale = 0.0: must be positive"),
        (Requested(workload="lpld", length_scale=1e300), "--length-scale = 1e+300: must be positive, and at"),
        (
            Requested(Path("a.csv"), length_scale=0.5),
            "--length-scale = 0.5: scales a --workload without --tra",
        ),
        (
            Requested(prompt_tokens="8", output_tokens="9:8", requests=5),
            "--output-tokens = '9:8': must be N >= 1, or LOW:HIGH with 1 <= LOW <= HIGH, of at most 1,000",
        ),
    ],
)
def test_one_thing_says_which_requests_come(requested: Requested, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        requests_of(requested, 0)
    assert str(caught.value).startswith(said)
