"""Paged attention of decode steps as numba compiles it: every KV head's keys and values are read once."""

from typing import Any

import numpy as np
from numba import carray, njit

from common.model.cpu.atoms import FAST, exp_of_negative, float_pointer, prefetch, word_pointer

CACHE_LINE = 64


@njit(fastmath=FAST, error_model="numpy", inline="always")
def score_tokens(
    queries: Any, keys: Any, scores: Any, group: int, count: int, width: int, next_values: int
) -> None:
    """``queries`` [group, width] · ``keys`` [count, width] into ``scores`` [group, …]: each key is read from
    memory once, for all queries; four at a time share a query's loads. Meanwhile as much is fetched from
    ``next_values``, so that memory is never idle."""
    whole = count - count % 4
    zero = np.float32(0)
    for t in range(0, whole, 4):
        for line in range(0, 16 * width, CACHE_LINE):
            prefetch(next_values + 4 * width * t + line)
        for member in range(group):
            a = b = c = d = zero
            for i in range(width):
                x = queries[member, i]
                a += x * keys[t, i]
                b += x * keys[t + 1, i]
                c += x * keys[t + 2, i]
                d += x * keys[t + 3, i]
            scores[member, t], scores[member, t + 1] = a, b
            scores[member, t + 2], scores[member, t + 3] = c, d
    for t in range(whole, count):
        for member in range(group):
            a = zero
            for i in range(width):
                a += queries[member, i] * keys[t, i]
            scores[member, t] = a


@njit(fastmath=FAST, error_model="numpy", inline="always")
def add_tokens(
    results: Any, values: Any, shares: Any, group: int, count: int, width: int, next_keys: int
) -> None:
    """``results`` [group, width] += ``shares`` [group, …] · ``values`` [count, width], in the same order.
    Meanwhile as much is fetched from ``next_keys``."""
    whole = count - count % 4
    for t in range(0, whole, 4):
        for line in range(0, 16 * width, CACHE_LINE):
            prefetch(next_keys + 4 * width * t + line)
        for member in range(group):
            a, b = shares[member, t], shares[member, t + 1]
            c, d = shares[member, t + 2], shares[member, t + 3]
            for i in range(width):
                results[member, i] += (
                    a * values[t, i] + b * values[t + 1, i] + c * values[t + 2, i] + d * values[t + 3, i]
                )
    for t in range(whole, count):
        for member in range(group):
            a = shares[member, t]
            for i in range(width):
                results[member, i] += a * values[t, i]


@njit(error_model="numpy", inline="always")
def place_of(
    table: Any, spans: Any, row: int, kv_head: int, position: int, kv_heads: int, block_size: int, width: int
) -> Any:
    """Where in a layer's pages the key or value of a row's ``position`` begins, in elements."""
    index, place = divmod(position, block_size)
    return ((table[spans[3 * row] + index] * kv_heads + kv_head) * block_size + place) * width


