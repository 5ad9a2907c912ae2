"""Queues whose means are known: the simulated ones come near them."""

import heapq
import math
import random

import pytest

from services.bench.arrivals import poisson_arrivals
from services.simulator.metrics import measure
from services.simulator.run import Load, Offered, simulate
from tests.services.simulator.meshes import mesh, pool

REQUESTS = 3000


@pytest.mark.parametrize("utilisation", [0.3, 0.6, 0.8])
def test_one_prefill_instance_of_equal_prompts_is_an_m_d_1_queue(utilisation: float) -> None:
    """Pollaczek and Khinchine: who comes waits ρ·D / (2·(1 − ρ)) on average (DistServe 3.1, eq. 1)."""
    service_s = 0.01 + 100e-4
    arrivals = poisson_arrivals(utilisation / service_s, seed=7)
    load = Load([Offered(next(arrivals), 100, 1) for _ in range(REQUESTS)])
    simulated = mesh(
        pool("prefill", kv_tokens=10_000_000),
        pool("decode"),
        instance={"chunk_tokens": 100, "max_waiting_requests": 100_000},
        scheduler={"max_pending_prefill_tokens": 10_000_000, "max_requests_per_decode": 100_000},
    )
    ttft = measure(simulate(simulated, load)).ttft
    assert ttft is not None
    waited_s = ttft.mean_s - service_s
    assert waited_s == pytest.approx(utilisation * service_s / (2 * (1 - utilisation)), rel=0.1)


def test_deferred_prefill_instances_with_exponential_prompts_are_an_m_m_c_queue() -> None:
    """One queue at the scheduler, three that serve (Erlang's C)."""
    servers, mean_tokens, utilisation, token_s = 3, 5000, 0.7, 1e-3
    chance = random.Random(11)
    mean_s = mean_tokens * token_s
    arrivals = poisson_arrivals(utilisation * servers / mean_s, seed=13)
    requests = [
        Offered(next(arrivals), max(1, round(chance.expovariate(1 / mean_tokens))), 1)
        for _ in range(REQUESTS)
    ]
    jobs = [(each.arrival_s, each.prompt_tokens * token_s) for each in requests]
    performance = {"kind": "linear", "prefill_s": 0.0, "per_prompt_token_s": token_s, "step_s": 0.01}
    simulated = mesh(
        pool("prefill", servers, performance=performance, kv_tokens=100_000),
        pool("decode"),
        instance={"chunk_tokens": 100_000},
        transfer={"layerwise_min_tokens": 1_000_000},
        scheduler={
            "prefill_policy": "deferred",
            "bind_below_tokens": 1,
            "max_deferred_requests": 100_000,
            "max_requests_per_decode": 100_000,
            "max_prefill_wait_s": 1e9,
        },
    )
    ttft = measure(simulate(simulated, Load(requests))).ttft
    assert ttft is not None
    waited_s = ttft.mean_s - math.fsum(served_s for _, served_s in jobs) / REQUESTS
    # Of these very arrivals; an instance that is free again is known to be so a report later.
    assert waited_s == pytest.approx(mean_wait_s(jobs, servers), rel=0.02)
    offered = utilisation * servers
    tail = offered**servers / math.factorial(servers) / (1 - utilisation)
    waits = tail / (sum(offered**each / math.factorial(each) for each in range(servers)) + tail)
    # And of all that could be: so many requests are off by a tenth and more.
    assert waited_s == pytest.approx(waits * mean_s / (servers * (1 - utilisation)), rel=0.3)


def mean_wait_s(jobs: list[tuple[float, float]], servers: int) -> float:
    """Of (arrival, service) in seconds, each served by who is free first (Kiefer and Wolfowitz)."""
    free_s, waited_s = [0.0] * servers, []
    for arrival_s, served_s in jobs:
        began_s = max(arrival_s, heapq.heappop(free_s))
        heapq.heappush(free_s, began_s + served_s)
        waited_s.append(began_s - arrival_s)
    return math.fsum(waited_s) / len(waited_s)


