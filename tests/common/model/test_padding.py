"""Rows that are added to a batch change nothing of its own."""

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.model import padding
from common.model.attention import LocalAttention
from common.model.interface import SequenceChunk
from common.model.padding import own_rows, rows_beside
from common.model.program import load_program
from common.model.runner import ModelRunner
from tests.common.model.conftest import MakeTiny

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "has_amx", lambda: True)


@pytest.mark.parametrize(("rows", "beside"), [(1, 0), (32, 0), (33, 15), (48, 0), (229, 11), (256, 0)])
def test_rows_make_up_whole_tiles(rows: int, beside: int) -> None:
    assert rows_beside(rows, torch.bfloat16, CPU) == beside


def test_the_numbers_of_rows_that_there_are_with_those_beside() -> None:
    assert own_rows(100, torch.bfloat16, CPU) == [48, 64, 80, 96, *range(1, 33)]
    assert own_rows(20, torch.bfloat16, CPU) == [*range(1, 21)]
    assert own_rows(100, torch.float32, CPU) == [*range(1, 65)]
    assert own_rows(100, torch.float32, CPU, compiled=12) == [*range(13, 65)]
    assert not own_rows(100, torch.float32, CPU, compiled=math.inf)
    assert not own_rows(100, torch.bfloat16, torch.device("meta"))
    had = {rows + rows_beside(rows, torch.bfloat16, CPU) for rows in range(1, 257)}
    assert had == {*own_rows(256, torch.bfloat16, CPU)}


def test_only_bf16_products_of_the_host_with_amx_have_rows_added(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows_beside(37, torch.float32, CPU) == 0
    assert rows_beside(37, torch.bfloat16, torch.device("meta")) == 0
    monkeypatch.setattr(padding, "has_amx", lambda: False)
    assert rows_beside(37, torch.bfloat16, CPU) == 0
    assert own_rows(100, torch.bfloat16, CPU) == [*range(1, 65)]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_batch_with_rows_beside_it_gives_transformers_logits(tiny: MakeTiny, family: str) -> None:
    model = tiny(family)
    program = load_program(model.directory, "bfloat16", CPU, model.directory.parent / "cache")
    pool = KVPool(KVLayout(3, 2, 8, 16, 2), 3, program.dtype, CPU)
    attention = LocalAttention(pool, program.attention_specs)
    token_ids = torch.arange(42) + 3
    with torch.no_grad():
        expected = model.reference(token_ids[None], use_cache=False).logits[0]
    parts = []
    for start, length in ((0, 37), (37, 5)):
        attention.begin([SequenceChunk([2, 0, 1], start, length)])
        positions = torch.arange(start, start + length)
        parts.append(program.run(token_ids[positions], positions, attention, torch.arange(length)).float())
    logits = torch.cat(parts)
    assert float((logits - expected).norm() / expected.norm()) < 0.05


class WatchedAttention(LocalAttention):
    """Keeps how many rows came, by layer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rows: defaultdict[int, list[int]] = defaultdict(list)

    def send_q(self, layer: int, q: torch.Tensor) -> None:
        self.rows[layer].append(len(q))
        super().send_q(layer, q)


@pytest.mark.parametrize(("draws", "compiled"), [(5, 0), (40, 0), (5, 12), (40, 12), (40, math.inf)])
def test_products_of_each_number_of_rows_are_computed_before_any_comes(
    tiny: MakeTiny, draws: int, compiled: float
) -> None:
    """In a pool that holds no batch of so many rows; not those that compiled kernels take."""
    model = tiny("llama")
    program = load_program(model.directory, "bfloat16", CPU, model.directory.parent / "cache")
    last, drawn = program.slices[-1], []

    def run_last(attention: Any, layer: Any, received: torch.Tensor, *rest: Any) -> Any:
        drawn.append(len(received))
        return last.run(attention, layer, received, *rest)

    slices = (*program.slices[:-1], replace(last, run=run_last))
    program = replace(program, slices=slices, compiled_rows=compiled)
    attention = WatchedAttention(
        KVPool(KVLayout(3, 2, 8, 16, 2), 2, program.dtype, CPU), program.attention_specs
    )
    ModelRunner(program, attention).make_kernels(70, draws, (1,), room=16)
    counts = own_rows(70, torch.bfloat16, CPU, compiled)
    assert drawn == [rows for rows in range(1, min(draws, 32) + 1) if rows > compiled]
    # One token goes all the way, for what follows the layers.
    once = [1] if drawn else []
    found = {0: [*counts, *once], 1: [*counts, *once], 2: once}
    assert attention.rows == {layer: rows for layer, rows in found.items() if rows}
