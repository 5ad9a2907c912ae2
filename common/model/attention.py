"""Attention in this process, over its own KV pool: flat ragged batches of prompts and decode steps.

``begin`` plans a step. Then in each layer Q attends to the tokens in the pool as soon as it is there, and
when K and V are, these are stored and attended to, and the two parts merged by their log-sum-exps: whoever
computes for others does so while K and V are on their way (Infinite-LLM; Lamina 1, section 4.1). Sequences
with one new token are computed together, page by page (``page_plan``); prompts' chunks each on their own
(``chunk_plan``). Sequences never see each other.

Where compiled kernels are on (``common.model.cpu``) they compute what sequences with one new token attend to
on the host. On CUDA devices one kernel computes all of a step once K and V are there (``flash_plan``).
Bit-exactness across batch compositions is not promised; equality of the mathematics is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.model import kernels
from common.model.attention_kernels import Before, Pages, with_new_token
from common.model.chunk_plan import ChunkPlan, plan_chunk, row_slots
from common.model.flash_plan import has_flash, plan_flash
from common.model.interface import SequenceChunk
from common.model.page_plan import DecodePlan, DecodeRow, plan_decode
from common.spec import AttentionSpec

if TYPE_CHECKING:
    from common.model.cpu.decode_attention import DecodeStep, PagedRows
from common.timeline import timeline
from common.timeline_events import ATTENTION


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's plan for all layers with one window.

    ``decode``: of the rows with one new token after tokens that it sees; ``decode_rows`` are these, None for
    all. ``chunks``: the others.
    """

    decode: "DecodePlan | PagedRows | None"
    decode_rows: torch.Tensor | None
    chunks: tuple[ChunkPlan, ...]

    def attend_before(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec
    ) -> Before:
        """``q`` [T, heads, head_dim] over what the layer's pages held before the step."""
        decode = None
        if self.decode is not None:
            decode = self.decode.attend(self._decoding(q), keys, values, spec)
        return Before(q, decode, tuple(chunk.attend_before(q, keys, values, spec) for chunk in self.chunks))

    def attend_new(
        self, before: Before, pages: Pages, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """[T, heads, head_dim]: over the new tokens too, which ``pages`` hold by now."""
        q = before.q
        decode = None
        if before.decode is not None:
            own_q, own_k, own_v = (self._decoding(part) for part in (q, k, v))
            decode = with_new_token(before.decode, own_q, own_k, own_v, spec.scale, spec.softcap)
            if self.decode_rows is None:
                return decode
        outputs = [
            chunk.attend_new(part, q, k, v, spec)
            for chunk, part in zip(self.chunks, before.chunks, strict=True)
        ]
        if len(outputs) == 1 and decode is None:
            return outputs[0].contiguous()
        output = q.new_empty(q.shape)
        for chunk, part in zip(self.chunks, outputs, strict=True):
            output[chunk.begin : chunk.stop] = part
        if decode is not None:
            assert self.decode_rows is not None
            output.index_copy_(0, self.decode_rows, decode)
        return output

    def _decoding(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.decode_rows is None else rows.index_select(0, self.decode_rows)


class Plan(Protocol):
    """A step's, of all layers with one window: ``StepPlan``, ``FlashPlan``."""

    def attend_before(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec
    ) -> Before: ...

    def attend_new(
        self, before: Before, pages: Pages, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor: ...


class LocalAttention:
    """An ``AttentionIO``. One step at a time: ``begin``, then the layers in order."""

    def __init__(self, pool: KVPool, attention_specs: Sequence[AttentionSpec]) -> None:
        self._pool = pool
        self._specs = tuple(attention_specs)
        self._windows = {spec.window for spec in self._specs}
        self._has_softcap = any(spec.softcap is not None for spec in self._specs)
        self._plans: dict[int | None, Plan] = {}
        self._slots = torch.empty(0, dtype=torch.int64)
        self._tokens = 0
        self._before = Before(torch.empty(0), None, ())
        self._output = torch.empty(0)
        self._compiled: DecodeStep | None = None

    def begin(self, chunks: Sequence[SequenceChunk], output: torch.Tensor | None = None) -> None:
        """Plans one step. Raises ValueError for an empty chunk, or a block table that is too short for it or
        leaves the pool.

        ``output`` [tokens, heads, head_dim], contiguous: where compiled kernels put every layer's, instead of
        a new tensor each; ``receive`` then returns it. Other steps leave it alone.
        """
        layout, device = self._pool.layout, self._pool.device
        for chunk in chunks:
            _check_chunk(chunk, layout)
        self._tokens = sum(chunk.length for chunk in chunks)
        self._compiled = self._compiled_step(chunks, output)
        if self._compiled is not None:
            return
        _check_tables(chunks, self._pool.total_blocks)
        self._slots = slots_of(chunks, layout, device)
        self._plans = {
            window: plan_step(chunks, window, self._pool, has_softcap=self._has_softcap)
            for window in self._windows
        }

    def begin_planned(self, plans: Mapping[int | None, Plan], slots: torch.Tensor) -> None:
        """A step whose plans, by window, and ``slots_of`` were made elsewhere, of chunks that passed
        ``check``."""
        self._compiled = None
        self._tokens = slots.numel() // self._pool.layout.kv_heads
        self._slots = slots
        self._plans = dict(plans)

    def check(self, chunks: Sequence[SequenceChunk]) -> None:
        """Raises ValueError as ``begin``."""
        for chunk in chunks:
            _check_chunk(chunk, self._pool.layout)
        _check_tables(chunks, self._pool.total_blocks)

    def give_up(self) -> None:
        """Nothing here goes on by itself."""

    def _compiled_step(
        self, chunks: Sequence[SequenceChunk], output: torch.Tensor | None
    ) -> "DecodeStep | None":
        """Where compiled kernels are on and the step is one new token for each sequence."""
        if any(chunk.length > 1 for chunk in chunks):
            return None
        paged = paged_rows(
            [DecodeRow(row, each.block_table, each.start) for row, each in enumerate(chunks)],
            self._pool,
            self._windows,
        )
        if paged is None:
            return None
        from common.model.cpu.decode_attention import DecodeStep

        return DecodeStep(paged, output)

    def send_q(self, layer: int, q: torch.Tensor) -> None:
        began_ns = timeline.begin()
        spec = self._specs[layer]
        if self._compiled is not None:
            self._compiled.attend_before(layer, q, spec)
        else:
            self._before = self._plans[spec.window].attend_before(q, *self._pages(layer), spec)
        if began_ns:
            timeline.end(began_ns, ATTENTION, layer, self._tokens)

    def send_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        began_ns = timeline.begin()
        spec = self._specs[layer]
        if self._compiled is not None:
            self._output = self._compiled.take_new(layer, k, v, spec)
        else:
            pages = self._pages(layer)
            save_kv(pages, self._slots, k, v)
            self._output = self._plans[spec.window].attend_new(self._before, pages, k, v, spec)
        if began_ns:
            timeline.end(began_ns, ATTENTION, layer, self._tokens)

    def receive(self, layer: int) -> torch.Tensor:
        return self._output

    def _pages(self, layer: int) -> Pages:
        return self._pool.keys[layer], self._pool.values[layer]


def slots_of(chunks: Sequence[SequenceChunk], layout: KVLayout, device: torch.device) -> torch.Tensor:
    """[new tokens · kv_heads]: where all chunks' rows go, as ``row_slots`` has them."""
    slots = [row_slots(each.block_table, each.start, each.start + each.length, layout) for each in chunks]
    return torch.cat(slots).reshape(-1).to(device)


def save_kv(pages: Pages, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """``k``, ``v`` [T, kv_heads, head_dim] into a layer's keys and values."""
    for plane, new in zip(pages, (k, v), strict=True):
        head_dim = plane.shape[-1]
        plane.view(-1, head_dim).index_copy_(0, slots, new.reshape(-1, head_dim))


def plan_step(
    chunks: Sequence[SequenceChunk], window: int | None, pool: KVPool, *, has_softcap: bool = False
) -> Plan:
    """For all layers with this ``window``."""
    if has_flash(pool, has_softcap):
        return plan_flash(chunks, window, pool)
    decode: list[DecodeRow] = []
    plans: list[ChunkPlan] = []
    row = 0
    for chunk in chunks:
        if chunk.length == 1 and chunk.start and window != 1:
            decode.append(DecodeRow(row, chunk.block_table, chunk.start))
        else:
            plans.append(plan_chunk(row, chunk, window, pool))
        row += chunk.length
    if not decode:
        return StepPlan(None, None, tuple(plans))
    # The new token is one of those the window shows.
    before = None if window is None else window - 1
    rows = torch.tensor([each.row for each in decode], device=pool.device) if plans else None
    planned: DecodePlan | PagedRows | None = paged_rows(decode, pool, {window})
    if planned is None:
        planned = plan_decode(decode, pool.layout, before, pool.dtype, pool.device)
    return StepPlan(planned, rows, tuple(plans))


def paged_rows(rows: Sequence[DecodeRow], pool: KVPool, windows: set[int | None]) -> "PagedRows | None":
    """Where compiled kernels are on, and can read that pool. Raises ValueError for a block table that leaves
    it."""
    library = kernels.compiled()
    if library is None or pool.device.type != "cpu" or pool.dtype not in (torch.float32, torch.bfloat16):
        return None
    from common.model.cpu.decode_attention import PagedRows

    return PagedRows(library, rows, pool, windows)


def _check_tables(chunks: Sequence[SequenceChunk], total_blocks: int) -> None:
    if any(not 0 <= block < total_blocks for chunk in chunks for block in chunk.block_table):
        raise ValueError(f"a block table leaves the pool of {total_blocks} blocks")


def _check_chunk(chunk: SequenceChunk, layout: KVLayout) -> None:
    held = len(chunk.block_table) * layout.block_size
    if chunk.length < 1 or chunk.start < 0 or chunk.start + chunk.length > held:
        raise ValueError(
            f"chunk of {chunk.length} tokens after {chunk.start}: its block table holds {held} tokens"
        )
