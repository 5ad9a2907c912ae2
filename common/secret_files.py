"""Secrets from files: where a variable's value holds a password, NAME_FILE may name the file it stands in.

What stands in the environment shows in ``docker inspect``, in /proc and in every child; a file's content does
not. Containers and pods mount such files read-only.
"""

from collections.abc import Mapping
from pathlib import Path

from common.errors import ConfigError

SECRET_VARIABLES = ("NATS_URL", "REDIS_URL")
"""A URL says who connects: ``nats://user:password@host:4222``."""
FILE_VARIABLES = tuple(f"{variable}_FILE" for variable in SECRET_VARIABLES)


def with_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with every secret in its place, and without the variables that named their files.

    Raises ConfigError for a file that cannot be read or is empty, and for a secret that is given twice; none
    of these errors shows a secret.
    """
    complete = {name: value for name, value in environment.items() if name not in FILE_VARIABLES}
    for variable, file_variable in zip(SECRET_VARIABLES, FILE_VARIABLES, strict=True):
        if file_variable not in environment:
            continue
        path = environment[file_variable]
        if variable in environment:
            raise ConfigError(file_variable, path, f"cannot be combined with {variable}")
        complete[variable] = _read_secret(file_variable, path)
    return complete


def _read_secret(variable: str, path: str) -> str:
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except OSError as exc:
        raise ConfigError(variable, path, f"cannot be read ({exc.strerror})") from exc
    except UnicodeDecodeError:
        # Its message quotes the bytes.
        raise ConfigError(variable, path, "is not UTF-8 text") from None
    if not secret:
        raise ConfigError(variable, path, "must hold a URL: it is empty")
    return secret
