"""Attention on attention workers: each holds some KV heads of every sequence and computes their attention.

An ``AttentionIO``: the model does not know. Q goes out as soon as it exists, K and V when they do, and the
outputs of all workers are put side by side (head-level partition: Lamina 2, section 5). Runs on the engine's
thread; everything per layer goes through shared memory (``common.model.exchange``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from common.errors import AttentionLost
from common.model.exchange import (
    KEY_VALUE,
    OUTPUT,
    QUERY,
    PeerSilent,
    RequestRegion,
    ResponseRegion,
    wait_until_reached,
    write_plan,
)
from common.model.interface import SequenceChunk

ANSWER_TIMEOUT_S = 2.0
"""A layer's attention takes milliseconds; a worker that is paused or gone is noticed within this time."""


@dataclass(frozen=True, slots=True)
class WorkerExchange:
    """One attention worker: its share of the query heads and of the KV heads, and the memory between."""

    worker_id: str
    heads: range
    kv_heads: range
    request: RequestRegion
    response: ResponseRegion
    is_gone: Callable[[], bool]


class RemoteAttention:
    """One step at a time: ``begin``, then the layers in order. Raises AttentionLost in ``receive``."""

    def __init__(self, workers: Sequence[WorkerExchange], layers: int, heads: int) -> None:
        self._workers = tuple(workers)
        self._layers = layers
        self._heads = heads
        self._step = 0
        self._tokens = 0

    def begin(self, chunks: Sequence[SequenceChunk]) -> None:
        """Announces a step. Raises ValueError for one over the exchange's bounds."""
        self._step += 1
        self._tokens = sum(chunk.length for chunk in chunks)
        for worker in self._workers:
            write_plan(worker.request, chunks, self._step)

    def send_q(self, layer: int, q: torch.Tensor) -> None:
        number = self._number(layer)
        for worker in self._workers:
            worker.request.q[: self._tokens].copy_(q[:, worker.heads.start : worker.heads.stop])
            worker.request.words[QUERY] = number

    def send_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        number = self._number(layer)
        for worker in self._workers:
            share = slice(worker.kv_heads.start, worker.kv_heads.stop)
            worker.request.k[: self._tokens].copy_(k[:, share])
            worker.request.v[: self._tokens].copy_(v[:, share])
            worker.request.words[KEY_VALUE] = number

    def receive(self, layer: int) -> torch.Tensor:
        number = self._number(layer)
        first = self._workers[0].response.output
        output = first.new_empty(self._tokens, self._heads, first.shape[2])
        for worker in self._workers:
            try:
                wait_until_reached(worker.response.words, OUTPUT, number, ANSWER_TIMEOUT_S, worker.is_gone)
            except PeerSilent as exc:
                raise AttentionLost(f"attention worker {worker.worker_id}: {exc}") from exc
            output[:, worker.heads.start : worker.heads.stop].copy_(worker.response.output[: self._tokens])
        return output

    def _number(self, layer: int) -> int:
        return self._step * self._layers + layer + 1
