"""Where Prometheus finds the metrics of a mesh."""

import asyncio
import json
from pathlib import Path

import msgspec

from common.config import Config, MeshConfig
from common.ids import Incarnation
from common.messages import ServiceRecord
from common.store import Store
from services.commands.targets import as_json, keep_written
from tests.common.buses import run
from tests.instance_records import make_record

SCHEDULER = ServiceRecord(
    service_id="scheduler-0",
    incarnation=Incarnation("s1"),
    kind="scheduler",
    host="10.0.0.7",
    pid=2,
    http_url="http://10.0.0.7:4001",
)
LENT = make_record("decode-0", "mixed", "d1", home="decode", http_url="http://10.0.0.8:4002")
EXPECTED = [
    {"targets": ["10.0.0.8:4002"], "labels": {"component": "decode", "instance": "decode-0"}},
    {"targets": ["10.0.0.7:4001"], "labels": {"component": "scheduler", "instance": "scheduler-0"}},
]
WAIT_S = 20.0


def test_each_process_is_a_target_under_its_own_name_and_the_role_that_it_was_started_with() -> None:
    assert json.loads(as_json([SCHEDULER, LENT])) == EXPECTED
    assert as_json([SCHEDULER, LENT]) == as_json([LENT, SCHEDULER])


def test_a_gateway_whose_public_port_wants_keys_is_read_at_its_private_one() -> None:
    url, private_url = "http://127.0.0.1:8000", "http://127.0.0.1:8001"
    gateway = msgspec.structs.replace(SCHEDULER, kind="gateway", http_url=url, private_url=private_url)
    read = [json.loads(as_json([gateway], is_locked))[0]["targets"] for is_locked in (False, True)]
    assert read == [["127.0.0.1:8000"], ["127.0.0.1:8001"]]


def test_the_file_follows_who_comes_and_goes(redis_url: str, namespace: str, tmp_path: Path) -> None:
    file = tmp_path / "targets.json"

    async def wait_for(content: object) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                if file.exists() and json.loads(file.read_text()) == content:
                    return
                await asyncio.sleep(0.05)

    config = Config(mesh=MeshConfig(namespace=namespace, redis_url=redis_url))

    async def work() -> None:
        stores = [Store(redis_url, namespace) for _ in range(2)]
        for store in stores:
            await store.connect()
        await stores[0].join(SCHEDULER, WAIT_S)
        await stores[1].join(LENT, WAIT_S)
        watch = asyncio.create_task(keep_written(config, file))
        await wait_for(EXPECTED)
        await stores[1].leave()
        await wait_for(EXPECTED[1:])
        watch.cancel()
        for store in stores:
            await store.close()

    run(work())
    assert [each.name for each in tmp_path.iterdir()] == ["targets.json"]
