"""A short trace, and settings that a small search is over."""

from pathlib import Path

import pytest

from tests.services.planner.command_line import CONFIG, ROWS


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    lines = [f"{200 + 37 * number % 400},{8 + 11 * number % 24}" for number in range(ROWS)]
    path.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *lines]) + "\n")
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "base.toml"
    path.write_text(CONFIG)
    return path
