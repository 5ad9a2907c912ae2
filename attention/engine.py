"""What an attention worker computes: attention over its KV heads, layer by layer, as a model worker asks.

Weight-free: it knows a pool's layout and each layer's ``AttentionSpec``. Runs on a thread of its own and
polls the exchange; the event loop of the process does nothing per step.
"""

from collections.abc import Callable, Sequence

import torch

from common.host_cores import HostCores
from common.kv.pool import KVPool
from common.model.attention import LocalAttention
from common.model.exchange import (
    KEY_VALUE,
    OUTPUT,
    PLAN,
    QUERY,
    PeerSilent,
    RequestRegion,
    ResponseRegion,
    read_plan,
    wait_until_reached,
)
from common.spec import AttentionSpec

STEP_TIMEOUT_S = 30.0
"""Between two layers of a step the model worker computes; longer than this and it is stuck."""


class AttentionLoop:
    """Serves one model worker until it is gone or ``is_over`` says so."""

    def __init__(
        self,
        pool: KVPool,
        attention_specs: Sequence[AttentionSpec],
        request: RequestRegion,
        response: ResponseRegion,
        is_over: Callable[[], bool],
        cores: HostCores | None = None,
    ) -> None:
        self._attention = LocalAttention(pool, attention_specs)
        self._layers = len(attention_specs)
        self._request = request
        self._response = response
        self._is_over = is_over
        self._cores = cores
        self.steps = 0

    def run(self) -> None:
        """Returns when it is over. Raises PeerSilent when the model worker stops amid a step."""
        torch.set_num_threads(1)
        step = 0
        while True:
            step += 1
            try:
                wait_until_reached(self._request.words, PLAN, step, None, self._is_over)
            except PeerSilent:
                return
            if self._cores is not None:
                self._cores.claim()
            self._serve_step(step)
            self.steps += 1
            if self._cores is not None:
                self._cores.release()

    @torch.inference_mode()
    def _serve_step(self, step: int) -> None:
        chunks = read_plan(self._request)
        tokens = sum(chunk.length for chunk in chunks)
        request, words = self._request, self._request.words
        self._attention.begin(chunks)
        q, k, v = (part[:tokens] for part in (request.q, request.k, request.v))
        output = self._response.output[:tokens]
        for layer in range(self._layers):
            number = step * self._layers + layer + 1
            wait_until_reached(words, QUERY, number, STEP_TIMEOUT_S, self._is_over)
            self._attention.send_q(layer, q)
            wait_until_reached(words, KEY_VALUE, number, STEP_TIMEOUT_S, self._is_over)
            self._attention.send_kv(layer, k, v)
            output.copy_(self._attention.receive(layer))
            self._response.words[OUTPUT] = number
