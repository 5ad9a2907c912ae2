"""The address of an OpenAI-compatible server, as users write it."""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from common.errors import ConfigError

OPENAI_PATHS = re.compile(r"/v1(/chat/completions|/completions|/models)?$")
"""What people paste behind the address; every client here adds its own."""
HOST = re.compile(r"[\w.:%-]+", re.ASCII)
PATH = re.compile(r"[!-~]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Target:
    """A server's address. ``path`` is what the user's URL has before ``/v1``."""

    host: str
    port: int
    is_tls: bool
    path: str

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def base_url(self) -> str:
        """Without a final slash; ``/v1/…`` may follow."""
        return f"{'https' if self.is_tls else 'http'}://{self.authority}{self.path}"


def parse_url(url: str) -> Target:
    """A base URL with or without scheme, final slash and ``/v1``. Raises ConfigError for anything else."""
    text = url.strip()
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        given_port = parts.port
    except ValueError as exc:
        raise ConfigError("--url", url, f"is no URL: {exc}") from exc
    if parts.scheme not in ("http", "https") or not parts.hostname or not HOST.fullmatch(parts.hostname):
        raise ConfigError("--url", url, "must be http://HOST[:PORT] or https://HOST[:PORT]")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError("--url", url, "must not carry a user, a query or a fragment")
    if given_port == 0 or not PATH.fullmatch(parts.path):
        raise ConfigError("--url", url, "its port must be 1..65535 and its path plain, without spaces")
    is_tls = parts.scheme == "https"
    port = given_port or (443 if is_tls else 80)
    return Target(parts.hostname, port, is_tls, OPENAI_PATHS.sub("", parts.path.rstrip("/")))
