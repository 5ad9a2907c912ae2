"""The collector of OpenTelemetry's traces, where the settings name one."""

import http.client
import time
import urllib.request
from importlib.util import find_spec
from urllib.parse import urlsplit

from services.doctor.findings import Finding, good, note, problem

SUBJECT = "traces"
EXPORTER = "opentelemetry.exporter.otlp.proto.http"
TIMEOUT_S = 3.0


def examine_collector(endpoint: str) -> Finding:
    """Sends it no span, which is an empty message. Who would send stays unsaid: that may be a password."""
    if not is_installed(EXPORTER):
        return problem(
            SUBJECT,
            "`[telemetry] otlp_endpoint` is set, and what sends them is not installed",
            "run `make setup`, or install lamella[otel]; no service starts before",
        )
    parts = urlsplit(endpoint)
    place = parts.netloc.rpartition("@")[2]
    url = f"{parts.scheme}://{place}{parts.path.rstrip('/')}/v1/traces"
    request = urllib.request.Request(url, b"", {"content-type": "application/x-protobuf"})
    started_s = time.monotonic()
    try:
        urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
    except (OSError, http.client.HTTPException) as exc:
        return note(
            SUBJECT,
            f"{place} does not take them: {exc}",
            "have a collector take OTLP over HTTP there, or correct `[telemetry] otlp_endpoint` or"
            " OTEL_EXPORTER_OTLP_ENDPOINT; a mesh serves without, and its traces are lost",
        )
    return good(SUBJECT, f"{place} takes them, within {(time.monotonic() - started_s) * 1e3:.1f} ms")


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        # One of the packages that it is in is not there.
        return False
