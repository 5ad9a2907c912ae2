"""Splitwise, Figure 18: throughput of clusters of equal power, and of equal cost, under nine objectives."""

from services.reproduce.data import CONVERSATION_TRACE, DataFiles, Lengths, lengths_of
from services.reproduce.row import Reproduced, Row, Table, sentences
from services.reproduce.running import largest_rate, poisson, scaled
from services.reproduce.splitwise_clusters import (
    AA,
    BASELINE_A100,
    BASELINE_H100,
    CONVERSATION,
    CORRECTED,
    HA,
    HHCAP,
    ISO_POWER,
    PERF_MODEL,
    PUBLISHED,
    SCALE,
    Assumed,
    Design,
    slowdowns_of,
)

REQUESTS = 800
LOWEST_RPS, HIGHEST_RPS, STEP = 4.0, 32.0, 0.08
AA_ISO_COST = Design("Splitwise-AA, equal cost", ("a100", 12), ("a100", 6))
"""90 machines for Baseline-H100's 40, in the parts of 45 : 25."""
CLAIMS = (
    ("equal power: Splitwise-AA over Baseline-A100", "2.15", AA, BASELINE_A100),
    ("equal power, 10 % less cost: Splitwise-HA over Baseline-H100", "1.18", HA, BASELINE_H100),
    ("equal power: the best Splitwise over Baseline-A100", "2.35", HHCAP, BASELINE_A100),
    ("equal cost: Splitwise-AA over Baseline-H100", "1.4", AA_ISO_COST, BASELINE_H100),
)


def capacity(design: Design, lengths: Lengths, files: DataFiles, assumed: Assumed) -> tuple[float, str]:
    """The most requests a second that keep the nine objectives, and which breaks first above it."""
    broken: dict[float, str] = {}

    def is_served(rate: float) -> bool:
        found = slowdowns_of(design, poisson(lengths.pairs, rate), files, assumed).broken
        if found:
            broken[rate] = found[0]
        return not found

    rate = largest_rate(is_served, LOWEST_RPS, HIGHEST_RPS, STEP)
    return rate, broken[min(broken)] if broken else "none"


def run(files: DataFiles, size: float) -> Reproduced:
    lengths = lengths_of(files, CONVERSATION_TRACE, CONVERSATION, scaled(REQUESTS, size))
    found: dict[tuple[str, bool], float] = {}
    details = []
    for design in (*ISO_POWER, AA_ISO_COST):
        cells = [str(design), f"{SCALE * design.power:.0f}", f"{SCALE * design.cost:.0f}"]
        for assumed in (PUBLISHED, CORRECTED):
            rate, limit = capacity(design, lengths, files, assumed)
            found[design.name, assumed.is_corrected] = rate
            cells.append(f"{SCALE * rate:.0f}, {limit}")
        details.append(tuple(cells))

    def ratio(design: Design, baseline: Design, is_corrected: bool) -> str:
        base = found[baseline.name, is_corrected]
        return f"{found[design.name, is_corrected] / base:.2f}" if base else "- (the baseline serves none)"

    rows = tuple(
        (what, paper, ratio(design, base, False), ratio(design, base, True))
        for what, paper, design, base in CLAIMS
    )
    columns = ("throughput", "paper", "ours: published model", "ours: corrected model")
    more = ("machines", "power", "cost", "published: requests/s, limit", "corrected: requests/s, limit")
    title = "Power and cost in DGX-A100s, and requests a second, of five times these machines"
    return Reproduced(
        (Table(columns, rows), Table(more, tuple(details), title)),
        (lengths.described, *SETUP),
        ASSUMPTIONS,
        CAUSES,
    )


SETUP = sentences(
    """
BLOOM-176B on Splitwise's published performance model; a fifth of the paper's machines at a fifth of its
rates, Poisson arrivals. Searched: the largest rate, to 8 %, at which all nine objectives of Table VI
hold, each request beside itself alone on a DGX-A100.

"Corrected" takes the same measurements, with a decode step's time by its batch and context
(performance-models.md); the published model looks it up by the number of sequences in medians over prompt
size times batch size, so that 64 sequences cost as much as one.
"""
)
ASSUMPTIONS = sentences(
    """
A fifth of the machines: five queues even out less than twenty-five, which costs every design some of its
rate. Counts are rounded (HHcap's 21 token machines are 20, HA's 26 are 25).

Machines move between pools by `[roles] policy = "overflow"` with its defaults, not request by request
into a mixed pool. KV leaves a machine in turns; in splitwise-sim each transfer has a link of its own.

Baselines compute decodes with chunks of prompts in passes of 2,048 tokens, theirs whole prompts.

For equal cost the paper prints no machine counts: 25 % more power and twice the space are about 90. The
2.35 is the abstract's, of no named design: Splitwise-HHcap's here.
"""
)
CAUSES = sentences(
    """
With the published model the ratios come near the paper's. What is left comes from Baseline-A100, which
here breaks the P90 of TBT first, from chunks beside its decodes, and from P99 of TTFT, which bounds every
Splitwise design: a fifth of the machines even out bursts less.

With the corrected model the gains of A100s as token machines are gone. The P50 objective lets a token
take 1.25 times as long as alone on a DGX-A100, and by the paper's own measurements a batch of more than a
few sequences takes longer than that on an A100: Splitwise-AA and -HA stop at their P50 of TBT. That a
batch costs nothing is in the published model alone. Faster token machines keep their gain:
Splitwise-HHcap serves more than Baseline-H100 by either.
"""
)
ROW = Row(
    id="splitwise-fig18",
    title="throughput at equal power and at equal cost",
    source="Splitwise, sections VI-B and VI-C, Figure 18, Table VI",
    files=(PERF_MODEL, CONVERSATION_TRACE),
    run=run,
)
