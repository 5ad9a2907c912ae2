"""Sockets to listen on, and which setting is to blame where there can be none."""

import errno
import socket
from typing import NamedTuple

from common.errors import ConfigError, reason_of

BACKLOG = 2048
OF_THE_ADDRESS = frozenset((errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL))
"""Whatever the port. Errors of names that nobody resolves are below zero."""


class Place(NamedTuple):
    """The settings that say where."""

    host: str
    port: str


SERVICE = Place("service.host", "service.port")


def bind(host: str, port: int, place: Place = SERVICE) -> socket.socket:
    """A listening socket. Raises ConfigError naming the setting of ``place`` that cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as exc:
        # Python appends the address, which stands before the rule.
        reason = reason_of(exc).partition(" (while ")[0]
        if exc.errno in OF_THE_ADDRESS or (exc.errno or 0) < 0:
            rule = f"must be an address of this machine, or a name of one ({reason})"
            raise ConfigError(place.host, host, rule) from exc
        raise ConfigError(place.port, port, f"cannot be listened on at {host} ({reason})") from exc


def reserve(host: str) -> socket.socket:
    """A socket that keeps a free port for a server of another program, which is told ``port_of`` it.

    Linux gives a bound port to nobody who asks for any that is free, nor to a connection's own end; who asks
    for this one may listen on it as long as this socket does not, where both say SO_REUSEADDR, as servers
    do. The port is kept until the socket is closed, while its server is started anew as well.
    """
    reservation = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind((host, 0))
    except OSError:
        reservation.close()
        raise
    return reservation


def url_of(host: str, port: int) -> str:
    """An IPv6 address in its brackets."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port
