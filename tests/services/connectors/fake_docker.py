"""Stands for `docker compose`, for what connectors read of it and say to it; tests/compose has the real one.

Containers are in the file that DOCKER_STATE names, commands are appended to the one that DOCKER_LOG names.
More than DOCKER_ROOM containers of a service do not become healthy.
"""

import json
import os
import sys
from pathlib import Path

from tests.services.connectors.inside import run_inside

STATE = Path(os.environ["DOCKER_STATE"])
LINE = {
    "Command": '"python -m deploy.ent…"',
    "CreatedAt": "2026-11-22 01:12:08 +0000 UTC",
    "ExitCode": 0,
    "Health": "healthy",
    "ID": "0f8a7a8a0d5c",
    "Image": "lamella:dev",
    "Labels": "com.docker.compose.oneoff=False,com.docker.compose.project=lamella",
    "LocalVolumes": "0",
    "Mounts": "",
    "Networks": "lamella_mesh",
    "Ports": "",
    "Project": "lamella",
    "Publishers": None,
    "RunningFor": "2 minutes ago",
    "Size": "0B",
    "Status": "Up 2 minutes (healthy)",
}


def list_containers(counts: dict[str, int]) -> None:
    for service, count in counts.items():
        for number in range(1, count + 1):
            name = f"lamella-{service}-{number}"
            health = "healthy" if number <= int(os.environ["DOCKER_ROOM"]) else "unhealthy"
            names = {"Name": name, "Names": name, "Service": service}
            print(json.dumps({**LINE, **names, "State": "running", "Health": health}))
    ended = {"Name": "lamella-decode-9", "Service": "decode", "State": "exited", "Health": ""}
    print(json.dumps({**LINE, **ended}))


def main() -> int:
    arguments = sys.argv[1:]
    with Path(os.environ["DOCKER_LOG"]).open("a") as log:
        log.write(" ".join(arguments) + "\n")
    counts: dict[str, int] = json.loads(STATE.read_text())
    if arguments[:2] == ["compose", "ps"]:
        list_containers(counts)
        return 0
    if arguments[0] in ("stop", "rm"):
        return 0
    if arguments[:2] == ["compose", "exec"]:
        assert arguments[2:4] == ["-T", "scheduler"]
        run_inside(arguments[4:], "/etc/lamella/compose.toml")
    scaled = [arguments[index + 1] for index, each in enumerate(arguments) if each == "--scale"]
    counts |= {service: int(count) for service, _, count in (each.partition("=") for each in scaled)}
    STATE.write_text(json.dumps(counts))
    crowded = [service for service, count in counts.items() if count > int(os.environ["DOCKER_ROOM"])]
    for service in crowded:
        sys.stderr.write(f"container lamella-{service}-{counts[service]} is unhealthy\n")
    return 1 if crowded else 0


if __name__ == "__main__":
    sys.exit(main())
