"""What a layer of a decode step costs whose attention is computed by attention workers (Lamina 1, 5; Lamina
2, 4): the slice on a model replica, attention on the workers, and what crosses the network between them.

Q leaves before K and V are computed, and attention over the cached tokens begins; K and V follow behind it. A
batch may go in mini-batches, one of which is on its way while another's attention is computed. What batches
that take turns cost one another is not decided here but by whom they share (``attention_rates``): this
says what each uses of a replica, of a worker and of both sides' links.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from common.shapes import ModelShape
from services.simulator.conditions import FINE, Fares
from services.simulator.performance.split import SplitModel


class PoolRows(NamedTuple):
    """A batch's sequences in one KV pool, and the tokens that they attend to."""

    pool: int
    sequences: int
    context_tokens: int

    def grown(self, steps: int) -> "PoolRows":
        return self._replace(context_tokens=self.context_tokens + steps * self.sequences)


Rows = tuple[PoolRows, ...]
NONE_IS_OTHER: Mapping[str, Fares] = {}


class WorkerShare(NamedTuple):
    """Each of these workers' of a layer: seconds of attention, and of its link each way."""

    workers: tuple[str, ...]
    attention_s: float
    inward_s: float
    outward_s: float


class LayerCost(NamedTuple):
    """Of one batch. ``alone_s``: from slice to slice, were there no other batch; ``offline_s``: the same over
    a network that takes no time. ``sent_s``: of all that crosses the network, one after another.
    ``outward_s`` and ``inward_s``: of the decode instance's link."""

    slice_s: float
    alone_s: float
    offline_s: float
    sent_s: float
    outward_s: float
    inward_s: float
    shares: tuple[WorkerShare, ...]


@dataclass(frozen=True, slots=True)
class Wire:
    """Between a decode instance and its workers. ``q_bytes`` of a token in a layer go out, and as many come
    back; ``kv_bytes`` go out. ``latency_s``: of each, one way."""

    q_bytes: int
    kv_bytes: int
    instance_bytes_per_s: float
    worker_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """``kv_share``: the share of a slice in which K and V are computed, after Q. ``is_by_heads``: every
    worker of a pool has its part of each token's heads. Slices take ``slowness`` times as long, and the
    instance's link has ``link_share`` of its bandwidth."""

    layers: int
    kv_share: float
    model: SplitModel
    attention: SplitModel
    wire: Wire
    is_by_heads: bool
    mini_batches: int
    slowness: float = 1.0
    link_share: float = 1.0

    def layer(
        self,
        rows: Rows,
        workers: Mapping[int, tuple[str, ...]],
        others: Mapping[str, Fares] = NONE_IS_OTHER,
    ) -> LayerCost:
        """``workers``: of each pool; ``others``: that fare otherwise than they should. A link that is cut
        counts as whole: who needs it does not get on."""
        wire, sequences = self.wire, sum(each.sequences for each in rows)
        slice_s = self.slowness * self.model.model_s(sequences) / self.layers
        q_s, kv_s = (
            sequences * nbytes / wire.instance_bytes_per_s / (self.link_share or 1.0)
            for nbytes in (wire.q_bytes, wire.kv_bytes)
        )
        alone_s = offline_s = slice_s
        shares = tuple(self._shares(rows, workers, others))
        for share in shares:
            carried_s = share.outward_s, share.inward_s - share.outward_s
            sent = max(q_s, carried_s[0]), max(kv_s, carried_s[1])
            alone_s = max(alone_s, self._path_s(slice_s, share.attention_s, *sent, wire.latency_s))
            offline_s = max(offline_s, self._path_s(slice_s, share.attention_s, 0.0, 0.0, 0.0))
        slowest = max((share.inward_s + share.outward_s for share in shares), default=0.0)
        sent_s = max(2 * q_s + kv_s, slowest) + 3 * wire.latency_s
        return LayerCost(slice_s, alone_s, offline_s, sent_s, q_s + kv_s, q_s, shares)

    def _shares(
        self,
        rows: Rows,
        workers: Mapping[int, tuple[str, ...]],
        others: Mapping[str, Fares],
    ) -> Iterator[WorkerShare]:
        for each in rows:
            members = workers[each.pool]
            parts = len(members) if self.is_by_heads else 1
            attention_s = self.attention.attention_s(each.sequences, each.context_tokens)
            per_worker = each.sequences / parts / self.wire.worker_bytes_per_s
            outward_s = per_worker * self.wire.q_bytes
            inward_s = outward_s + per_worker * self.wire.kv_bytes
            for alike, fares in _alike(members, others):
                link_share = fares.link_share or 1.0
                own_s = fares.slowness * attention_s / parts / self.layers
                yield WorkerShare(alike, own_s, inward_s / link_share, outward_s / link_share)

    def _path_s(self, slice_s: float, attention_s: float, q_s: float, kv_s: float, latency_s: float) -> float:
        """From a slice's begin to the next one's, over one worker: mini-batches follow one another on the way
        there, in attention and on the way back."""
        parts = self.mini_batches
        q_ready_s = slice_s * (1 - self.kv_share)
        kv_ready_s = max(slice_s, q_ready_s + q_s)
        computed_s = returned_s = 0.0
        for part in range(1, parts + 1):
            q_there_s = q_ready_s + latency_s + q_s * part / parts
            kv_there_s = kv_ready_s + latency_s + kv_s * part / parts
            computed_s = max(max(computed_s, q_there_s) + attention_s / parts, kv_there_s)
            returned_s = max(returned_s, computed_s) + q_s / parts
        return returned_s + latency_s


def _alike(members: tuple[str, ...], others: Mapping[str, Fares]) -> Iterable[tuple[tuple[str, ...], Fares]]:
    """Those that fare alike, together."""
    if others.keys().isdisjoint(members):
        return ((members, FINE),)
    found: dict[Fares, tuple[str, ...]] = {}
    for worker in members:
        fares = others.get(worker, FINE)
        found[fares] = (*found.get(fares, ()), worker)
    return [(alike, fares) for fares, alike in found.items()]


def kv_share_of(shape: ModelShape) -> float:
    """By their parameters: in memory and in computing time alike."""
    projected = 2 * shape.hidden_size * shape.kv_heads * shape.head_dim * shape.layers
    return projected / shape.multiplied_parameters
