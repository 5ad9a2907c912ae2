"""An attention worker's bindings over a real bus: how they end, and what is left of them."""

import asyncio

import pytest

from common.config import AttentionConfig
from common.errors import EngineError
from common.model.interface import SequenceChunk
from tests.attention.worker_service import CALL_TIMEOUT_S, LAYERS, attention_service, binder
from tests.common.buses import pair, run

STEP = [SequenceChunk((0,), 0, 1, key=7)]


def test_a_worker_whose_thread_has_ended_ends_and_still_gives_a_binding_up(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    async def serve() -> None:
        settings = AttentionConfig(kv_bytes=1 << 20)
        async with (
            pair(nats_url, namespace) as (own, theirs),
            binder(theirs, namespace) as instance,
            attention_service(own, redis_url, namespace, settings) as worker,
        ):
            binding = await instance.bind(worker.record, 0)
            assert binding is not None
            assert worker.service.loop._cores is not None
            worker.service.loop._cores.close()
            binding.exchange.lanes[0].announce(STEP, 1, LAYERS)
            try:
                await asyncio.sleep(CALL_TIMEOUT_S)
            finally:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await asyncio.to_thread(worker.service.loop.remove, binding.binding_id)

    with pytest.raises(ExceptionGroup) as failure:
        run(serve())
    [error] = failure.value.exceptions
    assert isinstance(error, EngineError)
    assert "Bad file descriptor" in str(error)
