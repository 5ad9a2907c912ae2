"""How many requests a CPU second simulates, through the decisions that run live.

A mesh of ``--prefill`` and ``--decode`` instances of LLaMA3-70B, each of eight H100s, under a trace at its
own arrival times, with a linear model of performance: near what splitwise-sim's table has for that model and
machine, and on links as fast as its. Load reports, hand-over in portions and every policy are as configured
by default; prompts are handed over when they are computed, as in splitwise-sim.

    python bench/simulator_speed.py TRACE [--requests N] [--prefill 25] [--decode 15] [--profile]

It runs compiled where `lamella compile` was called; LAMELLA_COMPILED= (empty) has it interpreted.

With ``--rate`` requests come at random at that rate, and the trace's lengths again and again: as many
``--requests`` as one wants.

``--mesh FILE`` in place of that mesh: one of others' runs, say, as `lamella simulate` reads it. To read it
and to train its estimators is not counted, but their tables are, which grow as they are asked. With
``--warm`` they are there, as those of simulators are that make all of theirs beforehand: the run that is
counted is the second of the same. MiB are of both.

    python bench/simulator_speed.py TRACE --mesh bench/vidur_34b.toml --warm
"""

import argparse
import cProfile
import gc
import pstats
import resource
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import services.simulator.run as run_module
from services.bench.arrivals import make_arrivals
from services.bench.traces import Trace, read_trace
from services.compiling.entering import begin_compiled
from services.simulator.config import Simulated, load_simulated, simulated_from_tree
from services.simulator.metrics import measure
from services.simulator.run import Load, Offered, offered_of, simulate

PERFORMANCE = {
    "kind": "linear",
    "prefill_s": 0.02,
    "per_prompt_token_s": 6e-5,
    "step_s": 0.03,
    "per_sequence_s": 2e-5,
    "per_context_token_s": 1e-8,
}
PREFILL, DECODE = 25, 15
NEVER_LAYERWISE = 1_000_000


def mesh_of(prefill: int, decode: int) -> Simulated:
    pools = [
        {
            "name": role,
            "role": role,
            "count": count,
            "device": "h100",
            "devices": 8,
            "performance": PERFORMANCE,
        }
        for role, count in (("prefill", prefill), ("decode", decode))
    ]
    return simulated_from_tree(
        {
            "cluster": {"model": "llama3-70b", "link_bytes_per_s": 200 * float(1 << 30)},
            "instance": {"chunk_tokens": 2048, "max_decode_batch": 512},
            "transfer": {"layerwise_min_tokens": NEVER_LAYERWISE},
            "pool": pools,
        }
    )


def offered(trace: Trace, rate_per_s: float | None, requests: int) -> Iterator[Offered]:
    if rate_per_s is None:
        yield from offered_of(trace, None, "poisson", 0)
        return
    times = islice(make_arrivals("poisson", rate_per_s, 0), requests)
    for row, time_s in zip(cycle(trace.requests), times, strict=False):
        yield Offered(time_s, row.prompt_tokens, row.output_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=None)
    parser.add_argument("--rate", type=float, default=None)
    parser.add_argument("--prefill", type=int, default=None, help="25")
    parser.add_argument("--decode", type=int, default=None, help="15")
    parser.add_argument("--mesh", type=Path, default=None)
    parser.add_argument("--warm", action="store_true", help="Count the second of two runs.")
    parser.add_argument("--profile", action="store_true", help="Also print where the time goes.")
    options = parser.parse_args()
    if options.mesh and (options.prefill or options.decode):
        parser.error("--prefill and --decode are of the bench's own mesh, not of --mesh")
    begin_compiled()
    trace = read_trace(options.trace, options.requests)
    requests = options.requests if options.rate and options.requests else len(trace.requests)
    own = options.prefill or PREFILL, options.decode or DECODE
    simulated = load_simulated(options.mesh) if options.mesh else mesh_of(*own)
    if options.warm:
        simulate(simulated, Load(offered(trace, options.rate, requests)))
        gc.collect()
    profile = cProfile.Profile(time.process_time)
    began_s = time.process_time()
    if options.profile:
        profile.enable()
    cluster = simulate(simulated, Load(offered(trace, options.rate, requests)))
    profile.disable()
    taken_s = time.process_time() - began_s
    reports = sum(each.reports for each in cluster.instances.values())
    passes = sum(each.engine.passes for each in cluster.instances.values())
    steps = sum(each.decode.drawing.steps for each in cluster.instances.values())
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    metrics = measure(cluster)
    print(
        f"{'interpreted' if run_module.__file__.endswith('.py') else 'compiled'}: "
        f"{requests} requests in {taken_s:.2f} CPU seconds: {requests / taken_s:,.0f} a second;"
        f" {cluster.clock.events / requests:.1f} events, {reports / requests:.1f} load reports and"
        f" {passes / requests:.1f} runs of the engine a request, for {steps / requests:.1f} decode steps;"
        f" {peak_mib:.0f} MiB; records {metrics.digest[:16]}"
    )
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
