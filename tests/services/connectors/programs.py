"""Puts programs that stand for `docker` and `kubectl` first on the path; each keeps a log of its commands."""

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PODS = {
    "gateway-a": {"role": "gateway", "is_ending": False, "looks": 0},
    "prefill-a": {"role": "prefill", "is_ending": False, "looks": 0},
    "decode-a": {"role": "decode", "is_ending": False, "looks": 0},
    "decode-b": {"role": "decode", "is_ending": False, "looks": 0},
    # Evicted a week ago, and kept to be looked at.
    "decode-z": {"role": "decode", "is_ending": False, "looks": 99, "phase": "Failed"},
}
REPLICAS = {"gateway": 1, "prefill": 1, "decode": 2, "scheduler": 1}
CONTAINERS = {"nats": 1, "gateway": 1, "prefill": 1, "decode": 2}


def pretend_docker(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its log; one prefill and two decode containers run, and there is room for three of each."""
    log = _pretend("docker", directory, monkeypatch)
    (directory / "state").write_text(json.dumps(CONTAINERS))
    monkeypatch.setenv("DOCKER_ROOM", "3")
    return log


def pretend_kubectl(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its log; new pods are ready at the third look."""
    log = _pretend("kubectl", directory, monkeypatch)
    (directory / "state").write_text(json.dumps({"replicas": REPLICAS, "pods": PODS}))
    monkeypatch.setenv("KUBECTL_LOOKS", "2")
    return log


def _pretend(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fake = Path(__file__).with_name(f"fake_{name}.py")
    program = directory / "bin" / name
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {fake} "$@"\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv(f"{name.upper()}_STATE", str(directory / "state"))
    monkeypatch.setenv(f"{name.upper()}_LOG", str(directory / "log"))
    return directory / "log"
