"""How a decode instance finds its attention workers and binds them, once, before it admits anything."""

import asyncio
import logging
import select
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from common.bus import Bus
from common.errors import BusError, ConfigError, Overloaded, RequestError, ServiceError, StoreError
from common.exchange_shape import ExchangeShape
from common.ids import InstanceId
from common.kv.blocks import blocks_for
from common.kv.layout import KVLayout
from common.messages import AttentionBound, BindAttention, KVDestination, ServiceRecord
from common.model.exchange import request_region, response_region
from common.spec import AttentionSpec, ElementType
from common.store import Store
from common.subjects import Subjects
from common.transfer.buffers import SharedBuffer, map_region
from common.transfer.endpoint import TransferEndpoint
from common.transfer.interface import PeerInfo, decode_peer_info, encode_peer_info
from common.transfer.shared_memory import open_pidfd
from decode.remote_attention import RemoteAttention, WorkerExchange

log = logging.getLogger("lamella.decode")

BIND_TIMEOUT_S = 60.0
"""For as many workers as wanted to be there and free."""
LOOK_AGAIN_S = 0.2
REQUEST_REGION = "attention-request"


class AttentionUnavailable(ServiceError):
    """There are not as many free attention workers as this instance was told to use."""


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a decode instance asks of its workers together. ``heads`` are query heads."""

    heads: int
    layout: KVLayout
    attention_specs: tuple[AttentionSpec, ...]
    element_type: ElementType
    context_length: int
    max_batch: int

    def share(self, workers: int) -> tuple[KVLayout, ExchangeShape, tuple[AttentionSpec, ...]]:
        """Of each of so many workers (head-level partition). Raises ConfigError where heads do not divide."""
        kv_heads = self.layout.kv_heads
        if kv_heads % workers:
            fitting = ", ".join(str(count) for count in range(1, kv_heads + 1) if kv_heads % count == 0)
            rule = f"must divide the model's {kv_heads} KV heads: {fitting}"
            raise ConfigError("instance.attention_workers", workers, rule)
        layout = self.layout.of_heads(range(kv_heads // workers))
        shape = ExchangeShape(
            max_tokens=self.max_batch,
            plan_words=1 + self.max_batch * (3 + blocks_for(self.context_length, layout.block_size)),
            heads=self.heads // workers,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            element_type=self.element_type,
        )
        specs = tuple(
            msgspec.structs.replace(spec, heads=shape.heads, kv_heads=shape.kv_heads)
            for spec in self.attention_specs
        )
        return layout, shape, specs


@dataclass(frozen=True, slots=True)
class BoundAttention:
    """``destinations``: where KV for this instance goes; ``total_blocks``: what every worker holds."""

    attention: RemoteAttention
    destinations: tuple[KVDestination, ...]
    total_blocks: int


@dataclass(slots=True)
class AttentionBinding:
    """Binds ``count`` workers. ``responses`` were registered with ``transfer`` under ``response_name``."""

    instance_id: InstanceId
    needs: AttentionNeeds
    responses: tuple[SharedBuffer, ...]
    transfer: TransferEndpoint
    bus: Bus
    store: Store
    subjects: Subjects
    call_timeout_s: float

    async def bind(self) -> BoundAttention:
        """Waits for enough workers. Raises AttentionUnavailable, ConfigError, or what a worker refuses."""
        bound: list[tuple[str, AttentionBound]] = []
        try:
            async with asyncio.timeout(BIND_TIMEOUT_S):
                while len(bound) < len(self.responses):
                    for worker_id in await self._workers():
                        if len(bound) == len(self.responses) or worker_id in {name for name, _ in bound}:
                            continue
                        answer = await self._try_bind(worker_id, len(bound))
                        if answer is not None:
                            bound.append((worker_id, answer))
                    await asyncio.sleep(LOOK_AGAIN_S)
        except TimeoutError:
            raise AttentionUnavailable(
                f"{len(bound)} of instance.attention_workers = {len(self.responses)} attention workers"
                f" were free within {BIND_TIMEOUT_S:g} s"
            ) from None
        return self._assemble(bound)

    async def _workers(self) -> list[str]:
        try:
            members = await self.store.members()
        except StoreError as exc:
            log.warning("members_unread", extra={"error": str(exc)})
            return []
        return sorted(
            record.service_id
            for record in members
            if isinstance(record, ServiceRecord) and record.kind == "attention"
        )

    async def _try_bind(self, worker_id: str, index: int) -> AttentionBound | None:
        """None where the worker is taken or does not answer. Raises what makes binding it impossible."""
        layout, shape, specs = self.needs.share(len(self.responses))
        message = BindAttention(
            decode_instance=self.instance_id,
            layout=layout,
            attention_specs=specs,
            shape=shape,
            endpoint=encode_peer_info(self.transfer.peer_info()),
            response_region=response_name(index),
        )
        subject = self.subjects.attention_calls(worker_id)
        try:
            return await self.bus.call(subject, message, AttentionBound, self.call_timeout_s)
        except (Overloaded, BusError):
            return None
        except RequestError as exc:
            raise AttentionUnavailable(f"attention worker {worker_id}: {exc}") from exc

    def _assemble(self, bound: list[tuple[str, AttentionBound]]) -> BoundAttention:
        _, shape, specs = self.needs.share(len(bound))
        exchanges, destinations = [], []
        for index, (worker_id, answer) in enumerate(bound):
            peer = decode_peer_info(answer.endpoint)
            mapped = map_region(peer.pid, peer.region(REQUEST_REGION))
            kv_heads = range(index * shape.kv_heads, (index + 1) * shape.kv_heads)
            exchanges.append(
                WorkerExchange(
                    worker_id,
                    range(index * shape.heads, (index + 1) * shape.heads),
                    kv_heads,
                    request_region(memoryview(mapped.mapping), shape),
                    response_region(self.responses[index].memory, shape),
                    has_exited(peer),
                )
            )
            destinations.append(
                KVDestination(answer.endpoint, kv_heads.start, len(kv_heads), answer.total_blocks)
            )
        return BoundAttention(
            RemoteAttention(exchanges, len(specs), self.needs.heads),
            tuple(destinations),
            min(answer.total_blocks for _, answer in bound),
        )


def response_name(index: int) -> str:
    """The region that takes the outputs of the worker with that number."""
    return f"attention-response-{index}"


def has_exited(peer: PeerInfo) -> Callable[[], bool]:
    """Asks whether that very process has ended."""
    exits = select.poll()
    exits.register(open_pidfd(peer), select.POLLIN)
    return lambda: bool(exits.poll(0))
