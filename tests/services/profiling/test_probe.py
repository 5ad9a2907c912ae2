"""The machine's pace, from a thread beside what is watched."""

import asyncio
import threading
import time
from functools import reduce
from itertools import chain

import msgspec
import pytest
import torch

from common.config import Config, Dtype, InstanceConfig, ModelConfig
from common.model.precision import precision_of
from services.profiling import probe

MODELLED = Config(instance=InstanceConfig(engine="model"), model=ModelConfig(device="cpu"))


def test_a_piece_of_work_is_timed_again_and_again_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "EVERY_S", 0.01)
    monkeypatch.setattr(probe, "MOST_OF_A_CORE", 1.0)
    enough = probe.LAYERS // probe.TIMED
    with probe.Probe(MODELLED).watch() as pieces:
        ends_s = time.monotonic() + 60
        while len(pieces.taken_s) <= enough and time.monotonic() < ends_s:
            time.sleep(0.01)
    assert len(pieces.taken_s) > enough
    assert all(0 < seconds < 60 for seconds in pieces.taken_s)
    assert sum(pieces.taken_s) < pieces.processor_s
    assert "probe" not in {thread.name for thread in threading.enumerate()}


def test_so_many_looks_come_one_after_another_and_their_first_layers_are_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = probe.Probe(MODELLED)
    computed: list[int] = []

    def spin(around: object, each: int) -> None:
        computed.append(each)
        ends_s = time.thread_time() + (0.2 if each == probe.LEAD else 0.01)
        while time.thread_time() < ends_s:
            pass

    monkeypatch.setattr(watched, "_compute", spin)
    taken_s = asyncio.run(asyncio.to_thread(watched.looks, 3))
    assert computed == [probe.LEAD, probe.TIMED] * 3
    assert probe.looking_s([0.01] * 3) == pytest.approx(0.03 * sum(computed) / (3 * probe.TIMED))
    assert all(0.01 <= seconds < 0.2 for seconds in taken_s)


def test_looks_that_take_long_come_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 on a processor without such products they took 39 % of a core from the meshes they watched."""
    monkeypatch.setattr(probe, "EVERY_S", 0.001)
    watched = probe.Probe(MODELLED)

    def spin(*_: object) -> None:
        ends_s = time.thread_time() + 0.05
        while time.thread_time() < ends_s:
            pass

    monkeypatch.setattr(watched, "_compute", spin)
    with watched.watch() as pieces:
        time.sleep(1.0)
    assert len(pieces.taken_s) in (1, 2)  # one every 5 s


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_pieces_are_of_the_type_that_the_model_computes_in(dtype: Dtype) -> None:
    config = msgspec.structs.replace(MODELLED, model=ModelConfig(device="cpu", dtype=dtype))
    watched = probe.Probe(config)
    wanted = getattr(torch, precision_of(config.model).compute)
    assert {each.dtype for each in (*watched._inputs, *chain(*watched._layers))} == {wanted}


def test_layers_come_to_numbers_of_their_size() -> None:
    """Of all that is infinite or nothing, products would take another time."""
    watched = probe.Probe(MODELLED)
    for rows, x in zip(probe.ROWS, watched._inputs, strict=True):
        y = reduce(probe._through, watched._layers[: probe.LEAD + probe.TIMED], x)
        assert y.shape == (rows, probe.WIDTH)
        assert 0.1 < float(y.float().std()) < 100


def test_the_shortest_watch_has_a_time_and_ends_when_what_it_watched_fails() -> None:
    with pytest.raises(RuntimeError, match="of what is watched"), probe.Probe(MODELLED).watch() as pieces:
        raise RuntimeError("of what is watched")
    assert len(pieces.taken_s) == 1


def test_a_look_that_fails_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = probe.Probe(MODELLED)

    def refuse(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(watched, "_compute", refuse)
    with pytest.raises(RuntimeError, match="out of memory"), watched.watch():
        pass


@pytest.mark.parametrize(
    "config",
    [
        Config(instance=InstanceConfig(engine="emulated"), model=ModelConfig(device="cpu")),
        Config(instance=InstanceConfig(engine="model"), model=ModelConfig(device="cuda")),
    ],
)
def test_nothing_is_timed_where_no_processor_computes_a_model(config: Config) -> None:
    assert probe.Probe(config).looks(3) == []
    with probe.Probe(config).watch() as pieces:
        assert "probe" not in {thread.name for thread in threading.enumerate()}
    assert pieces == probe.Pieces()