def test_a_batch_that_comes_together_ends_after_its_steps() -> None:
    """A batch server: every step serves all, and takes what its size and its context say."""
    batch, prompt, output = 32, 64, 100
    simulated = mesh(
        pool("mixed"),
        instance={"chunk_tokens": batch * prompt, "scheduling_window": batch, "max_decode_batch": batch},
    )
    # While the first prompt is computed the others come: one chunk takes them all.
    load = Load([Offered(0.0, prompt, 1), *[Offered(0.001, prompt, output)] * batch])
    records = simulate(simulated, load).records
    [first_s] = {*records.first_token_s[1:]}
    together_s = sum(step_s(batch, batch * (prompt + 1 + step)) for step in range(output - 1))
    ends_s = [end_s - first_s for end_s in records.end_s[1:]]
    assert ends_s == pytest.approx([together_s] * batch)


def step_s(sequences: int, context_tokens: int) -> float:
    return 0.02 + 1e-4 * sequences + 1e-6 * context_tokens


STATIC = {"mixed_policy": "static", "max_waiting_requests": 100_000}
PATIENT = {"max_pending_prefill_tokens": 10_000_000, "max_requests_per_decode": 100_000}


@pytest.mark.parametrize("utilisation", [0.4, 0.8])
def test_static_batches_of_one_are_an_m_d_1_queue_of_whole_requests(utilisation: float) -> None:
    """Nobody's prompt is computed before the last one's output has ended."""
    prompt, output = 100, 20
    first_s = 0.01 + prompt * 1e-4
    whole_s = first_s + math.fsum(step_s(1, prompt + 1 + step) for step in range(output - 1))
    arrivals = poisson_arrivals(utilisation / whole_s, seed=7)
    load = Load([Offered(next(arrivals), prompt, output) for _ in range(REQUESTS)])
    simulated = mesh(pool("mixed"), instance={**STATIC, "max_decode_batch": 1}, scheduler=PATIENT)
    ttft = measure(simulate(simulated, load)).ttft
    assert ttft is not None
    waited_s = ttft.mean_s - first_s
    assert waited_s == pytest.approx(utilisation * whole_s / (2 * (1 - utilisation)), rel=0.12)


def test_static_batches_begin_when_the_last_one_has_ended_with_those_that_came_meanwhile() -> None:
    """A bulk queue: whoever is there by then is served together, eight at most."""
    batch, prompt, output, requests = 8, 100, 20, 400
    arrivals = poisson_arrivals(10.0, seed=17)
    arrived_s = [next(arrivals) for _ in range(requests)]
    simulated = mesh(
        pool("mixed"),
        instance={**STATIC, "max_decode_batch": batch, "chunk_tokens": batch * prompt},
        scheduler=PATIENT,
    )
    load = Load([Offered(each, prompt, output) for each in arrived_s])
    firsts_s, sizes = bulk_first_s(arrived_s, batch, prompt, output)
    assert {*sizes} >= {1, batch}, "it is idle at times, and full"
    assert list(simulate(simulated, load).records.first_token_s) == pytest.approx(firsts_s)


def bulk_first_s(
    arrived_s: list[float], batch: int, prompt: int, output: int
) -> tuple[list[float], list[int]]:
    """(when each request's first token comes, size of each batch) of a server that takes up to ``batch`` of
    those that wait."""
    firsts_s: list[float] = []
    sizes: list[int] = []
    free_s = 0.0
    while len(firsts_s) < len(arrived_s):
        begun = len(firsts_s)
        began_s = max(free_s, arrived_s[begun])
        size = sum(each <= began_s for each in arrived_s[begun : begun + batch])
        first_s = began_s + 0.01 + size * prompt * 1e-4
        free_s = first_s + sum(step_s(size, size * (prompt + step)) for step in range(1, output))
        firsts_s += [first_s] * size
        sizes.append(size)
    return firsts_s, sizes
