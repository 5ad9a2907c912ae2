"""Paged attention of decodes as numba compiles it: every KV head's keys and values are read once.

What is read from memory is float32, or bf16 as it lies (half the bytes); all is computed in float32.
"""

from typing import Any

import numpy as np
from numba import carray, njit

from common.model.cpu.atoms import (
    FAST,
    exp_of_negative,
    float_pointer,
    half_pointer,
    narrowed_like,
    prefetch,
    widened,
    word_pointer,
)

CACHE_LINE = 64


@njit(fastmath=FAST, error_model="numpy", inline="always")
def score_tokens(
    queries: Any, keys: Any, scores: Any, group: int, count: int, width: int, next_values: int, size: int
) -> None:
    """``queries`` [group, width] · ``keys`` [count, width] into ``scores`` [group, …]: each key is read from
    memory once, for all queries; four at a time share a query's loads. Meanwhile as much is fetched from
    ``next_values``, so that memory is never idle. ``size``: bytes of a key's element."""
    whole = count - count % 4
    zero = np.float32(0)
    for t in range(0, whole, 4):
        for line in range(0, 4 * width * size, CACHE_LINE):
            prefetch(next_values + width * size * t + line)
        for member in range(group):
            a = b = c = d = zero
            for i in range(width):
                x = queries[member, i]
                a += x * widened(keys[t, i])
                b += x * widened(keys[t + 1, i])
                c += x * widened(keys[t + 2, i])
                d += x * widened(keys[t + 3, i])
            scores[member, t], scores[member, t + 1] = a, b
            scores[member, t + 2], scores[member, t + 3] = c, d
    for t in range(whole, count):
        for member in range(group):
            a = zero
            for i in range(width):
                a += queries[member, i] * widened(keys[t, i])
            scores[member, t] = a


@njit(fastmath=FAST, error_model="numpy", inline="always")
def add_tokens(
    results: Any, values: Any, shares: Any, group: int, count: int, width: int, next_keys: int, size: int
) -> None:
    """``results`` [group, width] += ``shares`` [group, …] · ``values`` [count, width], in the same order.
    Meanwhile as much is fetched from ``next_keys``."""
    whole = count - count % 4
    for t in range(0, whole, 4):
        for line in range(0, 4 * width * size, CACHE_LINE):
            prefetch(next_keys + width * size * t + line)
        for member in range(group):
            a, b = shares[member, t], shares[member, t + 1]
            c, d = shares[member, t + 2], shares[member, t + 3]
            for i in range(width):
                results[member, i] += (
                    a * widened(values[t, i])
                    + b * widened(values[t + 1, i])
                    + c * widened(values[t + 2, i])
                    + d * widened(values[t + 3, i])
                )
    for t in range(whole, count):
        for member in range(group):
            a = shares[member, t]
            for i in range(width):
                results[member, i] += a * widened(values[t, i])


@njit(error_model="numpy", inline="always")
def place_of(
    table: Any, spans: Any, row: int, kv_head: int, position: int, kv_heads: int, block_size: int, width: int
) -> Any:
    """Where in a layer's pages the key or value of a row's ``position`` begins, in elements."""
    index, place = divmod(position, block_size)
    return ((table[spans[3 * row] + index] * kv_heads + kv_head) * block_size + place) * width


