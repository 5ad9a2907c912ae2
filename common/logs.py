"""Logs: one JSON object a line on standard error.

``event`` is a constant name, everything that varies is a field (``extra=``). Prompts, completions and
credentials are never logged; ids, counts and sizes are.
"""

import datetime
import logging
import sys
from typing import Any

import msgspec

STANDARD_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}

_encode = msgspec.json.Encoder(enc_hook=str).encode


class JsonFormatter(logging.Formatter):
    """Escapes every value, so no value can start a line of its own."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update((key, value) for key, value in record.__dict__.items() if key not in STANDARD_FIELDS)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encode(line).decode()


def configure_logging(service: str, level: int = logging.INFO) -> None:
    """Replaces what was configured. ``service`` is in every line."""
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(JsonFormatter(service))
    logging.basicConfig(level=level, handlers=[stream], force=True)
    # One line a request, and the metrics say it better.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("nats").setLevel(logging.CRITICAL)
