"""What a printed bandwidth says of the time behind it."""

from pathlib import Path

import pytest

from common.cost import OFFLOADING_LINK, exchanged_bytes
from services.reproduce.data import DataFiles
from services.reproduce.lamina_table3 import FP16_BYTES, SETTINGS, run


def test_a_cell_and_its_time_are_one_statement() -> None:
    """Bandwidth times time is what crosses the link, whichever column."""
    bandwidth, times = run(DataFiles(None), 1.0).tables
    settings = [(each.shape, batch) for each in SETTINGS for batch in each.printed]
    for (shape, batch), cells, said in zip(settings, bandwidth.rows, times.rows, strict=True):
        for gb_s, time in zip(cells[2:5], said[2:5], strict=True):
            moved = float(gb_s) * 1e9 * float(time.partition(" ms")[0]) / 1e3
            assert moved == pytest.approx(
                exchanged_bytes(shape, batch, FP16_BYTES, OFFLOADING_LINK), rel=0.01
            )


def test_without_measured_kernels_nothing_is_told_of_them() -> None:
    found = run(DataFiles(None), 1.0)
    assert all(len(table.columns) == 5 for table in found.tables)
    assert found.setup[0].endswith(
        "Not by measured kernels, for want of aiconfigurator/a100_sxm in the data directory (--data)."
    )
    told = " ".join((*found.setup, *found.assumptions, *found.causes))
    assert "aiconfigurator's kernels" not in told
    assert "today's kernels" not in told


def test_with_them_they_have_their_column(shared_directory: Path) -> None:
    found = run(DataFiles(shared_directory / "data"), 1.0)
    for table in found.tables:
        assert table.columns[5] == "ours: measured kernels"
    assert "aiconfigurator's kernels" in found.setup[0]
