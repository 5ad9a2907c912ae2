"""Stands for `kubectl`, for what a connector reads of it and says to it.

The cluster is in the file that KUBECTL_STATE names: how many pods each Deployment is to have, and its pods,
with how many looks at them it takes until they are ready, or gone. Commands are appended to KUBECTL_LOG.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.services.connectors.inside import run_inside

STATE = Path(os.environ["KUBECTL_STATE"])
LABELS = {"app.kubernetes.io/part-of": "lamella", "pod-template-hash": "5d7c9b6f4"}


def deployments(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": role, "namespace": "lamella", "generation": 3, "labels": LABELS},
            "spec": {"replicas": replicas, "revisionHistoryLimit": 3},
            "status": {"observedGeneration": 3, "readyReplicas": replicas},
        }
        for role, replicas in state["replicas"].items()
    ]


def look_at_pods(state: dict[str, Any]) -> list[dict[str, Any]]:
    """As they are; with every look they get on."""
    shown = []
    for name, pod in list(state["pods"].items()):
        is_ending, looks = pod["is_ending"], pod["looks"]
        metadata = {"name": name, "labels": {**LABELS, "app.kubernetes.io/component": pod["role"]}}
        if is_ending:
            metadata |= {"deletionTimestamp": "2026-11-22T01:12:08Z", "deletionGracePeriodSeconds": 60}
        ready = "False" if looks and not is_ending else "True"
        conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": ready}]
        shown.append(
            {"metadata": metadata, "status": {"phase": pod.get("phase", "Running"), "conditions": conditions}}
        )
        pod["looks"] = max(0, looks - 1)
        if is_ending and not looks:
            del state["pods"][name]
    return shown


def scale(state: dict[str, Any], role: str, replicas: int) -> None:
    state["replicas"][role] = replicas
    alive = [name for name, pod in state["pods"].items() if pod["role"] == role and not pod["is_ending"]]
    for number in range(len(alive), replicas):
        looks = int(os.environ["KUBECTL_LOOKS"])
        state["pods"][f"{role}-new{number}"] = {"role": role, "is_ending": False, "looks": looks}
    alive.sort(key=lambda name: int(state["pods"][name].get("cost", 0)), reverse=True)
    for name in alive[replicas:]:
        state["pods"][name] |= {"is_ending": True, "looks": 2}


def main() -> int:
    arguments = sys.argv[1:]
    with Path(os.environ["KUBECTL_LOG"]).open("a") as log:
        log.write(" ".join(arguments) + "\n")
    assert arguments[:2] == ["--namespace", "lamella"]
    state = json.loads(STATE.read_text())
    match arguments[2:4]:
        case ["get", "deployments"]:
            print(json.dumps({"apiVersion": "v1", "kind": "List", "items": deployments(state)}, indent=4))
        case ["get", "pods"]:
            print(json.dumps({"apiVersion": "v1", "kind": "List", "items": look_at_pods(state)}, indent=4))
        case ["exec", "--stdin"]:
            assert arguments[4:6] == ["deployment/scheduler", "--"]
            run_inside(arguments[6:], "/etc/lamella/lamella.toml")
        case ["annotate", "pod"]:
            state["pods"][arguments[4]]["cost"] = arguments[5].partition("pod-deletion-cost=")[2]
        case ["scale", deployment]:
            scale(state, deployment.removeprefix("deployment/"), int(arguments[4].partition("=")[2]))
    STATE.write_text(json.dumps(state))
    return 0


if __name__ == "__main__":
    sys.exit(main())
