"""Who may use a gateway: API keys on its public port, the admin key on its private one.

Keys are compared as SHA-256 digests, every known one in constant time, so neither a file nor the time that a
refusal takes tells one. Without a file of keys the public port is open; with one everything is denied that
does not bring a key, but for health, which load balancers ask.
"""

import hashlib
import hmac
import re
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp

from common.errors import ConfigError, RequestError, reason_of
from gateway.errors import Forbidden, Unauthorized, error_body, error_headers, status_of
from gateway.exchange import Exchange, Receive, Scope, Send, new_exchange

OPEN_PATHS = frozenset(("/health", "/health/live", "/health/ready"))
DIGEST = re.compile(r"[0-9a-f]{64}")
BEARER = b"bearer "


@dataclass(frozen=True, slots=True)
class Keys:
    """``digests``: SHA-256 of each key."""

    digests: tuple[bytes, ...]

    def admit(self, key: bytes) -> bool:
        digest = hashlib.sha256(key).digest()
        # Not any(): how long it takes is not to say which one it is.
        return sum(hmac.compare_digest(digest, known) for known in self.digests) > 0


def read_api_keys(path: Path) -> Keys:
    """Of a file with the SHA-256 of a key in each line, in hexadecimal digits; a name, or anything else, may
    follow it, and lines that begin with # are comments. Raises ConfigError."""
    digests = []
    for number, line in enumerate(_read(path, "gateway.api_keys_file").splitlines(), start=1):
        digest = line.split("#")[0].split(maxsplit=1)[:1]
        if not digest:
            continue
        if DIGEST.fullmatch(digest[0]) is None:
            rule = f"must have 64 hexadecimal digits at the beginning of line {number}: a key's SHA-256"
            raise ConfigError("gateway.api_keys_file", str(path), rule)
        digests.append(bytes.fromhex(digest[0]))
    if not digests:
        raise ConfigError("gateway.api_keys_file", str(path), "must hold at least one key's SHA-256")
    return Keys(tuple(digests))


def read_admin_key(path: Path) -> Keys:
    """Of a file that holds the key itself. Raises ConfigError."""
    key = _read(path, "gateway.admin_key_file").strip()
    if len(key) < 16:
        raise ConfigError("gateway.admin_key_file", str(path), "must hold a key of at least 16 characters")
    return Keys((hashlib.sha256(key.encode()).digest(),))


def _read(path: Path, setting: str) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(setting, str(path), f"cannot be read ({reason_of(exc)})") from exc


def check_key(exchange: Exchange, keys: Keys | None) -> None:
    """Raises Unauthorized; Forbidden where there is no key at all."""
    if keys is None:
        raise Forbidden("no admin key is configured: set gateway.admin_key_file")
    sent = exchange.header(b"authorization")
    if sent[: len(BEARER)].lower() != BEARER or not keys.admit(sent[len(BEARER) :].strip()):
        raise Unauthorized("a valid key is needed, as `authorization: Bearer KEY`")


@dataclass(frozen=True, slots=True)
class KeyGuard:
    """In front of every route of an application: whoever adds one cannot forget to guard it."""

    app: ASGIApp
    keys: Keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            exchange = new_exchange(scope, receive, send)
            try:
                check_key(exchange, self.keys)
            except RequestError as exc:
                await exchange.respond(status_of(exc), error_body(exc), error_headers(exc))
                return
        await self.app(scope, receive, send)
