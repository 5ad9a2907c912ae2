"""At which address others reach this machine, and whether that is still so.

A container that was cut off its network and put back has another address. Others look for its process at the
former one until it ends: whoever starts it anew (a restart policy) makes it look its address up again.
"""

import asyncio
import socket
from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from common.errors import ConfigError, ServiceError

DEFAULT_NATS_PORT = 4222


class AddressLost(ServiceError):
    """This machine is reached at another address than the one that others were told."""


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


def is_own(host: str) -> bool:
    """Whether an address is one of this machine's. A name never is: it may lead somewhere else."""
    try:
        family = socket.AF_INET if ip_address(host).version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except (ValueError, OSError):
        return False
    return True


async def watch_own_addresses(hosts: Iterable[str], bus_url: str, interval_s: float) -> None:
    """Watches those of ``hosts`` that are this machine's now; others may be a proxy's. Raises AddressLost
    once one is not any more and the bus can be reached from another: until then the machine is cut off, and
    may get the same one back."""
    own = {host for host in hosts if is_own(host)}
    while own:
        await asyncio.sleep(interval_s)
        lost = sorted(host for host in own if not is_own(host))
        if not lost:
            continue
        try:
            found = await asyncio.to_thread(own_address, bus_url)
        except ConfigError:
            continue
        raise AddressLost(f"others were told {lost[0]}, and this machine is at {found} now")
