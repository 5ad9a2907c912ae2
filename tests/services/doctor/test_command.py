"""``lamella doctor`` as a user runs it."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import msgspec

from services.doctor.findings import Finding

TIMEOUT_S = 120.0
SMALL = """
[instance]
kv_bytes = 1_048_576
"""
UNFIT = f"""
{SMALL}
[model]
device = "cuda:99"
[transfer]
path = "mooncake"
min_port = 1024
max_port = 65_535
"""


def run_doctor(settings: str, directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    config_file = directory / "mesh.toml"
    config_file.write_text(settings)
    command = [sys.executable, "-m", "services.cli", "doctor", "--config", str(config_file), *options]
    environment = {name: value for name, value in os.environ.items() if name not in ("NATS_URL", "REDIS_URL")}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )


def test_a_machine_that_passes_these_tests_is_fit(tmp_path: Path) -> None:
    result = run_doctor(SMALL, tmp_path, "--port", "0", "--json")
    findings = msgspec.json.decode(result.stdout, type=list[Finding])
    problems = [finding for finding in findings if finding.verdict == "problem"]
    assert (result.returncode, problems) == (0, []), result.stderr
    assert {finding.subject for finding in findings} == {
        "Python",
        "packages",
        "memory",
        "shared memory",
        "open files",
        "clock",
        "gateway's port",
        "transfer ports",
        "libibverbs",
        "Mooncake",
        "RDMA",
        "GPU",
        "NATS",
        "Redis",
    }
    assert all((finding.advice is None) == (finding.verdict == "good") for finding in findings)


def test_what_would_not_work_is_said_with_advice_and_the_exit_status(tmp_path: Path) -> None:
    """A device that no machine has, a card's protocol on a range the kernel uses, few files, no server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        result = run_doctor(UNFIT, tmp_path, "--port", "0", "--nats", "nats://127.0.0.1:1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert result.returncode == 1, result.stderr
    problems = [line.split("  ")[1] for line in result.stdout.splitlines() if line.startswith("PROBLEM")]
    assert problems == ["open files", "transfer ports", "GPU", "NATS"]
    assert "4 of 14 would keep lamella from working" in result.stdout
    assert result.stdout.count("→") >= len(problems)
