"""Whole passes of a model, measured, beside what its operators add up to (docs/performance-models.md).

    python bench/operator_passes.py [--model DIR] [--rounds 5] [--clock cpu]

Measures passes as ``lamella profile`` does and operators as ``lamella profile --operators`` does, in one
process that allocates as instances do, on one thread; then each pass is predicted from the operators alone.
``--clock cpu`` counts the thread's time on a core, for a machine that does other things meanwhile.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from common.config import Config, InstanceConfig, ModelConfig
from common.shapes import ModelShape
from services.analysis.model_shape import read_shape
from services.model_directory import model_directory
from services.profiling.allocating import begin_as_instances
from services.profiling.operators.laps import HostLaps
from services.profiling.operators.profiling import OperatorsRequest, profile_operators
from services.profiling.operators.sizes import Effort, Limits
from services.profiling.profiler import measure_profile
from services.simulator.performance.regression import Regression
from services.simulator.performance.roofline import Parallelism
from services.simulator.performance.sources import OperatorsSource, open_source
from services.simulator.shape import PassShape

CLOCKS = {"wall": (time.perf_counter, time.perf_counter_ns), "cpu": (time.thread_time, time.thread_time_ns)}
KV_BYTES = 1 << 30
LIMIT_S = 600.0
REGRESSIONS: tuple[Regression, ...] = ("linear", "forest")

Measured = list[tuple[str, PassShape, float]]
"""What, its shape, seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    begin_as_instances()
    config = Config(
        model=ModelConfig(directory=options.model, threads=1), instance=InstanceConfig(kv_bytes=KV_BYTES)
    )
    directory = model_directory(config.model)
    clock, laps_clock = CLOCKS[options.clock]
    profile = asyncio.run(
        measure_profile(config, directory, options.rounds, lambda done, rounds: None, clock)
    )
    limits = Limits()
    cases: Measured = [
        (f"chunk of {tokens:,} after {before:,}", PassShape(((before, tokens),)), seconds)
        for before, tokens, seconds in profile.chunk_s
        if tokens <= limits.tokens and before + tokens <= limits.context
    ]
    cases += [
        (f"step of {batch}, {context:,} each", PassShape((), batch, batch * (context + 1)), seconds)
        for batch, context, seconds in profile.step_s
        if batch <= limits.batch and context <= limits.context
    ]
    shape = read_shape(str(directory))
    with tempfile.TemporaryDirectory() as folder:
        request = OperatorsRequest(
            shape=shape,
            tensor_parallel=(1,),
            model=config.model,
            block_size=config.instance.block_size,
            limits=limits,
            effort=Effort(options.rounds, LIMIT_S),
            has_messages=False,
        )
        profile_operators(request, Path(folder), lambda text, part: None, HostLaps(laps_clock))
        for line in report(cases, shape, Path(folder)):
            print(line)


def report(cases: Measured, shape: ModelShape, folder: Path) -> Iterator[str]:
    """A line a pass, and how far all are off; how far the operators on held-out data."""
    sources = [OperatorsSource(directory=folder, regression=each) for each in REGRESSIONS]
    opened = [open_source(source, shape, None, Parallelism()) for source in sources]
    yield f"{'':28}{'measured':>12}" + "".join(f"{each:>18}" for each in REGRESSIONS)
    off: dict[tuple[str, str], list[float]] = {}
    for text, pass_shape, seconds in cases:
        line = f"{text:28}{1e3 * seconds:>9.1f} ms"
        for name, each in zip(REGRESSIONS, opened, strict=True):
            predicted_s = each.model.pass_s(pass_shape)
            ratio = predicted_s / seconds - 1
            off.setdefault((name, text.split()[0]), []).append(ratio)
            line += f"{1e3 * predicted_s:>9.1f} {ratio:>+8.1%}"
        yield line
    for (by, kind), ratios in off.items():
        mean = statistics.fmean(abs(each) for each in ratios)
        worst = max(ratios, key=abs)
        bias = statistics.fmean(ratios)
        yield f"{kind}s, {by}: {mean:.1%} off, {bias:+.1%} on average, worst {worst:+.1%}"
    for error in opened[0].held_out():
        yield f"lines: {error}"


if __name__ == "__main__":
    main()
