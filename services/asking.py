"""Asks one service of a mesh over HTTP, as commands do that look at one from outside."""

import http.client
import urllib.request
from typing import TypeVar

import msgspec

from common.errors import LauncherError

Answer = TypeVar("Answer")

TIMEOUT_S = 5.0


class NoAnswer(LauncherError):
    """Nobody is there, or whoever is says something else."""


def ask_service(url: str, kind: type[Answer]) -> Answer:
    """Its JSON. Raises NoAnswer."""
    try:
        return msgspec.json.decode(fetch(url), type=kind)
    except msgspec.DecodeError as exc:
        raise NoAnswer(f"{url} answers something else: {exc}") from exc


def fetch(url: str) -> bytes:
    """What it answers. Raises NoAnswer."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            body: bytes = response.read()
            return body
    # A port that speaks no HTTP is an HTTPException, and no OSError.
    except (OSError, http.client.HTTPException) as exc:
        raise NoAnswer(f"{url} does not answer: {exc}") from exc
