"""What `kubectl kustomize` makes of an overlay, and what the tests ask of it. No cluster is needed."""

import base64
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from common.config import Config
from common.config_file import load_config
from deploy import credentials

ROOT = Path(__file__).resolve().parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu-demo", "gpu", "ha", "ha-attention")
RENDER_TIMEOUT_S = 60.0

Manifest = dict[str, Any]


@cache
def rendered(overlay: str) -> list[Manifest]:
    """Every object of an overlay, with passwords of its own; to be read only. Skips the test, and says so,
    where there is no kubectl."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl: the Kubernetes manifests are neither rendered nor checked")
    with TemporaryDirectory() as directory:
        copy = Path(directory) / "kubernetes"
        # Passwords that somebody has made here for a cluster are none of a test's business.
        shutil.copytree(KUBERNETES, copy, ignore=shutil.ignore_patterns("secrets"))
        credentials.fill(copy / "base" / "secrets")
        command = (kubectl, "kustomize", str(copy / "overlays" / overlay))
        done = subprocess.run(command, capture_output=True, text=True, timeout=RENDER_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(objects: list[Manifest], *kinds: str) -> dict[str, Manifest]:
    """By their names."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] in kinds}


def workloads(objects: list[Manifest]) -> dict[str, Manifest]:
    """What makes pods: services, NATS and Redis, by their names."""
    return of_kind(objects, "Deployment", "StatefulSet")


def services(objects: list[Manifest]) -> dict[str, Manifest]:
    """lamella's own workloads, by their names."""
    return {
        name: each
        for name, each in workloads(objects).items()
        if labels_of(each).get("lamella.dev/service") == "true"
    }


def pod_of(workload: Manifest) -> Manifest:
    """The specification of its pods."""
    pod: Manifest = workload["spec"]["template"]["spec"]
    return pod


def labels_of(workload: Manifest) -> dict[str, str]:
    """Of its pods."""
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def container_of(workload: Manifest) -> Manifest:
    """The only one of its pods."""
    (container,) = pod_of(workload)["containers"]
    found: Manifest = container
    return found


def environment_of(workload: Manifest, objects: list[Manifest]) -> dict[str, str | Manifest]:
    """Variables as a pod is given them: a text, or where the kubelet takes it from."""
    container = container_of(workload)
    found: dict[str, str | Manifest] = {}
    for each in container.get("envFrom", ()):
        found |= of_kind(objects, "ConfigMap")[each["configMapRef"]["name"]]["data"]
    return found | {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def files_of(workload: Manifest, objects: list[Manifest]) -> Iterator[tuple[Path, str]]:
    """Path and text of every file that a pod is given."""
    maps, secrets = of_kind(objects, "ConfigMap"), of_kind(objects, "Secret")
    texts: dict[str, dict[str, str]] = {}
    for volume in pod_of(workload)["volumes"]:
        if "configMap" in volume:
            texts[volume["name"]] = maps[volume["configMap"]["name"]]["data"]
        elif "secret" in volume:
            encoded = secrets[volume["secret"]["secretName"]]["data"]
            texts[volume["name"]] = {name: base64.b64decode(each).decode() for name, each in encoded.items()}
    for mount in container_of(workload)["volumeMounts"]:
        for name, text in texts.get(mount["name"], {}).items():
            yield Path(mount["mountPath"]) / name, text


def write_files(workload: Manifest, objects: list[Manifest], directory: Path) -> dict[str, str]:
    """Lays a pod's files out below ``directory`` as in the pod. Returns their places by their paths there."""
    places = {}
    for path, text in files_of(workload, objects):
        place = directory / path.relative_to("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        places[str(path)] = str(place)
    return places


def settings_of(workload: Manifest, objects: list[Manifest], directory: Path) -> Config:
    """What a pod of lamella's reads as its configuration: the files that its command and variables name."""
    places = write_files(workload, objects, directory)
    arguments = container_of(workload)["args"]
    variables = {
        name: places.get(value, value)
        for name, value in environment_of(workload, objects).items()
        if isinstance(value, str)
    }
    return load_config(Path(places[arguments[arguments.index("--config") + 1]]), variables)
