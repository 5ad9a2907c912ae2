"""Orca's passes, played by its rule in a few lines, beside the states that decide live."""

import random
from dataclasses import dataclass, field

import pytest

from services.bench.arrivals import poisson_arrivals
from services.simulator.run import Load, Offered, simulate
from tests.services.simulator.meshes import mesh, pool

REQUESTS = 400
PASS_TOKENS = 512
WINDOW = 16


@dataclass(eq=False)
class Sequence:
    arrived_s: float
    prompt: int
    output: int
    drawn: int = 0
    tokens_s: list[float] = field(default_factory=list)

    def draw(self, now: float) -> bool:
        """Whether it goes on."""
        self.drawn += 1
        self.tokens_s.append(now)
        return self.drawn < self.output


def pass_s(prompts: list[Sequence], rows: list[Sequence]) -> float:
    seconds = 1e-4 * sum(each.prompt for each in prompts)
    if not rows:
        return seconds + 0.01
    return seconds + 0.02 + 1e-4 * len(rows) + 1e-6 * sum(each.prompt + each.drawn for each in rows)


def play(everybody: list[Sequence]) -> None:
    """Every pass takes all rows, and as many prompts as it holds of those that are there when it begins."""
    now = 0.0
    coming = everybody[::-1]
    waiting: list[Sequence] = []
    window: list[Sequence] = []
    planned: list[Sequence] = []
    rows: list[Sequence] = []
    while coming or planned or rows:
        if not planned and not rows:
            planned = [coming.pop()]
            now = planned[0].arrived_s
        computed, planned = planned, []
        now += pass_s(computed, rows)
        while coming and coming[-1].arrived_s <= now:
            waiting.append(coming.pop())
        fresh = [each for each in computed if each.draw(now)]
        rows = [each for each in rows if each.draw(now)] + fresh
        room = PASS_TOKENS - len(rows)
        if not window:
            window, waiting = waiting[:WINDOW], waiting[WINDOW:]
        while window and (not planned or sum(each.prompt for each in [*planned, window[0]]) <= room):
            planned.append(window.pop(0))


@pytest.mark.parametrize("rate_per_s", [2.0, 10.0, 14.0])
def test_orca_s_passes_are_of_all_decodes_and_of_whole_prompts_that_fit_beside_them(
    rate_per_s: float,
) -> None:
    chance, arrivals = random.Random(5), poisson_arrivals(rate_per_s, seed=19)
    requests = [
        Offered(next(arrivals), chance.randint(20, 700), chance.randint(1, 60)) for _ in range(REQUESTS)
    ]
    simulated = mesh(
        pool("mixed"),
        instance={
            "mixed_policy": "orca",
            "chunk_tokens": PASS_TOKENS,
            "scheduling_window": WINDOW,
            "max_decode_batch": 1000,
            "max_waiting_requests": 100_000,
        },
        scheduler={"max_pending_prefill_tokens": 10_000_000, "max_requests_per_decode": 100_000},
    )
    records = simulate(simulated, Load(requests)).records
    played = [Sequence(each.arrival_s, each.prompt_tokens, each.output_tokens) for each in requests]
    play(played)
    assert list(records.first_token_s) == pytest.approx([each.tokens_s[0] for each in played])
    assert list(records.end_s) == pytest.approx([each.tokens_s[-1] for each in played])
