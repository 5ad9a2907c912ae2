"""Gateways as processes of their own, and what can be asked of them from outside."""

import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.config import Config
from common.config_file import to_toml
from tests.e2e.meshes import LAMELLA, ROOT, environment, get_text

START_TIMEOUT_S = 60.0
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class GatewayProcess:
    """A running gateway. ``config`` is its own, so its wires can be joined."""

    config: Config
    url: str
    popen: subprocess.Popen[bytes]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def metric(self, name: str, labels: str = "") -> float:
        """Sum over the series of ``name`` whose labels contain ``labels``; 0 when there is none."""
        text = get_text(f"{self.url}/metrics")
        series = re.findall(rf"^{name}(\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for found, value in series if labels in found)

    def wait_metric(self, name: str, value: float, timeout_s: float = 10.0) -> None:
        """Until the metric has this value. Fails the test with the value it kept."""
        deadline_s = time.monotonic() + timeout_s
        while (now := self.metric(name)) != value:
            assert time.monotonic() < deadline_s, f"{name} is {now}, not {value}"
            time.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, str | None]:
        """OpenAI's error object; fails the test when the answer is none."""
        content = json.loads(self.body)
        assert set(content) == {"error"}, content
        error: dict[str, str | None] = content["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        return error


def send(
    url: str, body: bytes | dict[str, object] | None, headers: dict[str, str] | None = None, method: str = ""
) -> Answer:
    """One request without a client library, so that anything may be sent."""
    content = json.dumps(body).encode() if isinstance(body, dict) else body
    request = urllib.request.Request(
        url,
        content,
        {"content-type": "application/json", **(headers or {})},
        method=method or ("GET" if body is None else "POST"),
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return Answer(response.status, _lower(response.headers), response.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, _lower(error.headers), error.read())


@contextmanager
def running_gateway(
    config: Config, directory: Path, until: str = "service_ready"
) -> Iterator[GatewayProcess]:
    """A gateway that has logged the event ``until`` when this returns, and is gone at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    config_file, log_file = directory / "gateway.toml", directory / "gateway.log"
    config_file.write_text(to_toml(config))
    with log_file.open("wb") as log:
        popen = subprocess.Popen(
            [*LAMELLA, "serve", "gateway", "--config", str(config_file)],
            env=environment(),
            cwd=ROOT,
            stderr=log,
        )
    try:
        yield GatewayProcess(config, _wait_event(popen, log_file, until), popen)
    finally:
        popen.terminate()
        try:
            popen.wait(20)
        finally:
            popen.kill()
    assert "Traceback" not in log_file.read_text()


def _wait_event(popen: subprocess.Popen[bytes], log_file: Path, name: str) -> str:
    """The URL that the event tells."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        assert popen.poll() is None, log_file.read_text()
        for line in log_file.read_text().splitlines():
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("event") == name:
                return str(event["url"])
        time.sleep(POLL_S)
    raise AssertionError(f"no {name} within {START_TIMEOUT_S} s: {log_file.read_text()}")


def _lower(headers: object) -> dict[str, str]:
    assert hasattr(headers, "items")
    return {name.lower(): value for name, value in headers.items()}
