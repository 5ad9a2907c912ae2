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

from common.config import MeshConfig
from common.errors import ConfigError
from common.ids import is_valid_id
from common.own_address import own_address
from common.secret_files import with_secrets

ADDRESS_VARIABLES = ("LAMELLA_ADVERTISE_HOST", "LAMELLA_TRANSFER_HOST")


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


if __name__ == "__main__":
    main()
