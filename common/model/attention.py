"""Attention in this process, over its own KV pool: flat ragged batches of prompts and decode steps.

``begin`` plans a step, then each layer writes the new K and V into the pool and attends. Sequences with one
new token are computed together, page by page (``page_plan``); a prompt's chunk attends to its history in the
pool and causally to itself, and the two parts are merged by their log-sum-exps. Sequences never see each
other. Where compiled kernels are on (``common.model.cpu``) they compute a decode step of fp32 rows on the
host. Bit-exactness across batch compositions is not promised; equality of the mathematics is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.model import kernels
from common.model.attention_kernels import merge_two, partial_attention
from common.model.interface import SequenceChunk
from common.model.page_plan import DecodePlan, DecodeRow, plan_decode
from common.spec import AttentionSpec

if TYPE_CHECKING:
    from common.model.cpu.decode_attention import DecodeStep
from common.timeline import timeline
from common.timeline_events import ATTENTION


@dataclass(frozen=True, slots=True)
class History:
    """A chunk's earlier tokens in the pool: pages ``first``..``stop`` as they lie, or gathered ``rows``.

    ``skipped``: leading tokens of the first page that the window hides; ``tokens``: those after them.
    """

    tokens: int
    skipped: int
    first: int
    stop: int
    rows: torch.Tensor | None

    def read(self, pages: torch.Tensor) -> torch.Tensor:
        """[blocks, kv_heads, block_size, head_dim] → [1, kv_heads, tokens, head_dim]."""
        kv_heads, head_dim = pages.shape[1], pages.shape[3]
        if self.rows is not None:
            gathered = pages.view(-1, head_dim).index_select(0, self.rows)
            return gathered.view(1, kv_heads, self.tokens, head_dim)
        pages = pages[self.first : self.stop].transpose(0, 1)
        return pages.reshape(1, kv_heads, -1, head_dim).narrow(2, self.skipped, self.tokens)


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Rows ``begin``..``stop`` of the batch. ``mask`` [queries, keys] where a window cuts; else causal."""

    begin: int
    stop: int
    history: History | None
    mask: torch.Tensor | None

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """The whole batch's ``q``, ``k``, ``v`` [T, …] → the chunk's output [rows, heads, head_dim]."""
        own_q, own_k, own_v = (
            part[self.begin : self.stop].transpose(0, 1).unsqueeze(0) for part in (q, k, v)
        )
        scale, softcap = spec.scale, spec.softcap
        if self.history is None and self.mask is None:
            output, _ = partial_attention(own_q, own_k, own_v, scale, is_causal=True, softcap=softcap)
        elif self.mask is not None:
            if self.history is not None:
                own_k = torch.cat([self.history.read(pages[0]), own_k], dim=2)
                own_v = torch.cat([self.history.read(pages[1]), own_v], dim=2)
            output, _ = partial_attention(own_q, own_k, own_v, scale, mask=self.mask, softcap=softcap)
        else:
            assert self.history is not None
            past_k, past_v = self.history.read(pages[0]), self.history.read(pages[1])
            past = partial_attention(own_q, past_k, past_v, scale, softcap=softcap)
            own = partial_attention(own_q, own_k, own_v, scale, is_causal=True, softcap=softcap)
            output, _ = merge_two(past, own)
        return output.squeeze(0).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's plan for all layers with one window."""

    decode: DecodePlan | None
    chunks: tuple[ChunkPlan, ...]


