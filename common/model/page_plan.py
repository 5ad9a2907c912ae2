"""Decode attention over pages, planned once per step: which pages, for whom, and how to merge.

It is over the tokens that the pool holds before the newest, which is merged in later (``with_new_token``).
Every page that a sequence's newest token sees is one *item* of a batched kernel call. Where the pages in use
are dense (the allocator gives the lowest ids first) a call takes a stretch of the pool as it lies, without
copying; pages in the stretch that belong to nobody are computed and ignored. Small blocks and scattered
pages are gathered first. All index tensors are made here, none per layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.kv.layout import KVLayout
from common.model.attention_kernels import Partial, merge_partials, partial_attention
from common.spec import AttentionSpec

GATHER_BLOCK_TOKENS = 64
"""Blocks below this are gathered: a kernel call's batch item should hold more than a few tokens."""
GATHERED_TOKENS = 256
"""Tokens an item of gathered blocks holds."""
BRIDGED_PAGES = 1
"""A gap of so many unused pages is computed rather than paid for with another call."""


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One sequence's newest token: its row in the flat batch, and how many tokens it finds in the pool."""

    row: int
    block_table: Sequence[int]
    tokens: int


@dataclass(frozen=True, slots=True)
class Item:
    """What one batch item covers: tokens ``begin``..``end`` of a page, for sequence number ``sequence``."""

    sequence: int
    page: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class PageCall:
    """One kernel call. K and V are pages ``first``..``stop`` as they lie, or ``gathered`` rows of the pool.

    ``gathered`` [items · kv_heads · keys] indexes the pool's layer seen as rows of head_dim.
    """

    queries: torch.Tensor
    mask: torch.Tensor | None
    keys: int
    first: int = 0
    stop: int = 0
    gathered: torch.Tensor | None = None

    def read(self, pages: torch.Tensor) -> torch.Tensor:
        """``pages`` [blocks, kv_heads, block_size, head_dim] → [items, kv_heads, keys, head_dim]."""
        if self.gathered is None:
            return pages[self.first : self.stop].narrow(2, 0, self.keys)
        head_dim = pages.shape[3]
        rows = pages.view(-1, head_dim).index_select(0, self.gathered)
        return rows.view(self.queries.shape[0], pages.shape[1], self.keys, head_dim)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """``merge_index`` [sequences, most items] points into the calls' items; ``merge_padding`` is −inf where
    a sequence has fewer. Without padding every sequence has one item, at ``merge_index`` [sequences]."""

    calls: tuple[PageCall, ...]
    merge_index: torch.Tensor | None
    merge_padding: torch.Tensor | None

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec
    ) -> Partial:
        """``q`` [sequences, heads, head_dim]; ``keys``, ``values``: the layer's pages."""
        outputs, lses = [], []
        for call in self.calls:
            items_q = q.index_select(0, call.queries).unsqueeze(2)
            output, lse = partial_attention(
                items_q,
                call.read(keys),
                call.read(values),
                spec.scale,
                mask=call.mask,
                softcap=spec.softcap,
            )
            outputs.append(output.squeeze(2))
            lses.append(lse.squeeze(2))
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        lse = lses[0] if len(lses) == 1 else torch.cat(lses)
        if self.merge_index is None:
            return output, lse
        if self.merge_padding is None:
            return output.index_select(0, self.merge_index), lse.index_select(0, self.merge_index)
        padded = lse[self.merge_index] + self.merge_padding
        return merge_partials(output[self.merge_index], padded, dim=1)


