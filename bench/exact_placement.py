"""How many decode instances rules use beside the fewest that would do, by Aladdin's program (4.2).

Batches of requests come to empty instances; lengths are drawn as chats' are, log-normal, and known, so that
what is compared is the placing alone. No IO.

    python bench/exact_placement.py [--batches 40] [--requests 12,24] [--instances 12] [--seed 0]
"""

import argparse
import random
import statistics
import time
from dataclasses import replace

from common.config import DecodePolicy
from common.ids import InstanceId
from common.lengths import certain
from common.performance import FittedTime
from scheduler.policy.best_fit import Growth
from scheduler.policy.candidates import Arrival, DecodeCandidate, Objectives
from scheduler.policy.dispatch import DECODE_POLICIES, choose
from services.explaining.exact_placement import ExactPlacement, Worker, place_exactly

CAPACITY_TOKENS = 4096
STEP = FittedTime((4.75e-3, 3.35e-3, 0.0206), 0.0, 1000)
"""What `lamella profile` found of the default model on two cores."""
OBJECTIVES = Objectives(ttft_s=2.0, tpot_s=0.06)
MOST_TOKENS = 1500


def drawn_requests(lots: random.Random, count: int) -> list[Growth]:
    def tokens(median: float, sigma: float) -> float:
        return float(min(MOST_TOKENS, max(4, round(median * lots.lognormvariate(0, sigma)))))

    return [(tokens(250, 1.0), tokens(200, 0.8)) for _ in range(count)]


def instances_used(policy: DecodePolicy, instances: int, requests: list[Growth]) -> tuple[int, int]:
    """How many, and how many requests went where a constraint was broken."""
    loads = {
        InstanceId(f"d{index:02}"): DecodeCandidate(
            InstanceId(f"d{index:02}"), 0, 0, CAPACITY_TOKENS, 0.0, 0, STEP, ()
        )
        for index in range(instances)
    }
    broken = 0
    for number, (prompt_tokens, output_tokens) in enumerate(requests):
        arrival = Arrival(number, number, int(prompt_tokens), 0, certain(int(output_tokens)))
        candidates = [*loads.values()]
        taken = choose(DECODE_POLICIES[policy](candidates, arrival, OBJECTIVES))
        assert taken is not None
        scored = DECODE_POLICIES["best_fit"](candidates, arrival, OBJECTIVES)
        verdict = next(each for each in scored if each.instance_id == taken.instance_id)
        broken += verdict.refusal is not None or verdict.note is not None
        load = loads[taken.instance_id]
        loads[taken.instance_id] = replace(
            load,
            requests=load.requests + 1,
            context_tokens=load.context_tokens + int(prompt_tokens),
            coming_tokens=load.coming_tokens + output_tokens,
            sequences=(*(load.sequences or ()), (prompt_tokens, output_tokens)),
        )
    return sum(load.requests > 0 for load in loads.values()), broken


def solved(instances: int, requests: list[Growth]) -> tuple[ExactPlacement | None, float]:
    """And in how many seconds."""
    workers = [
        Worker(DecodeCandidate(InstanceId(f"d{index:02}"), 0, 0, CAPACITY_TOKENS, 0.0, 0, STEP, ()))
        for index in range(instances)
    ]
    began_s = time.perf_counter()
    return place_exactly(workers, requests, OBJECTIVES.tpot_s), time.perf_counter() - began_s


def compare(batches: int, count: int, instances: int, seed: int) -> None:
    lots = random.Random(seed)
    batched = [drawn_requests(lots, count) for _ in range(batches)]
    answers = [solved(instances, requests) for requests in batched]
    kept = [
        (requests, exact) for requests, (exact, _) in zip(batched, answers, strict=True) if exact is not None
    ]
    proved = sum(exact.is_proved for _, exact in kept)
    fewest = statistics.mean(exact.used for _, exact in kept)
    seconds = sorted(taken_s for _, taken_s in answers)
    print(
        f"{count} requests: the program uses {fewest:.2f} instances ({proved} of {batches} proved, p50"
        f" {seconds[len(seconds) // 2]:.2f} s, most {seconds[-1]:.1f} s)"
    )
    for policy in DECODE_POLICIES:
        found = [instances_used(policy, instances, requests) for requests, _ in kept]
        used = statistics.mean(each for each, _ in found)
        as_few = sum(each == exact.used for (each, _), (_, exact) in zip(found, kept, strict=True))
        broken = sum(each for _, each in found)
        print(
            f"  {policy:17}: {used:.2f} instances, {used / fewest:.3f} x, as few in {as_few} of {len(kept)};"
            f" {broken} placements broke a constraint"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--requests", default="12,24")
    parser.add_argument("--instances", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for count in options.requests.split(","):
        compare(options.batches, int(count), options.instances, options.seed)


if __name__ == "__main__":
    main()
