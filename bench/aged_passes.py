"""What passes take in a process whose memory has seen many shapes, and how much of it lies in huge pages.

Before the passes that are timed come others of other shapes, as in an instance that has served for a while.
How memory is allocated is the launcher's, but for what the environment says already:

    python bench/aged_passes.py [--config settings.toml] [--passes 0] [--rounds 9]
    MALLOC_ARENA_MAX=8 python bench/aged_passes.py    # an arena for each thread
"""

import argparse
import asyncio
import random
import statistics
import time
from pathlib import Path

from common.config_file import load_config
from common.errors import ConfigError
from services.hosts.engines import load_engine
from services.model_directory import model_directory
from services.profiling.allocating import begin_as_instances
from services.profiling.pass_watch import PassWatch
from services.profiling.passes import Shared, has_room

CHUNK_TOKENS = 64
TIMED: dict[str, Shared] = {
    "step of 4": ((), 4, 128),
    "step of 16": ((), 16, 128),
    "chunk of 64": (((0, 64),), 0, 0),
    "chunk of 64, 4 decodes": (((0, 64),), 4, 128),
    "chunk of 61 after 61, 3 decodes": (((61, 61),), 3, 128),
}
ROLLUP = Path("/proc/self/smaps_rollup")


async def measure(config_file: Path | None, passes: int, rounds: int) -> None:
    config = load_config(config_file)
    if config.model.threads != 1 or config.model.device != "cpu":
        raise ConfigError("model.threads", config.model.threads, "must be 1, on a processor: see --help")
    engine = await load_engine(config, model_directory(config.model))
    drawn = random.Random(0)
    taken: dict[str, list[float]] = {name: [] for name in TIMED}
    try:
        watch = PassWatch(engine, time.thread_time)
        for case in (_other(drawn) for _ in range(passes)):
            if has_room(engine, case):
                await watch.time(case)
        for _ in range(rounds + 1):
            for name, case in TIMED.items():
                taken[name].append(await watch.time(case))
    finally:
        engine.thread.close()
    huge, anonymous = (_megabytes(key) for key in ("AnonHugePages:", "Anonymous:"))
    print(f"{passes} other passes before, {huge} MB of {anonymous} in huge pages")
    for name, times in taken.items():
        print(f"{name}: {1e3 * statistics.median(times[1:]):.1f} ms")


def _other(drawn: random.Random) -> Shared:
    """A chunk, early or late in its prompt, and decodes beside it, of 64 rows at most."""
    batch, before = drawn.randrange(16), drawn.choice((0, drawn.randrange(400)))
    return (
        ((before, drawn.randrange(2, CHUNK_TOKENS - batch)),),
        batch,
        drawn.randrange(10, 200) * (batch > 0),
    )


def _megabytes(key: str) -> int:
    lines = ROLLUP.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) // 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path)
    parser.add_argument("--passes", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    begin_as_instances()
    asyncio.run(measure(options.config, options.passes, options.rounds))
