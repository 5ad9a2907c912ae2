"""``lamella plan`` as a user types it, over a small model."""

from pathlib import Path

from typer.testing import CliRunner, Result

from services.cli import app

ROWS = 120
CONFIG = """
[instance]
block_size = 16
[space]
tensors = [1, 2]
pipelines = [1]
batches = [64]
policies = [["chunked", 512]]
chunks = [["chunks", 512]]
"""


def run(trace: Path | None, *options: str) -> Result:
    command = ["plan", "--processes", "1", *options]
    if trace is not None:
        command += ["--trace", str(trace)]
    if "--model" not in options:
        command += ["--model", "opt-13b"]
    if "--slo" not in options:
        command += ["--slo", "ttft=1,tpot=0.05"]
    return CliRunner().invoke(app, command)
