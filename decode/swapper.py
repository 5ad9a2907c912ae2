"""Copies the KV of preempted sequences to the host tier and back, on the engine's thread, between steps."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.engine_thread import EngineThread
from common.instance_metrics import InstanceMetrics
from common.kv.tier import HostTier
from common.timeline import timeline
from common.timeline_events import SWAP_KV
from decode.events import DecodeEvent, SwapFailed, SwapFinished, SwapIn, SwapOut

log = logging.getLogger("lamella.decode")


@dataclass(frozen=True, slots=True)
class Swapper:
    tier: HostTier
    engine: EngineThread
    metrics: InstanceMetrics

    async def carry_out(self, command: SwapOut | SwapIn, handle: Callable[[DecodeEvent], None]) -> None:
        """Tells ``handle`` what became of it. The timeline shows the wait for the engine's thread, too."""
        is_out, owner, began_ns = isinstance(command, SwapOut), command.owner, timeline.begin()
        copy = self.tier.copy_out if is_out else self.tier.copy_in
        try:
            kv_bytes, copy_s = await self.engine.run(_timed, copy, command.blocks, command.host_blocks)
        except Exception:
            log.exception("swap_failed", extra={"request": owner.request_id, "is_out": is_out})
            handle(SwapFailed(owner))
            return
        timeline.end(began_ns, SWAP_KV, owner.attempt, len(command.blocks), requests=owner.request_id)
        self.metrics.observe_swap("out" if is_out else "in", kv_bytes, copy_s)
        event = "kv_swapped_out" if is_out else "kv_swapped_in"
        facts = {"request": owner.request_id, "kv_bytes": kv_bytes, "copy_s": round(copy_s, 6)}
        log.info(event, extra=facts)
        handle(SwapFinished(owner, kv_bytes, copy_s))


def _timed(
    copy: Callable[[Sequence[int], Sequence[int]], int], blocks: Sequence[int], host_blocks: Sequence[int]
) -> tuple[int, float]:
    """(bytes, seconds). Runs on the engine's thread."""
    began_s = time.monotonic()
    kv_bytes = copy(blocks, host_blocks)
    return kv_bytes, time.monotonic() - began_s
