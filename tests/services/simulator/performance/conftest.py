"""Small files of each kind, as their tools write them, and what every performance model must hold to."""

import csv
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from common.shapes import ModelShape, llama_shape
from services.simulator.performance.interface import HeldOutError, OperatorTimes, PerformanceModel, StepTimes
from services.simulator.shape import PassShape


def small_llama(*, intermediate_size: int, vocab_size: int, name: str = "made") -> ModelShape:
    """Of four layers, with as many heads as made tables are for."""
    return llama_shape(
        name,
        layers=4,
        hidden_size=1024,
        heads=8,
        kv_heads=2,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
    )


def write_csv(path: Path, rows: Iterable[Mapping[str, object]]) -> Path:
    rows = list(rows)
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path


def mean_error(errors: Iterable[HeldOutError]) -> float:
    """Over the samples of all."""
    each = list(errors)
    samples = sum(error.samples for error in each)
    assert samples, "some were held out"
    return sum(error.mape * error.samples for error in each) / samples


def assert_steps_are_their_passes(model: PerformanceModel) -> None:
    """In constant time what step by step comes to; contexts that no grid and no batch divides."""
    for sequences, context, steps in ((1, 1, 1), (1, 40, 700), (7, 1003, 450), (33, 33 * 511 + 5, 90)):
        shapes = [PassShape((), sequences, context + sequences * step) for step in range(steps)]
        each = [model.pass_s(shape) for shape in shapes]
        assert model.steps_s(sequences, context, steps) == pytest.approx(sum(each), rel=1e-9)
        if isinstance(model, StepTimes):
            step_s = model.step_s_of(sequences)
            assert [step_s(shape.context_tokens) for shape in shapes] == each
    assert model.steps_s(5, 500, 0) == 0


def assert_operators_are_their_pass(model: PerformanceModel) -> None:
    """What each takes comes to what all take, of chunks, of steps, and of both at once."""
    assert isinstance(model, OperatorTimes)
    for shape in (
        PassShape(((0, 300),)),
        PassShape((), 7, 1003),
        PassShape(((0, 512), (100, 41)), 33, 33 * 511 + 5),
    ):
        heads = shape.sequences + len(shape.chunks)
        seconds = list(model.row_operators_s(shape.tokens, heads).values())
        assert len(seconds) > 1 or seconds[0] > 0
        if shape.chunks:
            seconds.append(model.chunks_attention_s(shape.chunks))
        if shape.sequences:
            seconds.append(model.steps_attention_s(shape.sequences, shape.context_tokens, 1))
        assert sum(seconds) == pytest.approx(model.pass_s(shape), rel=1e-9)
    one, two = (model.steps_attention_s(5, 5 * 700, steps) for steps in (1, 2))
    assert two == pytest.approx(2 * one, rel=0.01)
    assert one > 0


def assert_more_takes_longer(model: PerformanceModel, noise: float = 0.0) -> None:
    """``noise``: the share of a step's time by which a smaller batch was measured to take longer."""
    prompts = [model.pass_s(PassShape(((0, tokens),))) for tokens in (64, 512, 1024, 4096, 20_000)]
    batches = [model.pass_s(PassShape((), batch, batch * 800)) for batch in (1, 16, 64, 200)]
    alone = model.pass_s(PassShape(((0, 1024),)))
    both = model.pass_s(PassShape(((0, 1024),), 32, 32 * 800))
    several = model.pass_s(PassShape(((0, 1024), (0, 512))))
    assert prompts == sorted(prompts)
    assert all(after > (1 - noise) * before for before, after in pairwise(batches))
    assert 0 < alone < both
    assert alone < several < alone + 1.2 * model.pass_s(PassShape(((0, 512),)))
    assert model.pass_s(PassShape()) == 0