def _attending(pointer: Any, size: int) -> Any:
    """``attend(words, worker, part, parts)``: a part of the job whose arguments are ``words``, the job's kind
    first; elements of Q and of pages at ``pointer`` have ``size`` bytes.

    Item i is KV head ``i mod kv_heads`` of row ``i div kv_heads``. ``spans`` [rows, 3]: where in ``tables``
    the row's block table begins, and the positions begin..end it attends to (begin > 0: a sliding window).
    ``softcap`` 0: none. ``scratch``: so many floats for each ``worker``. Softmax is taken page by page with a
    running maximum (flash decoding). ``output`` [rows, heads, width] and ``lses`` [rows, heads], natural
    logarithm, are float32; −inf where a row attends to nothing.
    """

    @njit(fastmath=FAST, error_model="numpy")
    def attend(words: Any, worker: int, part: int, parts: int) -> None:
        q, key_pages, value_pages, output, lses = words[1], words[2], words[3], words[4], words[5]
        q_stride, tables, spans = words[6], words[7], words[8]
        scratch = words[9] + 4 * worker * words[10]
        heads, kv_heads, width, block_size = words[11], words[12], words[13], words[14]
        scale, softcap = np.uint32(words[15]).view(np.float32), np.uint32(words[16]).view(np.float32)
        first, stop = part * words[17] // parts, (part + 1) * words[17] // parts
        group = heads // kv_heads
        table = carray(word_pointer(tables), (1 << 40,))
        bounds = carray(word_pointer(spans), (1 << 40,))
        logs = carray(float_pointer(lses), (1 << 40,))
        scores = carray(float_pointer(scratch), (group, block_size))
        highest = carray(float_pointer(scratch + 4 * group * block_size), (group,))
        totals = carray(float_pointer(scratch + 4 * group * (block_size + 1)), (group,))
        queries = carray(float_pointer(scratch + 4 * group * (block_size + 2)), (group, width))
        for item in range(first, stop):
            row, kv_head = divmod(item, kv_heads)
            begin, end = bounds[3 * row + 1], bounds[3 * row + 2]
            head = kv_head * group
            asked = carray(pointer(q + size * (row * q_stride + head * width)), (group, width))
            results = carray(float_pointer(output + 4 * ((row * heads + head) * width)), (group, width))
            for member in range(group):
                highest[member] = np.float32(-np.inf)
                totals[member] = np.float32(0)
                for i in range(width):
                    results[member, i] = np.float32(0)
                    queries[member, i] = widened(asked[member, i])
            position = begin
            while position < end:
                count = min(block_size - position % block_size, end - position)
                page = place_of(table, bounds, row, kv_head, position, kv_heads, block_size, width)
                keys = carray(pointer(key_pages + size * page), (count, width))
                values = carray(pointer(value_pages + size * page), (count, width))
                score_tokens(queries, keys, scores, group, count, width, value_pages + size * page, size)
                for member in range(group):
                    top = highest[member]
                    for t in range(count):
                        score = scores[member, t] * scale
                        if softcap > 0:
                            score = softcap * np.tanh(score / softcap)
                        scores[member, t] = score
                        top = max(top, score)
                    if top > highest[member]:
                        has_some = totals[member] > 0
                        shrink = exp_of_negative(highest[member] - top) if has_some else np.float32(0)
                        totals[member] *= shrink
                        for i in range(width):
                            results[member, i] *= shrink
                        highest[member] = top
                    total = np.float32(0)
                    for t in range(count):
                        scores[member, t] = exp_of_negative(scores[member, t] - top)
                    for t in range(count):
                        total += scores[member, t]
                    totals[member] += total
                position += count
                next_row, next_head, next_position = row, kv_head, position
                if position == end and item + 1 < stop:
                    next_row, next_head = divmod(item + 1, kv_heads)
                    next_position = bounds[3 * next_row + 1]
                next_page = page
                if position < end or item + 1 < stop:
                    next_page = place_of(
                        table, bounds, next_row, next_head, next_position, kv_heads, block_size, width
                    )
                add_tokens(results, values, scores, group, count, width, key_pages + size * next_page, size)
            for member in range(group):
                total = totals[member]
                if total > 0:
                    inverse = np.float32(1) / total
                    for i in range(width):
                        results[member, i] *= inverse
                log = np.log(total) + highest[member] if total > 0 else np.float32(-np.inf)
                logs[row * heads + head + member] = log

    return attend


attend_floats = _attending(float_pointer, 4)
attend_halves = _attending(half_pointer, 2)


