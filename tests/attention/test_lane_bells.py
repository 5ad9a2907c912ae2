"""Each end of a lane hears what the other one sends, and nothing of its own."""

import time

import pytest
import torch

from common.bell import Bells
from common.exchange_shape import ExchangeShape
from common.model import waiting
from common.model.exchange import Lane, Pace
from common.model.interface import SequenceChunk
from tests.attention.lanes import attention_workers, lanes_of
from tests.common.model.conftest import MakeTiny

SHAPE = ExchangeShape(4, 64, 4, 2, 8, "float32")
SLEEP_S = 4.0


def hears(bells: Bells | None, within_s: float) -> bool:
    assert bells is not None
    began_s = time.monotonic()
    bells.wait(within_s)
    return time.monotonic() - began_s < 0.9 * within_s


def test_each_end_hears_the_other_one_alone() -> None:
    model, worker = lanes_of(SHAPE)
    records = model.records(0, 2)
    assert model.bells is not None
    assert worker.bells is not None

    def ask(lane: Lane) -> None:
        if lane is model:
            lane.announce([SequenceChunk((0,), 1, 1, 5)], 1, 2)
            lane.send(records.q_place, 1)
            lane.send(records.kv_place, 1)
        else:
            lane.send(records.output_place, 1)

    for sender, other in ((model, worker), (worker, model)):
        assert sender.bells is not None
        assert other.bells is not None
        sender.bells.listen()
        other.bells.listen()
        ask(sender)
        assert hears(other.bells, 60.0)
        assert not hears(sender.bells, 0.5)


def test_a_bell_is_behind_all_that_a_region_holds() -> None:
    model, worker = lanes_of(SHAPE)
    everything = model.records(0, SHAPE.max_tokens)
    for place in (everything.q_place, everything.kv_place):
        assert place.offset + place.nbytes <= SHAPE.request_bell
    assert everything.output_place.offset + everything.output_place.nbytes <= SHAPE.response_bell
    assert model.bell is not None
    assert worker.bell is not None
    for _ in range(3):
        worker.send(everything.output_place, 1)
    assert (model.bell.rings, worker.bell.rings) == (3, 0)


def test_what_is_due_later_is_not_told_by_a_bell() -> None:
    """An emulated link's: who heard it would look too early, and then sleep for long."""
    for lane in lanes_of(SHAPE, Pace(None, 0.001)):
        assert lane.bell is None
        assert lane.bells is None


def test_both_sides_of_a_step_wake_each_other(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others want every core, and nobody would look again for four seconds."""
    program = tiny("llama").program
    chunks = [SequenceChunk((0,), 0, 3)]
    with attention_workers(program, 2) as workers:
        monkeypatch.setattr(waiting, "LATE_S", -1.0)
        monkeypatch.setattr(waiting, "WANTED_S", 1e9)
        for name in ("SHORTEST_SLEEP_S", "LONGEST_SLEEP_S", "IDLE_SLEEP_S"):
            monkeypatch.setattr(waiting, name, SLEEP_S)
        began_s, steps = time.monotonic(), 4
        for _ in range(steps):
            attention = workers.remote[0]
            attention.begin(chunks)
            rows = torch.arange(3)
            program.run(rows, rows, attention, rows)
        waits = steps * program.spec.layers
        assert time.monotonic() - began_s < waits * SLEEP_S / 2
