"""``lamella simulate``: what it prints and writes."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from common.errors import ConfigError
from services.cli import app

PERFORMANCE = """
[pool.performance]
kind = "linear"
prefill_s = 0.01
per_prompt_token_s = 1e-4
step_s = {step_s}
"""
POOLS = """
[cluster]
model = "smollm2-135m"

[[pool]]
name = "prompts"
role = "prefill"
count = 1
kv_tokens = 100000
{extra}
{performance}
[[pool]]
name = "tokens"
role = "decode"
count = 2
kv_tokens = 100000
{extra}
{performance}
"""
TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.0000000,374,44
2023-11-16 18:15:46.2000000,396,109
2023-11-16 18:15:47.1000000,879,1
2023-11-16 18:15:47.4000000,91,16
"""


def write_config(folder: Path, name: str, step_s: float, extra: str = "") -> Path:
    path = folder / name
    path.write_text(POOLS.format(performance=PERFORMANCE.format(step_s=step_s), extra=extra))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def run(*arguments: object) -> Result:
    """In a terminal that cuts no table."""
    environment = {"COLUMNS": "200"}
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)], env=environment)


def ran(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def row_of(output: str, label: str) -> str:
    [line] = [line for line in output.splitlines() if line.strip().startswith(label)]
    return line


def test_configurations_are_compared_with_the_same_requests(tmp_path: Path, trace: Path) -> None:
    """Twice as slow steps: the time per token is twice as long, and first tokens come when they came."""
    fast, slow = (write_config(tmp_path, f"{name}.toml", s) for name, s in (("fast", 0.02), ("slow", 0.04)))
    written = tmp_path / "runs.json"
    output = ran(fast, "--trace", trace, "--compare", slow, "--json", written)
    both = read(written)
    assert list(both) == ["fast", "slow"]
    assert both["fast"]["done"] == both["slow"]["done"] == 4
    assert both["fast"]["ttft"] == both["slow"]["ttft"]
    assert both["slow"]["tpot"]["p50_s"] == pytest.approx(2 * both["fast"]["tpot"]["p50_s"], rel=0.05)
    assert "(1.00×)" in row_of(output, "TTFT p50, ms")
    assert "(2.0" in row_of(output, "TPOT p50, ms")
    alone = tmp_path / "run.json"
    assert "side by side" not in ran(slow, "--trace", trace, "--json", alone)
    assert read(alone) == both["slow"]


def test_a_configuration_that_cannot_be_is_told_before_any_runs(tmp_path: Path, trace: Path) -> None:
    good = write_config(tmp_path, "good.toml", 0.02)
    bad = tmp_path / "bad.toml"
    bad.write_text("[cluster]\nmodel = 'no-such-model'\n")
    result = run(good, "--trace", trace, "--compare", bad)
    assert isinstance(result.exception, ConfigError)
    assert "requests done" not in result.output
    twice = run(good, "--trace", trace, "--compare", good)
    assert isinstance(twice.exception, ConfigError)
