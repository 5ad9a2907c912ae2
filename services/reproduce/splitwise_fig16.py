"""Splitwise, Figure 16: latencies of clusters of equal power over load, for coding and for conversations.

The figure's values are drawn, not printed: what its text says of them is held against ours.
"""

from services.reproduce.data import CODING_TRACE, CONVERSATION_TRACE, DataFiles, lengths_of
from services.reproduce.row import Reproduced, Row, Table, sentences
from services.reproduce.running import poisson, scaled
from services.reproduce.splitwise_clusters import (
    AA,
    BASELINE_A100,
    BASELINE_H100,
    CODING,
    CONVERSATION,
    CORRECTED,
    HA,
    HH,
    HHCAP,
    ISO_POWER,
    PERF_MODEL,
    PUBLISHED,
    Design,
    Slowdowns,
    slowdowns_of,
)

REQUESTS = 2000
CODING_AA = Design("Splitwise-AA", ("a100", 55), ("a100", 15))
CODING_HH = Design("Splitwise-HH", ("h100", 35), ("h100", 5))
CODING_DESIGNS = (BASELINE_A100, BASELINE_H100, CODING_AA, CODING_HH)
LOADS_RPS = {"coding": (50, 70), "conversation": (70, 130)}

Key = tuple[str, int, Design, bool]
"""(workload, requests a second, design, whether the model is the corrected one)"""


def run(files: DataFiles, size: float) -> Reproduced:
    count = scaled(REQUESTS, size)
    conversation = lengths_of(files, CONVERSATION_TRACE, CONVERSATION, count)
    coding = lengths_of(files, CODING_TRACE, CODING, count)
    found: dict[Key, Slowdowns] = {}
    for workload, lengths, designs in (
        ("coding", coding, CODING_DESIGNS),
        ("conversation", conversation, ISO_POWER),
    ):
        for rps in LOADS_RPS[workload]:
            requests = poisson(lengths.pairs, rps)
            for design in designs:
                for assumed in (PUBLISHED, CORRECTED):
                    key = (workload, rps, design, assumed.is_corrected)
                    found[key] = slowdowns_of(design, requests, files, assumed)
    details = tuple(
        (workload, str(rps), str(design), *_cells(found[workload, rps, design, False]))
        for workload, rps, design, is_corrected in found
        if not is_corrected
    )
    names = ("workload", "requests/s", "machines", "TTFT", "TBT", "E2E", "first broken of the nine")
    title = "Slowdowns P50 / P90 / P99 by the published model"
    return Reproduced(
        (Table(COLUMNS, tuple(_claims(found))), Table(names, details, title)),
        (coding.described, conversation.described, *SETUP),
        ASSUMPTIONS,
        CAUSES,
    )


def _cells(slowdowns: Slowdowns) -> tuple[str, ...]:
    broken = slowdowns.broken
    return (*(slowdowns.text(name) for name in ("TTFT", "TBT", "E2E")), broken[0] if broken else "none")


def _claims(found: dict[Key, Slowdowns]) -> list[tuple[str, ...]]:
    def compare(workload: str, rps: int, designs: tuple[Design, ...], name: str, place: int) -> list[str]:
        texts = []
        for is_corrected in (False, True):
            values = (found[workload, rps, each, is_corrected].of[name][place] for each in designs)
            named = zip(designs, values, strict=True)
            texts.append(", ".join(f"{each.name.removeprefix('Splitwise-')} {at:.2f}" for each, at in named))
        return texts

    shown = (
        (
            "coding, 70 requests/s: TBT P90",
            "Baseline-H100's is high; AA's and HH's (35P, 5T) are better",
            compare("coding", 70, (BASELINE_H100, CODING_AA, CODING_HH), "TBT", 1),
        ),
        (
            "coding, 70 requests/s: TTFT P50",
            "AA's (55P, 15T) is higher than most",
            compare("coding", 70, (CODING_AA, BASELINE_H100, CODING_HH), "TTFT", 0),
        ),
        (
            "conversation, 130 requests/s: E2E P50",
            "HHcap (25P, 21T) does better on all fronts",
            compare("conversation", 130, (HHCAP, BASELINE_H100, HH, HA, AA), "E2E", 0),
        ),
        (
            "conversation, 130 requests/s: TTFT P50",
            "the same: HHcap (25P, 21T) best",
            compare("conversation", 130, (HHCAP, BASELINE_H100, HH, HA, AA), "TTFT", 0),
        ),
        (
            "conversation, 70 requests/s: TBT P90",
            "Splitwise has better latency than Baseline-H100 at 70",
            compare("conversation", 70, (HHCAP, BASELINE_H100, HH), "TBT", 1),
        ),
    )
    return [(what, paper, *ours) for what, paper, ours in shown]


COLUMNS = (
    "slowdown over a request alone on a DGX-A100",
    "paper",
    "ours: published model",
    "ours: corrected model",
)
SETUP = sentences(
    """
BLOOM-176B, Poisson arrivals; performance models as in splitwise-fig18. The paper's counts for coding are
those that its text names.
"""
)
ASSUMPTIONS = sentences(
    """
The figure is drawn: nothing but its text and legends can be compared.

Machines, pools, links and baselines as in splitwise-fig18. 15 to 40 seconds of arrivals, by the rate, in
place of two minutes.
"""
)
CAUSES = sentences(
    """
By the published model every claim comes out in direction: prompts beside decodes make Baseline-H100's
TBT, A100s compute prompts at half the speed, and faster token machines have the least latency.

By the corrected model larger batches cost time: Splitwise's token machines have two to three times
Baseline's sequences a step, and Splitwise-HH's advantage in TBT is gone for conversations; for coding it
stays. A flat TBT is a property of the published model, which looks a step up by its number of sequences
where rows are by prompt size times batch size.

Coding saturates below the paper's loads: at 130 a second the machines would have to compute 270,000
prompt tokens a second, and forty H100 machines compute 325,000 with nothing beside. So it is shown at 50
and 70.
"""
)
ROW = Row(
    id="splitwise-fig16",
    title="latencies over load at equal power",
    source="Splitwise, section VI-B, Figure 16",
    files=(PERF_MODEL, CONVERSATION_TRACE, CODING_TRACE),
    run=run,
)
