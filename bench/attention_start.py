"""How long an attention worker takes from its process's creation until it is registered and serves.

    python bench/attention_start.py [--starts 5]

Real nats-server and Valkey; ``lamella serve attention`` as a machine of its own runs it, one after another.
The end is the time of its ``service_ready`` record, the beginning is before the process is created. Beside
it the CPU time of the process until then: what a free core would take, where others use the machine too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from statistics import median

from common.config import Config, MeshConfig
from common.config_file import to_toml
from services.launcher import embedded
from services.launcher.launch_plan import child_environment

POLL_S = 0.005
TIMEOUT_S = 60.0


def cpu_s(pid: int) -> float:
    """User and system time of the process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start_s(config: Config, config_file: Path, log_file: Path) -> tuple[float, float]:
    """Of one start: seconds, and CPU seconds."""
    began_s = time.time()
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "serve", "attention", "--config", str(config_file)],
            env=child_environment(config, log_file.stem, 0),
            stderr=log,
        )
    try:
        while '"event":"service_ready"' not in (text := log_file.read_text()):
            assert process.poll() is None, text
            assert time.time() - began_s < TIMEOUT_S, text
            time.sleep(POLL_S)
        used_s = cpu_s(process.pid)
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)
    ready = next(line for line in text.splitlines() if '"event":"service_ready"' in line)
    return datetime.fromisoformat(json.loads(ready)["time"]).timestamp() - began_s, used_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--starts", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        (path / "nats").mkdir()
        (path / "redis").mkdir()
        servers = [embedded.prepare_nats(path / "nats"), embedded.prepare_redis(path / "redis")]
        processes = [embedded.start(server) for server in servers]
        try:
            config = Config(mesh=MeshConfig(nats_url=servers[0].url, redis_url=servers[1].url))
            config_file = path / "mesh.toml"
            config_file.write_text(to_toml(config))
            found = [
                start_s(config, config_file, path / f"attention-{index}.log")
                for index in range(options.starts)
            ]
        finally:
            for process in processes:
                embedded.stop(process)
    for seconds, used_s in found:
        print(f"ready after {seconds:.2f} s, of which {used_s:.2f} s of CPU time")
    print(f"median {median(s for s, _ in found):.2f} s, {median(used_s for _, used_s in found):.2f} s of CPU")


if __name__ == "__main__":
    main()
