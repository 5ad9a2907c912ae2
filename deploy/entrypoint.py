"""A container's first process: it finds the container's own address, then becomes ``lamella``.

Replicas of one service share one description, so their addresses cannot be written down; each is known only
inside. Others reach this container at the address it reaches the bus from, whatever other networks it is on.
Its service is named by its role and the container's own name, so that an operator finds one by the other.
Variables that are set already stay: on Kubernetes the pod's IP and name come from the downward API.
"""

import os
import socket
import sys
from collections.abc import Mapping
from urllib.parse import urlsplit

from common.config import MeshConfig
from common.errors import ConfigError
from common.ids import is_valid_id
from common.secret_files import with_secrets

ADDRESS_VARIABLES = ("LAMELLA_ADVERTISE_HOST", "LAMELLA_TRANSFER_HOST")
DEFAULT_NATS_PORT = 4222


def main() -> None:
    """Replaces this process by ``lamella`` with the same arguments, so that signals reach it."""
    arguments = sys.argv[1:]
    try:
        environment = dict(os.environ)
        if arguments[:1] == ["serve"] and len(arguments) > 1:
            environment = with_own_address(with_own_name(environment, arguments[1], socket.gethostname()))
    except ConfigError as exc:
        sys.exit(f"error: {exc}")
    os.execvpe("lamella", ["lamella", *arguments], environment)


def with_own_name(environment: Mapping[str, str], role: str, host: str) -> dict[str, str]:
    """The environment with the service's id. A container that starts again is the same service's next life.
    ``host``: by default the container's id; one that can be in no service's name leaves that to chance."""
    name = f"{role}-{host}"
    return {"LAMELLA_SERVICE_ID": name, **environment} if is_valid_id(name) else dict(environment)


def with_own_address(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with both address variables. Raises ConfigError when the bus's name is unknown."""
    missing = [variable for variable in ADDRESS_VARIABLES if variable not in environment]
    if not missing:
        return dict(environment)
    address = own_address(with_secrets(environment).get("NATS_URL", MeshConfig().nats_url))
    return {**environment, **dict.fromkeys(missing, address)}


def own_address(bus_url: str) -> str:
    """The IPv4 address from which this machine reaches the bus. Sends nothing. Raises ConfigError."""
    parts = urlsplit(bus_url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket only looks the route up.
            probe.connect((parts.hostname or "", parts.port or DEFAULT_NATS_PORT))
        except OSError as exc:
            raise ConfigError("NATS_URL", f"//{parts.hostname}", f"must be reachable: {exc}") from exc
        address: str = probe.getsockname()[0]
        return address


if __name__ == "__main__":
    main()
