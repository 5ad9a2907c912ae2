"""DistServe, Table 2: SLO attainment over the rate, of vLLM and of DistServe."""

from common.latency import ServiceObjectives
from services.reproduce.data import SHAREGPT_TRACE, DataFiles
from services.reproduce.distserve_servers import (
    CONSTANTS,
    NEAR_PAPER,
    Server,
    lengths_near_paper,
    longest_prompt,
    real_lengths,
    tree_of,
)
from services.reproduce.row import Reproduced, Row, Table, sentences
from services.reproduce.running import poisson, run_metrics, scaled

REQUESTS = 400
OBJECTIVES = ServiceObjectives(ttft_s=0.2, tpot_s=0.1)
VLLM, ONE_EACH, TWO_AND_ONE = (
    Server("vLLM", "opt-13b", 1),
    Server("DistServe", "opt-13b", 1, 1),
    Server("DistServe", "opt-13b", 2, 1),
)
PRINTED = {
    1.0: (97.0, 96.8, 100.0, 100.0),
    1.5: (65.5, 65.1, 100.0, 100.0),
    2.0: (52.8, 51.0, 99.3, 99.3),
    2.5: (44.9, 46.1, 87.3, 88.3),
    3.0: (36.7, 38.3, 83.0, 84.1),
    3.5: (27.8, 28.0, 77.3, 77.0),
    4.0: (23.6, 24.1, 70.0, 68.9),
}
"""By rate: vLLM's real and simulated attainment, DistServe-Low's, per cent."""


def run(files: DataFiles, size: float) -> Reproduced:
    count = scaled(REQUESTS, size)
    near, real = lengths_near_paper(files, count), real_lengths(files, count)
    rows = []
    for rate, printed in PRINTED.items():
        for server, (measured, simulated) in (
            (VLLM, printed[:2]),
            (ONE_EACH, printed[2:]),
            (TWO_AND_ONE, printed[2:]),
        ):
            shares = []
            for lengths in (near, real):
                requests = poisson(lengths.pairs, rate * server.gpus)
                found = run_metrics(tree_of(server, files), requests, OBJECTIVES).attainment
                shares.append("-" if found is None else f"{100 * found.share:.1f}")
            rows.append((f"{rate:g}", str(server), f"{measured:.1f}", f"{simulated:.1f}", *shares))
    bounds = []
    for server, printed_share in ((VLLM, 97.0), (ONE_EACH, 100.0), (TWO_AND_ONE, 100.0)):
        longest = longest_prompt(server, files, 0.2)
        over = [
            sum(each.prompt_tokens > longest for each in some.pairs) / len(some.pairs)
            for some in (near, real)
        ]
        bounds.append(
            (
                str(server),
                f"{longest:,}",
                f"{100 - printed_share:.1f}",
                *(f"{100 * each:.1f}" for each in over),
            )
        )
    return Reproduced(
        (
            Table(COLUMNS, tuple(rows), "Requests within TTFT 0.2 s and TPOT 0.1 s, per cent"),
            Table(BOUNDS, tuple(bounds), "Prompts that alone take over 0.2 s, by DistServe's constants"),
        ),
        (near.described, real.described, *SETUP),
        ASSUMPTIONS,
        CAUSES,
    )


COLUMNS = (
    "requests/s a GPU",
    "server",
    "paper",
    "its simulator",
    "ours: lengths near its means",
    "ours: real ShareGPT lengths",
)
BOUNDS = (
    "server",
    "longest prompt in time, tokens",
    "at most over it by the table, %",
    "over it near the paper's means, %",
    "over it of real lengths, %",
)
SETUP = sentences(
    """
OPT-13B on A100-80G with the constants of DistServe's own simulator, Poisson arrivals. DistServe-Low's
placement is not printed: one GPU for each phase, and two for prompts, which its search chooses for these
lengths.
"""
)
ASSUMPTIONS = sentences(
    """
The table names neither the model nor whether its rates are per GPU: taken for OPT-13B, of which its
section is, and per GPU, as in Figures 8 and 11.

The paper's sample of ShareGPT is not published, only its means (755.5 and 200.3 tokens). KV moves in no
time and no memory is counted, as in its simulator.
"""
)
CAUSES = sentences(
    """
At 1 request a second nobody queues, and what misses is a prompt that alone takes over 0.2 s. By
DistServe's own constants that is every one over 1,166 tokens for vLLM: a fifth of prompts with the
paper's mean. The table's 97.0 leaves room for 3 %, DistServe's 100.0 for none: so the table's prompts,
objectives or engine were not those of section 6.1 with these constants. Which, the paper does not say.

With real lengths, a quarter as long, that bound is nearly met (96.2 against 97.0), but then a GPU is
hardly loaded at the rates of the table, and attainment stays.

Near the paper's means DistServe with two prompt GPUs has the table's attainment from 2.5 to 3.5 within 6
points, and vLLM its own from 1.5 to 3.5 within 17; the table's fall from 97.0 to 65.5 between 1 and 1.5
is in none of ours.

At over 3 requests a second a GPU two prompt GPUs feed one decode GPU more than it computes: the longer
the run, the fewer meet their TPOT (at 3 85.0 % of 400 requests, and 56.5 % of 600).
"""
)
ROW = Row(
    id="distserve-table2",
    title="SLO attainment over the rate",
    source="DistServe, section 6.4, Table 2",
    files=(*CONSTANTS.values(), NEAR_PAPER, SHAREGPT_TRACE),
    run=run,
)