class LocalAttention:
    """An ``AttentionIO``. One step at a time: ``begin``, then the layers in order."""

    def __init__(self, pool: KVPool, attention_specs: Sequence[AttentionSpec]) -> None:
        self._pool = pool
        self._specs = tuple(attention_specs)
        self._windows = {spec.window for spec in self._specs}
        self._plans: dict[int | None, StepPlan] = {}
        self._slots = torch.empty(0, dtype=torch.int64)
        self._decode_rows: torch.Tensor | None = None
        self._tokens = 0
        self._q = self._k = self._v = self._output = torch.empty(0)
        self._compiled: DecodeStep | None = None

    def begin(self, chunks: Sequence[SequenceChunk]) -> None:
        """Plans one step. Raises ValueError for an empty chunk or a block table too short for it."""
        layout, device = self._pool.layout, self._pool.device
        for chunk in chunks:
            _check_chunk(chunk, layout)
        self._compiled = self._compiled_step(chunks)
        if self._compiled is not None:
            return
        decode: list[DecodeRow] = []
        prompts: list[tuple[int, SequenceChunk]] = []
        slots: list[torch.Tensor] = []
        row = 0
        for chunk in chunks:
            slots.append(_row_slots(chunk.block_table, chunk.start, chunk.start + chunk.length, layout))
            if chunk.length == 1:
                decode.append(DecodeRow(row, chunk.block_table, chunk.start + 1))
            else:
                prompts.append((row, chunk))
            row += chunk.length
        self._tokens = row
        self._slots = torch.cat(slots).reshape(-1).to(device)
        is_mixed = bool(decode and prompts)
        self._decode_rows = torch.tensor([each.row for each in decode], device=device) if is_mixed else None
        dtype = self._pool.dtype
        self._plans = {
            window: StepPlan(
                decode=plan_decode(decode, layout, window, dtype, device) if decode else None,
                chunks=tuple(_plan_chunk(first, chunk, window, self._pool) for first, chunk in prompts),
            )
            for window in self._windows
        }

    def give_up(self) -> None:
        """Nothing here goes on by itself."""

    def _compiled_step(self, chunks: Sequence[SequenceChunk]) -> "DecodeStep | None":
        """Where compiled kernels are on and the step is one of few new tokens, one a sequence."""
        pool = self._pool
        is_host = pool.device.type == "cpu" and pool.dtype is torch.float32
        library = kernels.compiled()
        if library is None or not is_host or len(chunks) > kernels.FEW_ROWS:
            return None
        if any(chunk.length > 1 for chunk in chunks):
            return None
        from common.model.cpu.decode_attention import DecodeStep

        return DecodeStep(library, chunks, pool, self._windows)

    def send_q(self, layer: int, q: torch.Tensor) -> None:
        if self._compiled is not None:
            self._compiled.attend_before(layer, q, self._specs[layer])
        self._q = q

    def send_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        if self._compiled is not None:
            self._output = self._compiled.take_new(layer, k, v, self._specs[layer])
            return
        head_dim = self._pool.layout.head_dim
        for pages, new in ((self._pool.keys[layer], k), (self._pool.values[layer], v)):
            pages.view(-1, head_dim).index_copy_(0, self._slots, new.reshape(-1, head_dim))
        self._k, self._v = k, v

    def receive(self, layer: int) -> torch.Tensor:
        began_ns = timeline.begin()
        output = self._attend(layer)
        if began_ns:
            timeline.end(began_ns, ATTENTION, layer, self._tokens)
        return output

    def _attend(self, layer: int) -> torch.Tensor:
        if self._compiled is not None:
            return self._output
        spec = self._specs[layer]
        plan = self._plans[spec.window]
        pages = (self._pool.keys[layer], self._pool.values[layer])
        q = self._q
        if not plan.chunks:
            assert plan.decode is not None
            return plan.decode.attend(q, *pages, spec)
        if len(plan.chunks) == 1 and plan.decode is None:
            return plan.chunks[0].attend(q, self._k, self._v, pages, spec).contiguous()
        output = q.new_empty(q.shape)
        for chunk in plan.chunks:
            output[chunk.begin : chunk.stop] = chunk.attend(q, self._k, self._v, pages, spec)
        if plan.decode is not None:
            assert self._decode_rows is not None
            rows = self._decode_rows
            output.index_copy_(0, rows, plan.decode.attend(q.index_select(0, rows), *pages, spec))
        return output


def _check_chunk(chunk: SequenceChunk, layout: KVLayout) -> None:
    held = len(chunk.block_table) * layout.block_size
    if chunk.length < 1 or chunk.start < 0 or chunk.start + chunk.length > held:
        raise ValueError(
            f"chunk of {chunk.length} tokens after {chunk.start}: its block table holds {held} tokens"
        )


def _row_slots(block_table: Sequence[int], begin: int, end: int, layout: KVLayout) -> torch.Tensor:
    """[tokens, kv_heads]: where each token's rows lie in a layer's pages seen as rows of head_dim."""
    size, heads = layout.block_size, layout.kv_heads
    tokens = torch.arange(begin, end)
    table = torch.tensor(block_table, dtype=torch.int64)
    in_head = table[tokens // size] * (heads * size) + tokens % size
    return in_head[:, None] + torch.arange(heads) * size


def _plan_chunk(first_row: int, chunk: SequenceChunk, window: int | None, pool: KVPool) -> ChunkPlan:
    stop = first_row + chunk.length
    end = chunk.start + chunk.length
    if window is None or end <= window:
        history = _plan_history(chunk.block_table, 0, chunk.start, pool) if chunk.start else None
        return ChunkPlan(first_row, stop, history, None)
    visible = max(0, chunk.start + 1 - window)
    history = _plan_history(chunk.block_table, visible, chunk.start, pool) if visible < chunk.start else None
    queries = torch.arange(chunk.start, end)[:, None]
    keys = torch.arange(min(visible, chunk.start), end)[None, :]
    hidden = (keys > queries) | (keys <= queries - window)
    mask = torch.zeros(hidden.shape, dtype=pool.dtype).masked_fill_(hidden, float("-inf"))
    return ChunkPlan(first_row, stop, history, mask.to(pool.device))


def _plan_history(block_table: Sequence[int], begin: int, end: int, pool: KVPool) -> History:
    """Tokens ``begin``..``end`` of a sequence; adjacent pages are read as they lie."""
    size = pool.layout.block_size
    pages = list(block_table[begin // size : -(-end // size)])
    if pages == list(range(pages[0], pages[0] + len(pages))):
        return History(end - begin, begin % size, pages[0], pages[-1] + 1, None)
    slots = _row_slots(block_table, begin, end, pool.layout)
    return History(end - begin, 0, 0, 0, slots.t().reshape(-1).to(pool.device))
