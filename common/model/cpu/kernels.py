"""Kernels over addresses and sizes, as numba compiles them (``library`` keeps the result).

Nothing here checks anything: ``common.model.kernels`` and the other callers do. Floats are fp32; sums are
reassociated (``fastmath`` without the flags that assume no NaN and no infinity).
"""

import numpy as np
from numba import carray, njit
from numba.core import types

from common.model.cpu.atoms import (
    FAST,
    add_word,
    exp_of_negative,
    float_pointer,
    load_word,
    store_word,
    word_pointer,
    yield_core,
)
from common.model.cpu.jobs import (
    ARGUMENTS,
    DONE,
    JOB_WORDS,
    LEFT,
    MULTIPLY_BYTES,
    MULTIPLY_HALVES,
    PARTS,
)
from common.model.cpu.paged_attention import attend_items, take_new_token
from common.model.cpu.products import multiply_bytes, multiply_halves


@njit(fastmath=FAST, error_model="numpy")
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


def add_rms_norm(
    left: int, right: int, weight: int, total: int, output: int, rows: int, width: int, eps: float
) -> None:
    """``total`` = ``left`` + ``right``, and ``output`` its RMSNorm."""
    firsts = carray(float_pointer(left), (rows * width,))
    seconds = carray(float_pointer(right), (rows * width,))
    totals = carray(float_pointer(total), (rows * width,))
    for i in range(rows * width):
        totals[i] = firsts[i] + seconds[i]
    rms_norm(total, weight, output, rows, width, eps)


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


SPINS = 300
"""Looks in vain before the core is offered to others: some microseconds."""


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
        if a[0] == MULTIPLY_HALVES:
            multiply_halves(a[1], a[2], a[3], a[4], a[5], a[6], part, parts)
        elif a[0] == MULTIPLY_BYTES:
            multiply_bytes(a[1], a[2], a[3], a[4], a[5], a[6], part, parts, a[7])
        else:
            items = a[17]
            attend_items(
                a[1],
                a[2],
                a[3],
                a[4],
                a[5],
                a[7],
                a[8],
                a[9] + 4 * worker * a[10],
                a[11],
                a[12],
                a[13],
                a[14],
                a[6],
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
    looks = 0
    while load_word(job + 8 * DONE) < parts:
        looks += 1
        if looks > SPINS:
            yield_core()


def help_until_idle(job: int, patience: int) -> int:
    """Helps with jobs as they come; returns after ``patience`` looks in vain. How many parts it did."""
    done = 0
    looks = 0
    while looks < patience:
        taken = work(job, 1)
        done += taken
        looks = 0 if taken else looks + 1
        if looks > SPINS:
            yield_core()
    return done


_i, _f = types.int64, types.float32

EXPORTED = {
    rms_norm.py_func: types.void(_i, _i, _i, _i, _i, _f),
    add_rms_norm: types.void(*[_i] * 7, _f),
    rotate: types.void(*[_i] * 8),
    silu_multiply: types.void(*[_i] * 7),
    take_new_token: types.void(*[_i] * 16, _f, _f),
    run_job: types.void(_i, _i),
    help_until_idle: types.int64(_i, _i),
}
"""What is called from outside, with its signature."""
