"""Kernels over addresses and sizes, as numba compiles them (``library`` keeps the result).

Nothing here checks anything: ``common.model.kernels`` and the other callers do. Floats are fp32; sums are
reassociated (``fastmath`` without the flags that assume no NaN and no infinity).
"""

from typing import Any

import numpy as np
from numba import carray, njit
from numba.core import types

from common.model.cpu.atoms import (
    add_word,
    exp_of_negative,
    float_pointer,
    half_pointer,
    load_word,
    store_word,
    word_pointer,
)
from common.model.cpu.jobs import ARGUMENTS, DONE, JOB_WORDS, LEFT, MULTIPLY, PARTS

FAST = {"reassoc", "contract", "arcp", "nsz"}


def rms_norm(x: int, weight: int, output: int, rows: int, width: int, eps: float) -> None:
    values = carray(float_pointer(x), (rows, width))
    scales = carray(float_pointer(weight), (width,))
    results = carray(float_pointer(output), (rows, width))
    for row in range(rows):
        total = np.float32(0)
        for i in range(width):
            total += values[row, i] * values[row, i]
        factor = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            results[row, i] = values[row, i] * factor * scales[i]


def rotate(
    x: int, cos: int, sin: int, output: int, tokens: int, heads: int, width: int, token_stride: int
) -> None:
    """``x`` [tokens, heads, width], a token every ``token_stride`` elements; the tables [tokens, width], the
    sines signed (see ``fusions.fold_rotations``)."""
    values = carray(float_pointer(x), (tokens * token_stride,))
    cosines = carray(float_pointer(cos), (tokens, width))
    sines = carray(float_pointer(sin), (tokens, width))
    results = carray(float_pointer(output), (tokens, heads, width))
    half = width // 2
    for token in range(tokens):
        for head in range(heads):
            first = token * token_stride + head * width
            for i in range(half):
                low, high = values[first + i], values[first + half + i]
                results[token, head, i] = low * cosines[token, i] + high * sines[token, i]
                results[token, head, half + i] = (
                    high * cosines[token, half + i] + low * sines[token, half + i]
                )


def silu_multiply(
    gate: int, up: int, output: int, rows: int, width: int, gate_stride: int, up_stride: int
) -> None:
    gates = carray(float_pointer(gate), ((rows - 1) * gate_stride + width,))
    ups = carray(float_pointer(up), ((rows - 1) * up_stride + width,))
    results = carray(float_pointer(output), (rows, width))
    for row in range(rows):
        for i in range(width):
            value = gates[row * gate_stride + i]
            # exp(−|x|) does not overflow: σ(x) is e/(1 + e) or 1/(1 + e) by the sign.
            e = exp_of_negative(-abs(value))
            sigmoid = (np.float32(1) if value >= 0 else e) / (np.float32(1) + e)
            results[row, i] = value * sigmoid * ups[row * up_stride + i]


@njit("float32(uint16)", inline="always", error_model="numpy")
def widened(half: Any) -> Any:
    return np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32)


@njit(fastmath=FAST, error_model="numpy")
def multiply_rows(
    weight: int, x: int, output: int, outs: int, ins: int, rows: int, first: int, stop: int
) -> None:
    """Outputs ``first``..``stop`` of ``x`` [rows, ins] · ``weight`` [outs, ins]ᵀ, the weight in bf16: every
    row of it is read from memory once and used for up to eight rows of ``x``."""
    w = carray(half_pointer(weight), (outs, ins))
    values = carray(float_pointer(x), (rows, ins))
    results = carray(float_pointer(output), (rows, outs))
    zero = np.float32(0)
    for i in range(first, stop):
        row = 0
        while rows - row >= 8:
            a = b = c = d = e = f = g = h = zero
            for j in range(ins):
                v = widened(w[i, j])
                a += v * values[row, j]
                b += v * values[row + 1, j]
                c += v * values[row + 2, j]
                d += v * values[row + 3, j]
                e += v * values[row + 4, j]
                f += v * values[row + 5, j]
                g += v * values[row + 6, j]
                h += v * values[row + 7, j]
            results[row, i], results[row + 1, i], results[row + 2, i], results[row + 3, i] = a, b, c, d
            results[row + 4, i], results[row + 5, i], results[row + 6, i], results[row + 7, i] = e, f, g, h
            row += 8
        if rows - row >= 4:
            a = b = c = d = zero
            for j in range(ins):
                v = widened(w[i, j])
                a += v * values[row, j]
                b += v * values[row + 1, j]
                c += v * values[row + 2, j]
                d += v * values[row + 3, j]
            results[row, i], results[row + 1, i], results[row + 2, i], results[row + 3, i] = a, b, c, d
            row += 4
        if rows - row >= 2:
            a = b = zero
            for j in range(ins):
                v = widened(w[i, j])
                a += v * values[row, j]
                b += v * values[row + 1, j]
            results[row, i], results[row + 1, i] = a, b
            row += 2
        if rows > row:
            a = zero
            for j in range(ins):
                a += widened(w[i, j]) * values[row, j]
            results[row, i] = a


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


