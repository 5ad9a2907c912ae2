"""Whether a trace is long enough for the rate that is asked for, and as bursty as what is simulated.

Who is there late in a run is compared with who was there earlier (``Point.left_share``): in one that is over
while its first requests are still there, they become more and more whatever serves them, and any deployment
would pass for one that cannot keep up.
"""

import math
from collections.abc import Sequence

import numpy as np

from common.errors import ConfigError
from services.bench.arrivals import make_arrivals
from services.bench.traces import TraceRequest
from services.planner.preparing import Prepared, speeds_of
from services.planner.simulating import left_share
from services.simulator.performance.files import FloatArray
from services.simulator.records import Records
from services.simulator.shape import PassShape
from services.simulator.slowdowns import prompt_alone_s

STAYS = 4.0
"""That arrivals should last: ``left_share`` looks from a quarter of them on."""

LESS_BURSTY = 0.8
"""From which share of its burstiness on a trace is not taken for Poisson's."""


def check_length(prepared: Prepared) -> None:
    """Raises ConfigError where even requests that nobody else delays would pass for a backlog that grows, or
    where the last one comes before others go: then none could."""
    demand, rows = prepared.demand, prepared.conditions.rows
    if demand.objective == "throughput":
        return
    prompt_s, step_s = _quickest_s(prepared)
    stays_s = np.array([prompt_s * row.prompt_tokens + step_s * (row.output_tokens - 1) for row in rows])
    records = Records()
    conditions = prepared.conditions
    arrivals = make_arrivals("poisson", demand.rate_per_s, conditions.seed, conditions.burstiness)
    for number, (row, stay_s, arrival_s) in enumerate(zip(rows, stays_s, arrivals, strict=False)):
        records.begin(arrival_s, row.prompt_tokens, row.output_tokens)
        records.end(number, "done", arrival_s + float(stay_s))
    if left_share(records) <= 0 and len(rows) / demand.rate_per_s > stays_s.mean():
        return
    # Of those who are there at any time: who stays longer is there more often.
    needed_s = STAYS * float((stays_s**2).sum() / stays_s.sum())
    rule = (
        f"is too much for {len(rows)} requests: they come within {len(rows) / demand.rate_per_s:.3g} s and"
        f" stay for {stays_s.mean():.3g} s even where none waits, so that no run says whether work piles up"
        f" ({_longest(rows, stays_s)}): arrivals must last {needed_s:.3g} s:"
        f" {math.ceil(needed_s * demand.rate_per_s)} requests"
        f" (a longer trace, --requests), or at most {len(rows) / needed_s:.3g}/s"
    )
    raise ConfigError("--rate", demand.rate_per_s, rule)


def _longest(rows: Sequence[TraceRequest], stays_s: FloatArray) -> str:
    number = int(stays_s.argmax())
    tokens = f"{rows[number].prompt_tokens:,} + {rows[number].output_tokens:,} tokens"
    return f"longest number {number + 1}, of {tokens}, for {stays_s[number]:.3g} s"


def caveat_of(prepared: Prepared) -> str | None:
    """What to keep in mind of few requests, by how long one stays that just keeps its objectives: with them
    as long as that, as with others that nobody delays in ``check_length``. None: there are enough."""
    demand, rows = prepared.demand, prepared.conditions.rows
    objectives = demand.objectives
    token_s = objectives.tpot_s if objectives.tpot_s is not None else objectives.tbt_s
    if demand.objective == "throughput" or objectives.ttft_s is None or token_s is None:
        return None
    stays_s = objectives.ttft_s + token_s * np.array([row.output_tokens - 1 for row in rows])
    stay_s = float((stays_s**2).sum() / stays_s.sum())
    needed = math.ceil(STAYS * stay_s * demand.rate_per_s)
    if len(rows) >= needed:
        return None
    return (
        f"of so few requests more instances may be counted than it takes, or fewer: these {len(rows):,} come"
        f" within {len(rows) / demand.rate_per_s:.3g} s, and those that just keep their objectives stay for"
        f" {stay_s:.3g} s, which passes for work that piles up; {needed:,} would say"
    )


def bursts_of(prepared: Prepared) -> str | None:
    """Where a trace's own arrivals are burstier than those that runs have."""
    own, assumed = prepared.workload.burstiness, prepared.conditions.burstiness
    if own is None or own > LESS_BURSTY * assumed:
        return None
    return (
        f"the trace's own arrivals are burstier than those simulated: gaps deviate by {own**-0.5:.2g} times"
        f" their mean, where {assumed**-0.5:.2g} was assumed; --burstiness {own:.2g} plans for such"
    )


def _quickest_s(prepared: Prepared) -> tuple[float, float]:
    """Of a prompt's token and of a step, each alone on the kind that is quickest at it."""
    workload = prepared.workload
    kinds = [kind for role in prepared.kinds for kind in role]
    speeds = speeds_of(prepared, kinds)
    prompt_tokens, context_tokens = (
        max(1, round(each)) for each in (workload.prompt_tokens, workload.context_tokens)
    )
    prompt_s = min(
        prompt_alone_s(speeds[kind].performance, prompt_tokens, None)
        for kind in kinds
        if kind.role != "decode"
    )
    step_s = min(
        speeds[kind].performance.pass_s(PassShape((), 1, context_tokens))
        for kind in kinds
        if kind.role != "prefill"
    )
    return prompt_s / prompt_tokens, step_s