def _storing(pointer: Any, size: int) -> Any:
    """``new`` [tokens, heads, width] into ``pages`` [blocks, heads, block_size, width] at ``slots`` (block ·
    block_size + place in it)."""

    @njit(error_model="numpy")
    def store_rows(
        new: int,
        pages: int,
        slots: int,
        tokens: int,
        heads: int,
        width: int,
        token_stride: int,
        block_size: int,
    ) -> None:
        values = carray(pointer(new), (tokens * token_stride,))
        places = carray(word_pointer(slots), (tokens,))
        for token in range(tokens):
            block, place = divmod(places[token], block_size)
            for head in range(heads):
                begin = ((block * heads + head) * block_size + place) * width
                target = carray(pointer(pages + size * begin), (width,))
                source = token * token_stride + head * width
                for i in range(width):
                    target[i] = values[source + i]

    return store_rows


def _merging(pointer: Any, size: int) -> Any:
    """``output`` and ``lses``, float32, of the tokens before, made those of the new token too, exactly: its
    share is σ(score − lse). ``merged`` [rows, heads, width] takes it as the model goes on with it; it may be
    ``output`` itself."""

    @njit(fastmath=FAST, error_model="numpy")
    def merge_new_token(
        q: int,
        key: int,
        value: int,
        output: int,
        merged: int,
        lses: int,
        rows: int,
        heads: int,
        kv_heads: int,
        width: int,
        q_stride: int,
        key_stride: int,
        value_stride: int,
        scale: float,
        softcap: float,
    ) -> None:
        group = heads // kv_heads
        results = carray(float_pointer(output), (rows, heads, width))
        target = carray(pointer(merged), (rows, heads, width))
        logs = carray(float_pointer(lses), (rows, heads))
        for row in range(rows):
            for head in range(heads):
                kv_head = head // group
                query = carray(pointer(q + size * (row * q_stride + head * width)), (width,))
                new_key = carray(pointer(key + size * (row * key_stride + kv_head * width)), (width,))
                new_value = carray(pointer(value + size * (row * value_stride + kv_head * width)), (width,))
                score = np.float32(0)
                for i in range(width):
                    score += widened(query[i]) * widened(new_key[i])
                score *= scale
                if softcap > 0:
                    score = softcap * np.tanh(score / softcap)
                before = logs[row, head]
                highest = max(before, score)
                old = exp_of_negative(before - highest) if before > -np.inf else np.float32(0)
                new = exp_of_negative(score - highest)
                share = new / (old + new)
                rest = old / (old + new)
                for i in range(width):
                    mixed = rest * results[row, head, i] + share * widened(new_value[i])
                    target[row, head, i] = narrowed_like(mixed, target[row, head, i])
                logs[row, head] = highest + np.log(old + new)

    return merge_new_token


def taking(pointer: Any, size: int) -> Any:
    """A function that stores every row's new key and value, and merges them into what the tokens before
    gave."""
    store_rows, merge_new_token = _storing(pointer, size), _merging(pointer, size)

    def take_new(
        q: int,
        key: int,
        value: int,
        output: int,
        merged: int,
        lses: int,
        key_pages: int,
        value_pages: int,
        slots: int,
        rows: int,
        heads: int,
        kv_heads: int,
        width: int,
        q_stride: int,
        key_stride: int,
        value_stride: int,
        block_size: int,
        scale: float,
        softcap: float,
    ) -> None:
        store_rows(key, key_pages, slots, rows, kv_heads, width, key_stride, block_size)
        store_rows(value, value_pages, slots, rows, kv_heads, width, value_stride, block_size)
        merge_new_token(
            q,
            key,
            value,
            output,
            merged,
            lses,
            rows,
            heads,
            kv_heads,
            width,
            q_stride,
            key_stride,
            value_stride,
            scale,
            softcap,
        )

    return take_new
