"""Asks one service over HTTP whether it is healthy. Standard library only: it runs every few seconds.

``python -m services.healthcheck URL`` is what containers run: the command line takes several times its
processor time to be imported, in every container, and more than a check's time where the cores are busy.
"""

import http.client
import sys
import urllib.request
from typing import Literal

from services.server_url import parse_url

TIMEOUT_S = 2.0


def is_healthy(base_url: str, question: Literal["live", "ready"]) -> bool:
    """Whether ``/health/{question}`` answers 200 in time. Raises ConfigError for what is no URL."""
    url = f"{parse_url(base_url).base_url}/health/{question}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException, ValueError):
        return False


def main() -> int:
    """Of the service whose URL is the argument: 0 where it is ready, else 1."""
    return 0 if is_healthy(sys.argv[1], "ready") else 1


if __name__ == "__main__":
    sys.exit(main())
