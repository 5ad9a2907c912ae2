"""Aladdin's placement as the mixed integer program that it is (4.2): the yardstick of ``best_fit``.

Requests that came between two heartbeats are placed at once, on the fewest workers; what is there already
stays where it is, and its workers are in use. Constraints (a), (b), (e) and (f) are the paper's; (c) and (d)
both bound the tokens of new prompts on a worker, and are one bound here. It takes milliseconds to seconds
where the rule takes microseconds, and no service imports it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from common.laws import TOKENS
from scheduler.policy.best_fit import GAMMA, THETA, Growth
from scheduler.policy.candidates import DecodeCandidate

TIME_LIMIT_S = 10.0
Row = tuple[dict[int, float], float]
"""Coefficients by variable, and what their sum may be at most."""


@dataclass(frozen=True, slots=True)
class Worker:
    """``load``: what it decodes now. ``prompt_tokens``: the most of new prompts that it may compute beside
    that; without a bound where it computes none."""

    load: DecodeCandidate
    prompt_tokens: float = float("inf")


@dataclass(frozen=True, slots=True)
class ExactPlacement:
    """``workers``: by request, the place of its own. ``used``: how many have something to decode.
    ``is_proved``: that fewer are impossible; without, time was up."""

    workers: tuple[int, ...]
    used: int
    is_proved: bool


@dataclass(slots=True)
class _Program:
    """Variable i: whether worker i is used; after those, request by request, whether worker i has it."""

    workers: Sequence[Worker]
    arrivals: Sequence[Growth]
    tpot_s: float
    rows: list[Row] = field(default_factory=list)

    def has(self, number: int, index: int) -> int:
        return len(self.workers) * (1 + number) + index

    def at_most(self, index: int, weights: Sequence[float], most: float) -> None:
        """Of the requests on a worker. What breaks the bound without them only keeps them away."""
        own = {self.has(number, index): weight for number, weight in enumerate(weights)}
        self.rows.append((own, max(0.0, most)))

    def add_worker(self, index: int) -> None:
        worker = self.workers[index]
        for number in range(len(self.arrivals)):
            self.rows.append(({self.has(number, index): 1.0, index: -1.0}, 0.0))
        if worker.prompt_tokens < float("inf"):
            self.at_most(index, [prompt_tokens for prompt_tokens, _ in self.arrivals], worker.prompt_tokens)
        self._keep_step(index, worker.load)
        self._keep_memory(index, worker.load)
        following = self.workers[index + 1 : index + 2]
        if following and _are_alike(worker, following[0]):
            # Of equal empty workers the first are used first: other names for one placement are not tried.
            self.rows.append(({index + 1: 1.0, index: -1.0}, 0.0))

    def _keep_step(self, index: int, load: DecodeCandidate) -> None:
        """(b), in seconds: l_d is linear in the batch, so each sequence's share stands on the left."""
        if load.step_time is None:
            return
        per_token, per_sequence, base_s = load.step_time.coefficients

        def step_s(requests: int, tokens: float, coming: float) -> float:
            return max(0.0, per_token) * (tokens + GAMMA * coming) / TOKENS + THETA * per_sequence * requests

        there_s = step_s(load.requests, load.context_tokens, load.coming_tokens)
        weights = [step_s(1, tokens, coming) for tokens, coming in self.arrivals]
        self.at_most(index, weights, THETA * (self.tpot_s - base_s) - there_s)

    def _keep_memory(self, index: int, load: DecodeCandidate) -> None:
        """(e): between two sequences' ends all grow, so that the bound need only hold at each end."""
        ongoing = load.sequences
        known = () if ongoing is None else ongoing
        for end in sorted({coming for _, coming in (*known, *self.arrivals)}):
            there = sum(tokens + end for tokens, coming in known if coming >= end)
            if ongoing is None:
                there = load.context_tokens + load.coming_tokens
            weights = [tokens + end if coming >= end else 0.0 for tokens, coming in self.arrivals]
            self.at_most(index, weights, load.capacity_tokens - there)


def _are_alike(one: Worker, other: Worker) -> bool:
    def is_empty(worker: Worker) -> bool:
        return worker.load.requests == 0 and worker.load.context_tokens == 0

    def kind(worker: Worker) -> object:
        return worker.load.capacity_tokens, worker.load.step_time, worker.prompt_tokens

    return is_empty(one) and is_empty(other) and kind(one) == kind(other)


def place_exactly(
    workers: Sequence[Worker], arrivals: Sequence[Growth], tpot_s: float, time_limit_s: float = TIME_LIMIT_S
) -> ExactPlacement | None:
    """``arrivals``: each one's prompt and the tokens that it is expected to draw. None where no placement
    keeps every constraint, or none was found in time."""
    program = _Program(workers, arrivals, tpot_s)
    for index in range(len(workers)):
        program.add_worker(index)
    count, variables = len(workers), len(workers) * (1 + len(arrivals))
    each_once = np.zeros((len(arrivals), variables))
    for number in range(len(arrivals)):
        each_once[number, program.has(number, 0) : program.has(number, count)] = 1
    matrix = np.zeros((len(program.rows), variables))
    for place, (weights, _) in enumerate(program.rows):
        matrix[place, list(weights)] = list(weights.values())
    in_use = np.zeros(variables)
    in_use[:count] = [worker.load.requests > 0 for worker in workers]
    solved = milp(
        c=np.arange(variables) < count,
        constraints=[
            LinearConstraint(each_once, 1, 1),
            LinearConstraint(matrix, -np.inf, [most for _, most in program.rows]),
        ],
        bounds=Bounds(in_use, 1),
        integrality=np.ones(variables),
        options={"time_limit": time_limit_s},
    )
    if solved.x is None:
        return None
    chosen = np.asarray(solved.x[count:]).reshape(len(arrivals), count).argmax(axis=1)
    used = round(float(np.sum(solved.x[:count])))
    return ExactPlacement(tuple(int(index) for index in chosen), used, solved.status == 0)
