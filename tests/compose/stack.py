"""The stack's own project, and commands about it."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD_TIMEOUT_S = 1800.0
COMMAND_TIMEOUT_S = 180.0
PROJECT = "lamella-test"
PUBLISHED = "127.0.0.1:18000"
PRIVATE = "127.0.0.1:18001"
PROMETHEUS = "127.0.0.1:18090"


@dataclass(frozen=True, slots=True)
class Stack:
    """Commands about one compose project. ``prefix`` puts a command into the engine's network."""

    prefix: tuple[str, ...]

    def run(self, *command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """The command's output. Fails the test with everything it said when its status is not 0."""
        done = subprocess.run(
            (*self.prefix, *command),
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def begin(self, *command: str) -> subprocess.Popen[str]:
        """The command, running beside the test, which talks to it."""
        return subprocess.Popen(
            (*self.prefix, *command),
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def compose(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        return self.run("docker", "compose", *arguments, timeout_s=timeout_s)

    def has_image(self, name: str) -> bool:
        """Whether it is here, or could be brought here."""
        commands = (("image", "inspect", name), ("pull", "--quiet", name))
        return any(
            subprocess.run((*self.prefix, "docker", *each), capture_output=True, check=False).returncode == 0
            for each in commands
        )

    def containers(self, service: str) -> list[str]:
        """Ids of the service's containers, ended ones too."""
        return self.compose("ps", "--all", "--quiet", service).split()


def why_no_engine(prefix: tuple[str, ...]) -> str | None:
    """What keeps an engine from being asked; None where one answers."""
    try:
        done = subprocess.run(
            (*prefix, "docker", "info"),
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return str(exc)
    said = done.stderr.strip().splitlines()
    return f"`docker info` ended with {done.returncode}: {' '.join(said[-1:])}" if done.returncode else None


def environment() -> dict[str, str]:
    """Of every command: the stack is the tests' own beside another of this machine."""
    return {
        **os.environ,
        "COMPOSE_PROJECT_NAME": PROJECT,
        "LAMELLA_TAG": "test",
        "LAMELLA_PUBLISH": PUBLISHED,
        "LAMELLA_PUBLISH_PRIVATE": PRIVATE,
        "LAMELLA_PROMETHEUS": PROMETHEUS,
        "PYTHONPATH": str(ROOT),
    }
