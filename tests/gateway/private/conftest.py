"""A gateway with an admin key and API keys, alone in its mesh."""

import asyncio
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from common.messages import ServiceRecord
from common.store import Store
from tests.gateway.conftest import gateway_config
from tests.gateway.processes import GatewayProcess, running_gateway, send

ADMIN_KEY = "an admin's key of some length"
API_KEY = "a user's key"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
USER = {"authorization": f"Bearer {API_KEY}"}


@pytest.fixture(scope="module")
def locked_gateway(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    directory = tmp_path_factory.mktemp("locked")
    admin_key_file, api_keys_file = directory / "admin-key", directory / "api-keys"
    admin_key_file.write_text(ADMIN_KEY + "\n")
    api_keys_file.write_text(hashlib.sha256(API_KEY.encode()).hexdigest() + " a user\n")
    config = gateway_config(nats_url, redis_url)
    gateway = msgspec.structs.replace(
        config.gateway, admin_key_file=admin_key_file, api_keys_file=api_keys_file
    )
    with running_gateway(msgspec.structs.replace(config, gateway=gateway), directory) as process:
        yield process


def private_url_of(gateway: GatewayProcess) -> str:
    """As its record in the store says."""

    async def read() -> str:
        mesh = gateway.config.mesh
        store = Store(mesh.redis_url, mesh.namespace)
        try:
            [record] = [each for each in await store.members() if isinstance(each, ServiceRecord)]
        finally:
            await store.close()
        assert record.private_url is not None
        return record.private_url

    return asyncio.run(read())


def get(url: str) -> Any:
    answer = send(url, None)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)