@njit(fastmath=FAST, error_model="numpy")
def attend_items(
    q: int,
    key_pages: int,
    value_pages: int,
    output: int,
    lses: int,
    tables: int,
    spans: int,
    scratch: int,
    heads: int,
    kv_heads: int,
    width: int,
    block_size: int,
    q_stride: int,
    scale: float,
    softcap: float,
    first: int,
    stop: int,
) -> None:
    """Items ``first``..``stop``: item i is KV head ``i mod kv_heads`` of row ``i div kv_heads``.

    ``spans`` [rows, 3]: where in ``tables`` the row's block table begins, and the positions begin..end it
    attends to (begin > 0: a sliding window). ``softcap`` 0: none. ``scratch``: floats for
    whoever computes. Softmax is taken page by page with a running maximum (flash decoding). ``output``
    [rows, heads, width] and ``lses`` [rows, heads], natural logarithm; −inf where a row attends to nothing.
    """
    group = heads // kv_heads
    table = carray(word_pointer(tables), (1 << 40,))
    bounds = carray(word_pointer(spans), (1 << 40,))
    logs = carray(float_pointer(lses), (1 << 40,))
    scores = carray(float_pointer(scratch), (group, block_size))
    highest = carray(float_pointer(scratch + 4 * group * block_size), (group,))
    totals = carray(float_pointer(scratch + 4 * group * (block_size + 1)), (group,))
    for item in range(first, stop):
        row, kv_head = divmod(item, kv_heads)
        begin, end = bounds[3 * row + 1], bounds[3 * row + 2]
        head = kv_head * group
        queries = carray(float_pointer(q + 4 * (row * q_stride + head * width)), (group, width))
        results = carray(float_pointer(output + 4 * ((row * heads + head) * width)), (group, width))
        for member in range(group):
            highest[member] = np.float32(-np.inf)
            totals[member] = np.float32(0)
            for i in range(width):
                results[member, i] = np.float32(0)
        position = begin
        while position < end:
            count = min(block_size - position % block_size, end - position)
            page = place_of(table, bounds, row, kv_head, position, kv_heads, block_size, width)
            keys = carray(float_pointer(key_pages + 4 * page), (count, width))
            values = carray(float_pointer(value_pages + 4 * page), (count, width))
            score_tokens(queries, keys, scores, group, count, width, value_pages + 4 * page)
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
            add_tokens(results, values, scores, group, count, width, key_pages + 4 * next_page)
        for member in range(group):
            total = totals[member]
            if total > 0:
                inverse = np.float32(1) / total
                for i in range(width):
                    results[member, i] *= inverse
            log = np.log(total) + highest[member] if total > 0 else np.float32(-np.inf)
            logs[row * heads + head + member] = log


@njit(error_model="numpy")
def store_rows(
    new: int, pages: int, slots: int, tokens: int, heads: int, width: int, token_stride: int, block_size: int
) -> None:
    """``new`` [tokens, heads, width] into ``pages`` [blocks, heads, block_size, width] at ``slots`` (block ·
    block_size + place in it)."""
    values = carray(float_pointer(new), (tokens * token_stride,))
    places = carray(word_pointer(slots), (tokens,))
    for token in range(tokens):
        block, place = divmod(places[token], block_size)
        for head in range(heads):
            target = carray(
                float_pointer(pages + 4 * (((block * heads + head) * block_size + place) * width)), (width,)
            )
            source = token * token_stride + head * width
            for i in range(width):
                target[i] = values[source + i]


@njit(fastmath=FAST, error_model="numpy")
def merge_new_token(
    q: int,
    key: int,
    value: int,
    output: int,
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
    """``output`` and ``lses`` of the tokens before, made those of the new token too, exactly: its share is
    σ(score − lse)."""
    group = heads // kv_heads
    results = carray(float_pointer(output), (rows, heads, width))
    logs = carray(float_pointer(lses), (rows, heads))
    for row in range(rows):
        for head in range(heads):
            kv_head = head // group
            query = carray(float_pointer(q + 4 * (row * q_stride + head * width)), (width,))
            new_key = carray(float_pointer(key + 4 * (row * key_stride + kv_head * width)), (width,))
            new_value = carray(float_pointer(value + 4 * (row * value_stride + kv_head * width)), (width,))
            score = np.float32(0)
            for i in range(width):
                score += query[i] * new_key[i]
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
                results[row, head, i] = rest * results[row, head, i] + share * new_value[i]
            logs[row, head] = highest + np.log(old + new)


def take_new_token(
    q: int,
    key: int,
    value: int,
    output: int,
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
    """Stores every row's new key and value, and merges them into ``output`` and ``lses``."""
    store_rows(key, key_pages, slots, rows, kv_heads, width, key_stride, block_size)
    store_rows(value, value_pages, slots, rows, kv_heads, width, value_stride, block_size)
    merge_new_token(
        q,
        key,
        value,
        output,
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
