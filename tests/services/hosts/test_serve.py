"""One service of its own, as ``lamella serve`` runs it."""

import subprocess
import sys
import time
from pathlib import Path

from common.config import Config, MeshConfig, ModelConfig
from common.config_file import to_toml
from services.launcher.launch_plan import child_environment

START_TIMEOUT_S = 60.0
POLL_S = 0.02


def test_an_attention_worker_is_ready_where_there_is_no_model(
    nats_url: str, redis_url: str, namespace: str, tmp_path: Path
) -> None:
    """It loads no weights, and nothing else of a model."""
    config = Config(
        mesh=MeshConfig(nats_url=nats_url, redis_url=redis_url, namespace=namespace),
        model=ModelConfig(directory=tmp_path / "none", cache_directory=tmp_path / "cache", kernels="torch"),
    )
    config_file, log_file = tmp_path / "mesh.toml", tmp_path / "attention.log"
    config_file.write_text(to_toml(config))
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "serve", "attention", "--config", str(config_file)],
            env=child_environment(config, "attention-0", 0),
            stderr=log,
        )
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while '"event":"service_ready"' not in log_file.read_text():
            assert process.poll() is None, log_file.read_text()
            assert time.monotonic() < deadline_s, log_file.read_text()
            time.sleep(POLL_S)
    finally:
        process.terminate()
        assert process.wait(START_TIMEOUT_S) == 0
