"""Makes a composed mesh's passwords: files that NATS, Redis and the services read, each only its own.

``python -m deploy.credentials DIRECTORY`` fills ``services/`` (the URLs with which services connect),
``nats/`` and ``redis/`` (whom these two let in), ``gateway/`` (the key that changes the mesh) and
``grafana/`` (its administrator's password). What is there stays, so that running services stay connected; the
servers' files follow from it. Standard library only: every `docker compose up` runs it first.

Redis learns only the password's SHA-256. NATS would take bcrypt, which Python has not: its file holds the
password, and only NATS mounts it.
"""

import hashlib
import os
import secrets
import sys
from pathlib import Path
from urllib.parse import urlsplit

USER = "lamella"
PASSWORD_BYTES = 24

NATS_USERS = """\
authorization {{
  timeout: 2
  users: [
    {{ user: "{user}", password: "{password}",
       permissions: {{ publish: ["lamella.>", "_INBOX.>"], subscribe: ["lamella.>", "_INBOX.>"] }} }}
  ]
}}
"""
REDIS_USERS = """\
user default on nopass resetkeys resetchannels -@all +ping
user {user} on #{sha256} ~lamella:* resetchannels -@all +@read +@write +@connection +time \
+evalsha +script|load -@admin -@dangerous
"""


def main() -> None:
    fill(Path(sys.argv[1]))


def fill(directory: Path) -> None:
    """Writes what is missing or different. Raises OSError."""
    nats_password = _password(directory / "services" / "nats_url", "nats://{user}:{password}@nats:4222")
    redis_password = _password(directory / "services" / "redis_url", "redis://{user}:{password}@redis:6379/0")
    _write(directory / "nats" / "users.conf", NATS_USERS.format(user=USER, password=nats_password))
    sha256 = hashlib.sha256(redis_password.encode()).hexdigest()
    _write(directory / "redis" / "users.acl", REDIS_USERS.format(user=USER, sha256=sha256))
    _keep_secret(directory / "gateway" / "admin_key")
    _keep_secret(directory / "grafana" / "admin_password")


def _password(url_file: Path, url: str) -> str:
    """The password in the URL that the file holds; a new one where there is no file."""
    if url_file.exists():
        password = urlsplit(url_file.read_text()).password
        if password:
            return password
    password = secrets.token_hex(PASSWORD_BYTES)
    _write(url_file, url.format(user=USER, password=password))
    return password


def _keep_secret(path: Path) -> None:
    """A new one where there is none."""
    if not path.exists():
        _write(path, secrets.token_hex(PASSWORD_BYTES))


def _write(path: Path, text: str) -> None:
    """Replaces the file as a whole, readable by its owner only: a server may be reading it."""
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".new")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    scratch.replace(path)


if __name__ == "__main__":
    main()
