"""When a local mesh serves: schedulers know every instance, the gateway is ready, a request goes through."""

import asyncio
import re
from collections.abc import Mapping

from common.config import GatewayConfig
from common.errors import LauncherError
from common.messages import InstanceRecord, MemberRecord
from common.store import Store
from services.launcher.children import Child
from services.launcher.probes import fetch, until
from services.launcher.records import private_url_of, read_records

FIRST_REQUEST = b'{"model": "default", "prompt": [1], "max_tokens": 2, "ignore_eos": true}'
MAX_ERROR_BODY = 300
FIRST_REQUEST_TIMEOUT_S = 60.0


async def wait_known(store: Store, schedulers: list[Child]) -> None:
    """Returns when every scheduler has heard of every registered instance, so that it places on them."""
    records = await read_records(store)
    registered = sum(isinstance(record, InstanceRecord) for record in records.values())

    async def are_known() -> bool:
        urls = _urls_of(schedulers, await read_records(store))
        answers = await asyncio.gather(*(fetch(f"{url}/metrics") for url in urls))
        known = [_value_of(b"lamella_instances", body) for _, body in answers]
        return all(count is not None and count >= registered for count in known)

    await until(are_known, f"the scheduler to know {registered} instances")


async def wait_gateway(store: Store, gateways: list[Child]) -> str:
    """The URL of the only one, which knows best whether it can serve."""
    [url] = _urls_of(gateways, await read_records(store))

    async def is_ready() -> bool:
        return (await fetch(f"{url}/health/ready"))[0] == 200

    await until(is_ready, f"{url}/health/ready")
    return url


async def wait_served(store: Store, gateway_url: str, gateway: GatewayConfig) -> None:
    """Sends one small request through the whole mesh until nobody says that something is missing.

    The first user then finds every connection made, and no instance that was heard of but not from.
    """
    url, key = f"{gateway_url}/v1/completions", None
    if gateway.api_keys_file is not None and gateway.admin_key_file is not None:
        # Of API keys only the digests are known here; on the private port the admin key does, too.
        url = f"{private_url_of(await read_records(store))}/v1/completions"
        key = gateway.admin_key_file.expanduser().read_text(encoding="utf-8").strip()

    async def is_served() -> bool:
        status, body = await fetch(url, FIRST_REQUEST, FIRST_REQUEST_TIMEOUT_S, key)
        if status not in (0, 200, 503):
            raise LauncherError(f"{url} answered a first request with {status}: {body[:MAX_ERROR_BODY]!r}")
        return status == 200

    await until(is_served, f"{url} to serve a first request")


async def count_open_requests(store: Store, gateways: list[Child]) -> int:
    """As far as the gateways say it."""
    records = await read_records(store)
    urls = [records[each.service_id].http_url for each in gateways if each.service_id in records]
    answers = await asyncio.gather(*(fetch(f"{url}/metrics") for url in urls))
    return sum(int(_value_of(b"lamella_open_requests", body) or 0) for _, body in answers)


def _urls_of(children: list[Child], records: Mapping[str, MemberRecord]) -> list[str]:
    urls = [records[child.service_id].http_url for child in children if child.service_id in records]
    if not urls:
        role = children[0].role if children else "scheduler"
        raise LauncherError(f"the {role}'s record is gone from the store")
    return urls


def _value_of(metric: bytes, metrics: bytes) -> float | None:
    found = re.search(rb"^%s (\S+)$" % metric, metrics, re.MULTILINE)
    return None if found is None else float(found[1])
