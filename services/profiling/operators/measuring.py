"""Measures a shard's operators on one device: every case in turn, round after round (Vidur 4.3).

A case's sizes are columns of the files that the simulator's estimator reads
(``services.simulator.performance.vidur_files``). Rounds go over all cases, so that what disturbs the machine
for a while disturbs a sample of each and no case's median; the first touches memory and does not count.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from services.profiling.operators.attention_layers import AttentionCase, AttentionLayers
from services.profiling.operators.laps import Laps, statistics_of
from services.profiling.operators.sizes import (
    SHORTEST_CONTEXT,
    Effort,
    Limits,
    Shard,
    chunk_cases,
    sequence_counts,
    step_cases,
    token_counts,
)
from services.profiling.operators.token_layers import LayerOperators, PassEnds, Weights, layers_of
from services.simulator.performance.vidur_files import (
    EMBEDDING,
    KV_SAVE,
    SEQUENCE_OPERATORS,
    TOKEN_OPERATORS,
)

Row = Mapping[str, object]
Progress = Callable[[float], None]
"""Of all that is to do, the share that is done."""
ENDS = 4
"""Runs in each round of what a pass ends with: of a layer's there are as many as there are layers."""
ATTENTION_LAYERS = 8
"""That a pass goes through in a round of which only attention counts."""


@dataclass(slots=True)
class _Case:
    """``run`` is told how often it has been run. ``sizes``: the row's, beside its ``operators``' times."""

    sizes: Row
    operators: tuple[str, ...]
    run: Callable[[int, Laps], None]
    taken_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def row(self) -> Row:
        row = dict(self.sizes)
        for operator, taken in self.taken_ms.items():
            if operator in self.operators:
                row |= statistics_of(operator, taken)
        return row


@dataclass(frozen=True, slots=True)
class _Shard:
    """What a shard's passes are made of."""

    layers: Sequence[LayerOperators]
    attention: AttentionLayers
    ends: PassEnds

    def run_pass(self, case: AttentionCase, number: int, most: int, laps: Laps) -> None:
        """Through up to ``most`` layers, others than the pass before."""
        count = min(most, len(self.layers))
        first = number * count
        attends = self.attention.of_layers(case, number, count, laps)
        x = self.ends.begin(case.rows, laps)
        for index, attend in enumerate(attends, first):
            x = self.layers[index % len(self.layers)].run(x, attend, laps)


@torch.inference_mode()
def measure_shard(
    shard: Shard,
    weights: Weights,
    block_size: int,
    limits: Limits,
    effort: Effort,
    progress: Progress,
    laps: Laps,
) -> dict[str, list[Row]]:
    """Rows by table: over a pass's tokens, of attention, over the sequences that get a token."""
    chunks = [AttentionCase(1, before, tokens) for before, tokens in chunk_cases(limits)]
    steps = step_cases(shard, limits, weights.dtype.itemsize)
    attention = chunks + [AttentionCase(batch, context, 1) for batch, context in steps]
    tokens = [AttentionCase(1, SHORTEST_CONTEXT, each) for each in token_counts(limits)]
    whole = _Shard(
        layers_of(shard, weights),
        AttentionLayers(shard, weights, block_size, [*attention, *tokens]),
        PassEnds(shard, weights),
    )
    tables = {
        "mlp": [_token_case(each, whole) for each in tokens],
        "attention": [_attention_case(each, whole) for each in attention],
        "sequences": [_sequence_case(each, whole) for each in sequence_counts(limits)],
    }
    _measure([case for table in tables.values() for case in table], laps, effort, progress)
    return {name: [case.row() for case in table] for name, table in tables.items()}


def _measure(cases: Sequence[_Case], laps: Laps, effort: Effort, progress: Progress) -> None:
    ends_s = time.monotonic() + effort.limit_s
    rounds = effort.rounds + 1
    for number in range(rounds):
        if number > 1 and time.monotonic() > ends_s:
            break
        for index, case in enumerate(cases):
            case.run(number, laps)
            for run in laps.taken_ms():
                for operator, ms in run.items():
                    if number:
                        case.taken_ms[operator].append(ms)
            progress((number + (index + 1) / len(cases)) / rounds)
    progress(1.0)


def _token_case(case: AttentionCase, whole: _Shard) -> _Case:
    def run(number: int, laps: Laps) -> None:
        whole.run_pass(case, number, len(whole.layers), laps)

    return _Case({"num_tokens": case.rows}, (EMBEDDING, *TOKEN_OPERATORS), run)


def _attention_case(case: AttentionCase, whole: _Shard) -> _Case:
    def run(number: int, laps: Laps) -> None:
        whole.run_pass(case, number, ATTENTION_LAYERS, laps)

    sizes = {
        "batch_size": case.batch,
        "prefill_chunk_size": case.tokens if case.is_prefill else 0,
        "kv_cache_size": case.before,
        "is_prefill": case.is_prefill,
    }
    return _Case(sizes, (KV_SAVE, case.operator), run)


def _sequence_case(sequences: int, whole: _Shard) -> _Case:
    def run(number: int, laps: Laps) -> None:
        for _ in range(ENDS):
            whole.ends.end(sequences, laps)

    return _Case({"num_sequences": sequences}, SEQUENCE_OPERATORS, run)