@njit(fastmath=FAST, error_model="numpy", inline="always")
def score_tokens(queries: Any, keys: Any, scores: Any, group: int, count: int, width: int) -> None:
    """``queries`` [group, width] · ``keys`` [count, width] into ``scores`` [group, …]: each key is read from
    memory once, for all queries; four at a time share a query's loads."""
    whole = count - count % 4
    zero = np.float32(0)
    for t in range(0, whole, 4):
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
def add_tokens(results: Any, values: Any, shares: Any, group: int, count: int, width: int) -> None:
    """``results`` [group, width] += ``shares`` [group, …] · ``values`` [count, width], in the same order."""
    whole = count - count % 4
    for t in range(0, whole, 4):
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
    scratch_stride: int,
    scale: float,
    softcap: float,
    first: int,
    stop: int,
) -> None:
    """Items ``first``..``stop``: item i is KV head ``i mod kv_heads`` of row ``i div kv_heads``.

    ``spans`` [rows, 3]: where in ``tables`` the row's block table begins, and the positions begin..end it
    attends to (begin > 0: a sliding window). ``softcap`` 0: none. ``scratch``: ``scratch_stride`` floats for
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
        begin_of_table, begin, end = bounds[3 * row], bounds[3 * row + 1], bounds[3 * row + 2]
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
            index, place = divmod(position, block_size)
            count = min(block_size - place, end - position)
            page = ((table[begin_of_table + index] * kv_heads + kv_head) * block_size + place) * width
            keys = carray(float_pointer(key_pages + 4 * page), (count, width))
            values = carray(float_pointer(value_pages + 4 * page), (count, width))
            score_tokens(queries, keys, scores, group, count, width)
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
            add_tokens(results, values, scores, group, count, width)
            position += count
        for member in range(group):
            total = totals[member]
            if total > 0:
                inverse = np.float32(1) / total
                for i in range(width):
                    results[member, i] *= inverse
            log = np.log(total) + highest[member] if total > 0 else np.float32(-np.inf)
            logs[row * heads + head + member] = log


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


@njit(error_model="numpy")
def work(job: int, worker: int) -> int:
    """Takes parts of the job until none is left; how many. ``worker`` numbers who computes (its scratch)."""
    taken = 0
    words = carray(word_pointer(job), (JOB_WORDS,))
    while True:
        if load_word(job + 8 * LEFT) <= 0:
            return taken
        part = add_word(job + 8 * LEFT, -1) - 1
        if part < 0:
            return taken
        parts = words[PARTS]
        a = carray(word_pointer(job + 8 * ARGUMENTS), (JOB_WORDS - ARGUMENTS,))
        if a[0] == MULTIPLY:
            outs = a[4]
            multiply_rows(
                a[1], a[2], a[3], outs, a[5], a[6], part * outs // parts, (part + 1) * outs // parts
            )
        else:
            items = a[17]
            attend_items(
                a[1],
                a[2],
                a[3],
                a[4],
                a[5],
                a[6],
                a[7],
                a[8] + 4 * worker * a[14],
                a[9],
                a[10],
                a[11],
                a[12],
                a[13],
                a[14],
                np.uint32(a[15]).view(np.float32),
                np.uint32(a[16]).view(np.float32),
                part * items // parts,
                (part + 1) * items // parts,
            )
        add_word(job + 8 * DONE, 1)
        taken += 1


def run_job(job: int, parts: int) -> None:
    """The whole job, by whoever calls and whoever helps; returns when every part is done."""
    words = carray(word_pointer(job), (JOB_WORDS,))
    words[PARTS] = parts
    store_word(job + 8 * DONE, 0)
    store_word(job + 8 * LEFT, parts)
    work(job, 0)
    while load_word(job + 8 * DONE) < parts:
        pass


def help_until_idle(job: int, patience: int) -> int:
    """Helps with jobs as they come; returns after ``patience`` looks in vain. How many parts it did."""
    done = 0
    looks = 0
    while looks < patience:
        taken = work(job, 1)
        done += taken
        looks = 0 if taken else looks + 1
    return done


_i, _f = types.int64, types.float32

EXPORTED = {
    rms_norm: types.void(_i, _i, _i, _i, _i, _f),
    rotate: types.void(*[_i] * 8),
    silu_multiply: types.void(*[_i] * 7),
    store_rows: types.void(*[_i] * 8),
    merge_new_token: types.void(*[_i] * 12, _f, _f),
    run_job: types.void(_i, _i),
    help_until_idle: types.int64(_i, _i),
}
"""What is called from outside, with its signature."""