def plan_decode(
    rows: Sequence[DecodeRow],
    layout: KVLayout,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> DecodePlan:
    """The plan for every layer, over each row's last ``window`` tokens, at least one (None: all). ``rows``
    must not be empty, nor any row's tokens."""
    is_gathered = layout.block_size < GATHER_BLOCK_TOKENS
    page_tokens = GATHERED_TOKENS if is_gathered else layout.block_size
    items: list[Item] = []
    for sequence, row in enumerate(rows):
        first_visible = 0 if window is None else max(0, row.tokens - window)
        for page in range(first_visible // page_tokens, -(-row.tokens // page_tokens)):
            begin = max(0, first_visible - page * page_tokens)
            end = min(page_tokens, row.tokens - page * page_tokens)
            block = page if is_gathered else row.block_table[page]
            items.append(Item(sequence, block, begin, end))
    groups = None if is_gathered else _stretches(sorted(items, key=lambda item: item.page))
    placed: list[Item | None]
    if groups is None:
        calls = [_gathered_call(items, rows, layout, dtype, device)]
        placed = [*items]
    else:
        calls = [_stretch_call(group, dtype, device) for group in groups]
        placed = [item for group in groups for item in _with_gaps(group)]
    return DecodePlan(tuple(calls), *_merge(placed, len(rows), device))


def _stretches(items: list[Item]) -> list[list[Item]] | None:
    """Items in page order, split where a gap is too wide; None where gathering is cheaper or needed."""
    groups = [[items[0]]]
    for item in items[1:]:
        gap = item.page - groups[-1][-1].page - 1
        if gap < 0:
            return None
        if gap <= BRIDGED_PAGES:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups if len(groups) <= max(1, len(items) // 2) else None


def _with_gaps(group: list[Item]) -> list[Item | None]:
    """One entry per page of the stretch; None for a page that is nobody's."""
    first = group[0].page
    entries: list[Item | None] = [None] * (group[-1].page - first + 1)
    for item in group:
        entries[item.page - first] = item
    return entries


def _stretch_call(group: list[Item], dtype: torch.dtype, device: torch.device) -> PageCall:
    entries = _with_gaps(group)
    keys = max(item.end for item in group)
    spans = [(0, keys) if item is None else (item.begin, item.end) for item in entries]
    return PageCall(
        queries=_index([0 if item is None else item.sequence for item in entries], device),
        mask=_mask(spans, keys, dtype, device),
        keys=keys,
        first=group[0].page,
        stop=group[-1].page + 1,
    )


def _gathered_call(
    items: list[Item], rows: Sequence[DecodeRow], layout: KVLayout, dtype: torch.dtype, device: torch.device
) -> PageCall:
    """Whole-page items read their page; items of small blocks read the sequence's tokens one by one."""
    keys = max(item.end for item in items)
    size, heads = layout.block_size, layout.kv_heads
    is_small = size < GATHER_BLOCK_TOKENS
    slots: list[torch.Tensor] = []
    for item in items:
        if is_small:
            start = item.page * GATHERED_TOKENS
            tokens = torch.arange(start, start + item.end)
            table = torch.tensor(rows[item.sequence].block_table, dtype=torch.int64)
            blocks, offsets = table[tokens // size], tokens % size
        else:
            offsets = torch.arange(item.end)
            blocks = torch.full_like(offsets, item.page)
        in_head = torch.zeros(keys, dtype=torch.int64)
        in_head[: item.end] = blocks * heads * size + offsets
        slots.append(in_head)
    by_item = torch.stack(slots)[:, None, :] + torch.arange(heads)[None, :, None] * size
    return PageCall(
        queries=_index([item.sequence for item in items], device),
        mask=_mask([(item.begin, item.end) for item in items], keys, dtype, device),
        keys=keys,
        gathered=by_item.reshape(-1).to(device),
    )


def _mask(
    spans: list[tuple[int, int]], keys: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Additive [items, 1, 1, keys]: 0 within each span, −inf outside; None where nothing is hidden."""
    if all(span == (0, keys) for span in spans):
        return None
    positions = torch.arange(keys)
    begins, ends = (torch.tensor(bounds)[:, None] for bounds in zip(*spans, strict=True))
    hidden = (positions < begins) | (positions >= ends)
    mask = torch.zeros(len(spans), keys, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return mask[:, None, None, :].to(device)


def _merge(
    placed: Sequence[Item | None], sequences: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(merge_index, merge_padding) for items in the order of the calls' outputs."""
    of_sequence: list[list[int]] = [[] for _ in range(sequences)]
    for position, item in enumerate(placed):
        if item is not None:
            of_sequence[item.sequence].append(position)
    most = max(map(len, of_sequence))
    if most == 1:
        order = [positions[0] for positions in of_sequence]
        is_identity = order == list(range(len(placed)))
        return (None if is_identity else _index(order, device)), None
    index = [positions + [positions[0]] * (most - len(positions)) for positions in of_sequence]
    padding = [
        [0.0] * len(positions) + [float("-inf")] * (most - len(positions)) for positions in of_sequence
    ]
    return _index(index, device), torch.tensor(padding, device=device).unsqueeze(-1)


def _index(values: list[int] | list[list[int]], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
