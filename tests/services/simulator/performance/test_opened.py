"""Sources that are opened once, as long as their files stay what they are."""

from pathlib import Path

import pytest

from common.devices import A100_SXM
from common.errors import ServiceError
from services.simulator.performance.opened import open_once
from services.simulator.performance.roofline import Parallelism
from services.simulator.performance.sources import AiconfiguratorSource, open_source
from services.simulator.shape import PassShape
from tests.services.simulator.performance.test_aiconfigurator import SHAPE, write_tables

PASS = PassShape(((0, 300),), 4, 2000)


def test_the_same_files_are_read_once_for_each_parallelism(tmp_path: Path) -> None:
    source = AiconfiguratorSource(directory=write_tables(tmp_path))
    first = open_once(source, SHAPE, A100_SXM, Parallelism(tensor=2))
    assert open_once(source, SHAPE, A100_SXM, Parallelism(tensor=2)) is first
    staged = open_once(source, SHAPE, A100_SXM, Parallelism(tensor=2, pipeline=2))
    assert staged is not first
    assert staged.model.stages == 2
    whole = open_source(source, SHAPE, A100_SXM, Parallelism(tensor=2)).model
    assert first.model.pass_s(PASS) == whole.pass_s(PASS)


def test_files_that_were_written_anew_are_read_again(tmp_path: Path) -> None:
    source = AiconfiguratorSource(directory=write_tables(tmp_path))
    before = open_once(source, SHAPE, A100_SXM, Parallelism(tensor=2)).model.pass_s(PASS)
    table = tmp_path / "x_generation_attention_perf.csv"
    header, *rows = table.read_text().splitlines()
    slower = [",".join([*row.split(",")[:-1], "9.0"]) for row in rows]
    table.write_text("\n".join([header, *slower]) + "\n")
    after = open_once(source, SHAPE, A100_SXM, Parallelism(tensor=2)).model.pass_s(PASS)
    assert after > 2 * before


def test_what_is_missing_is_named_each_time(tmp_path: Path) -> None:
    source = AiconfiguratorSource(directory=tmp_path / "nowhere")
    for _ in range(2):
        with pytest.raises(ServiceError, match="gemm_perf"):
            open_once(source, SHAPE, A100_SXM, Parallelism())
