"""Short passes on a CUDA device as graphs: the same launches again, told to the device as one.

A pass launches some 900 kernels, which the device works off in less time than Python takes to launch them
where their rows are few. So passes are captured by their shape, filled up, and replayed from then on: only
what changes from one to the next (tokens, positions, where KV lies) is copied before.

Filled up are its tokens, with the last ones of the longest chunk again: that writes the KV that they write
themselves. What is gathered beyond all sequences' tokens, and sequences of none, nobody sees.
"""

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from common.kv.pool import KVPool
from common.model.attention import LocalAttention
from common.model.flash_plan import FlashPlan, has_flash, keys_of, plan_flash
from common.model.interface import SequenceChunk
from common.model.program import ModelProgram

log = logging.getLogger("lamella.model")

TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Of a pass. What is filled up takes less than launching does; with more the device is busy for longer."""
SEQUENCES = (8, 64, 256)
"""Of a pass with prompts."""
KEYS = (1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
"""Tokens gathered."""
CAPTURED_AFTER = 8
"""Meetings: to capture takes 40 to 80 ms (on an H100, docs/benchmarks.md), what so many replays save, and
most shapes of passes with prompts are met once or twice."""
MOST_GRAPHS = 512
"""A graph takes some memory of the device's."""

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Returns what runs again what it is given, over the same memory."""


class Shape(NamedTuple):
    """``keys``: gathered for each window."""

    tokens: int
    sequences: int
    most_queries: int
    keys: tuple[int, ...]


class StepGraphs:
    """Of one program over one pool. One pass at a time, like the program."""

    def __init__(self, program: ModelProgram, pool: KVPool, capture: Capture) -> None:
        self._program = program
        self._pool = pool
        self._capture: Capture | None = capture
        self._attention = LocalAttention(pool, program.attention_specs)
        self._replays: dict[Shape, Callable[[], None]] = {}
        self._met: Counter[Shape] = Counter()
        device, kv_heads = program.device, pool.layout.kv_heads
        self._windows = tuple({spec.window: None for spec in program.attention_specs})
        most = TOKENS[-1], SEQUENCES[-1]
        # Tokens, positions, places and, of each sequence, where its queries end and which row draws.
        self._told = torch.zeros(3 * most[0] + 2 * most[1] + 1, dtype=torch.int64, device=device)
        self._rows = [
            torch.zeros(KEYS[-1] * kv_heads, dtype=torch.int64, device=device) for _ in self._windows
        ]
        self._key_ends = [torch.zeros(most[1] + 1, dtype=torch.int32, device=device) for _ in self._windows]
        self._logits = torch.empty(most[1], program.spec.vocab_size, dtype=program.dtype, device=device)

    @torch.inference_mode()
    def logits(
        self, token_ids: Sequence[int], chunks: Sequence[SequenceChunk], output_rows: Sequence[int]
    ) -> torch.Tensor | None:
        """[rows, vocab] of the tokens at ``output_rows``, valid until the next pass; KV is written. None:
        nothing was computed, as this is no pass for a graph, or not yet. Raises ValueError as
        ``LocalAttention.begin``."""
        if self._capture is None or not chunks:
            return None
        self._attention.check(chunks)
        found = self._shaped(chunks, token_ids)
        if found is None or not self._is_due(found[0]):
            return None
        shape, filled, token_ids = found
        self._tell(shape, filled, token_ids, output_rows)
        if not self._compute(shape):
            return None
        return self._logits[: len(output_rows)]

    def _shaped(
        self, chunks: Sequence[SequenceChunk], token_ids: Sequence[int]
    ) -> tuple[Shape, list[SequenceChunk], list[int]] | None:
        """With what it is filled up to. None: it is no shape for a graph."""
        tokens = _next(TOKENS, sum(chunk.length for chunk in chunks))
        if tokens is None:
            return None
        filled, ids = filled_up(chunks, token_ids, tokens)
        is_decode = tokens == len(filled)
        sequences = tokens if is_decode and tokens <= SEQUENCES[-1] else _next(SEQUENCES, len(filled))
        keys = [_next(KEYS, sum(keys_of(filled, window))) for window in self._windows]
        if sequences is None or None in keys:
            return None
        most_queries = 1 if is_decode else tokens
        return Shape(tokens, sequences, most_queries, tuple(each or 0 for each in keys)), filled, ids

    def _is_due(self, shape: Shape) -> bool:
        """Whether there is a graph of it, or is one from now on."""
        if shape in self._replays:
            return True
        self._met[shape] += 1
        return self._met[shape] > CAPTURED_AFTER and len(self._replays) < MOST_GRAPHS

    def is_settled(self, chunks: Sequence[SequenceChunk]) -> bool:
        """Whether such a pass goes the same way from now on."""
        if self._capture is None or len(self._replays) >= MOST_GRAPHS:
            return True
        found = self._shaped(chunks, ())
        return found is None or found[0] in self._replays

    def _tell(
        self,
        shape: Shape,
        filled: Sequence[SequenceChunk],
        token_ids: Sequence[int],
        output_rows: Sequence[int],
    ) -> None:
        """Copies what this pass is to where graphs read it."""
        positions: list[int] = []
        places: list[int] = []
        query_ends, key_end = [0], 0
        for chunk, keys in zip(filled, keys_of(filled, self._windows[0]), strict=True):
            key_end += keys
            positions += range(chunk.start, chunk.start + chunk.length)
            places += range(key_end - chunk.length, key_end)
            query_ends.append(query_ends[-1] + chunk.length)
        empty = shape.sequences - len(filled)
        unused = shape.sequences - len(output_rows)
        told = [
            *token_ids,
            *positions,
            *places,
            *query_ends,
            *(query_ends[-1:] * empty),
            *output_rows,
            *([0] * unused),
        ]
        self._told[: len(told)].copy_(torch.tensor(told, dtype=torch.int64))
        for window, rows, key_ends in zip(self._windows, self._rows, self._key_ends, strict=True):
            plan = plan_flash(filled, window, self._pool)
            rows[: plan.rows.numel()].copy_(plan.rows)
            key_ends[: len(filled) + 1].copy_(plan.key_ends)
            key_ends[len(filled) + 1 : shape.sequences + 1] = key_ends[len(filled)]

    def _compute(self, shape: Shape) -> bool:
        """What was told. False: it could not be captured, and nothing ever is again."""
        replay = self._replays.get(shape)
        if replay is None:
            assert self._capture is not None
            try:
                replay = self._replays[shape] = self._capture(lambda: self._step(shape))
            except RuntimeError as exc:
                log.warning("passes_not_captured", extra={"error": str(exc)})
                self._capture = None
                self._replays.clear()
                return False
        replay()
        return True

    def _step(self, shape: Shape) -> None:
        kv_heads = self._pool.layout.kv_heads
        tokens, sequences = shape.tokens, shape.sequences
        parts = [tokens, tokens, tokens, sequences + 1, sequences]
        token_ids, positions, places, ends, output_rows = torch.split(self._told[: sum(parts)], parts)
        query_ends = ends.to(torch.int32)
        plans = {
            window: FlashPlan(
                rows=rows[: count * kv_heads],
                query_ends=query_ends,
                key_ends=key_ends[: sequences + 1],
                most_queries=shape.most_queries,
                most_keys=count,
                window=window,
            )
            for window, rows, key_ends, count in zip(
                self._windows, self._rows, self._key_ends, shape.keys, strict=True
            )
        }
        slots = self._rows[0].view(-1, kv_heads).index_select(0, places).view(-1)
        self._attention.begin_planned(plans, slots)
        logits = self._program.run(token_ids, positions, self._attention, output_rows)
        self._logits[:sequences].copy_(logits)


def filled_up(
    chunks: Sequence[SequenceChunk], token_ids: Sequence[int], tokens: int
) -> tuple[list[SequenceChunk], list[int]]:
    """Of so many ``tokens``, with the last ones of the longest chunk again and again; of several as long, the
    one with the fewest tokens before."""
    filled, ids = list(chunks), list(token_ids)
    missing = tokens - sum(chunk.length for chunk in chunks)
    if not missing:
        return filled, ids
    longest = max(range(len(chunks)), key=lambda index: (chunks[index].length, -chunks[index].start))
    chunk = chunks[longest]
    end = sum(each.length for each in chunks[: longest + 1])
    own = ids[end - chunk.length : end]
    while missing:
        count = min(missing, chunk.length)
        filled.append(SequenceChunk(chunk.block_table, chunk.start + chunk.length - count, count))
        ids += own[-count:]
        missing -= count
    return filled, ids


def _next(sizes: Sequence[int], least: int) -> int | None:
    index = bisect_left(sizes, least)
    return sizes[index] if index < len(sizes) else None


def step_graphs(program: ModelProgram, pool: KVPool) -> StepGraphs | None:
    """None where steps are no graphs: on a CPU, or where attention is no one kernel (``flash_plan``)."""
    has_softcap = any(spec.softcap is not None for spec in program.attention_specs)
    return StepGraphs(program, pool, CudaCapture(program.device)) if has_flash(pool, has_softcap) else None


class CudaCapture:
    """A ``Capture``. Graphs share the memory that is between their layers: one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Raises RuntimeError for work that a device cannot do by itself, or has no memory for."""
        work()  # Kernels are loaded by that: within a capture it is not possible.
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # What other threads do on the device meanwhile is no part of it.
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph.replay
