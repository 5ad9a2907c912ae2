"""Asks one service over HTTP whether it is healthy. Standard library only: it runs every few seconds."""

import urllib.error
import urllib.request
from typing import Literal

TIMEOUT_S = 2.0


def is_healthy(base_url: str, question: Literal["live", "ready"]) -> bool:
    """Whether ``/health/{question}`` answers 200 in time."""
    try:
        with urllib.request.urlopen(f"{base_url}/health/{question}", timeout=TIMEOUT_S) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False
