"""How many times as long requests took as each would alone, on an instance that has nothing else to do: what
Splitwise's objectives are over (Table VI)."""

from typing import NamedTuple

from services.simulator.metrics import DONE
from services.simulator.performance.interface import PerformanceModel
from services.simulator.records import Records
from services.simulator.shape import PassShape


class Slowdowns(NamedTuple):
    """Of those that are done, in their order. ``tbt``: of a request's mean gap, where it has two tokens."""

    ttft: list[float]
    tbt: list[float]
    end_to_end: list[float]


def prompt_alone_s(performance: PerformanceModel, tokens: int, chunk_tokens: int | None) -> float:
    """Of one prompt on an idle instance. ``chunk_tokens`` None: it computes prompts whole."""
    step = chunk_tokens or tokens
    return sum(
        performance.pass_s(PassShape(((before, min(step, tokens - before)),)))
        for before in range(0, tokens, step)
    )


def slowdowns_of(records: Records, performance: PerformanceModel, chunk_tokens: int | None) -> Slowdowns:
    """Over such an instance, ``chunk_tokens`` as ``prompt_alone_s`` has them. The prompt's pass draws the
    first token; the next step attends to it, too."""
    found = Slowdowns([], [], [])
    for number in range(len(records)):
        if records.outcome[number] != DONE:
            continue
        prompt, drawn = records.prompt_tokens[number], records.drawn_tokens[number]
        arrival_s, end_s = records.arrival_s[number], records.end_s[number]
        first_s = records.first_token_s[number]
        alone_first_s = prompt_alone_s(performance, prompt, chunk_tokens)
        alone_rest_s = performance.steps_s(1, prompt + 1, drawn - 1) if drawn > 1 else 0.0
        found.ttft.append((first_s - arrival_s) / alone_first_s)
        if drawn > 1:
            found.tbt.append((end_s - first_s) / alone_rest_s)
        found.end_to_end.append((end_s - arrival_s) / (alone_first_s + alone_rest_s))
    return found
