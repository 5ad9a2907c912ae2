"""Kernels over addresses and sizes, as numba compiles them (``library`` keeps the result).

Nothing here checks anything: ``common.model.kernels`` and the other callers do. Floats are fp32, but for
"halves", which are bf16; sums are reassociated (``fastmath`` without the flags that assume no NaN and no
infinity).
"""

from typing import Any

import numpy as np
from numba import carray, njit
from numba.core import types

from common.model.cpu.atoms import (
    FAST,
    add_word,
    exp_of_negative,
    float_pointer,
    half_pointer,
    load_word,
    narrowed_like,
    store_word,
    widened,
    word_pointer,
    yield_core,
)
from common.model.cpu.jobs import (
    ARGUMENTS,
    ATTEND_FLOATS,
    DONE,
    JOB_WORDS,
    LEFT,
    MULTIPLY_BYTES,
    MULTIPLY_FLOATS,
    MULTIPLY_HALVES,
    PARTS,
)
from common.model.cpu.paged_attention import attend_floats, attend_halves, taking
from common.model.cpu.products import multiply_bytes, multiply_floats, multiply_halves


def _operators(form: str, pointer: Any, size: int) -> dict[str, Any]:
    """What a slice's small operators are called by, of elements at ``pointer`` of ``size`` bytes: they are
    read and written so, and computed in fp32."""

    @njit(fastmath=FAST, error_model="numpy")
    def norm(x: int, weight: int, output: int, rows: int, width: int, eps: float) -> None:
        values = carray(pointer(x), (rows, width))
        scales = carray(pointer(weight), (width,))
        results = carray(pointer(output), (rows, width))
        for row in range(rows):
            total = np.float32(0)
            for i in range(width):
                value = widened(values[row, i])
                total += value * value
            factor = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
            for i in range(width):
                scaled = widened(values[row, i]) * factor * widened(scales[i])
                results[row, i] = narrowed_like(scaled, results[row, i])

    def rms_norm(x: int, weight: int, output: int, rows: int, width: int, eps: float) -> None:
        norm(x, weight, output, rows, width, eps)

    def add_rms_norm(
        left: int, right: int, weight: int, total: int, output: int, rows: int, width: int, eps: float
    ) -> None:
        """``total`` = ``left`` + ``right``, and ``output`` its RMSNorm."""
        firsts = carray(pointer(left), (rows * width,))
        seconds = carray(pointer(right), (rows * width,))
        totals = carray(pointer(total), (rows * width,))
        for i in range(rows * width):
            totals[i] = narrowed_like(widened(firsts[i]) + widened(seconds[i]), totals[i])
        norm(total, weight, output, rows, width, eps)

    def rotate(
        x: int, cos: int, sin: int, output: int, tokens: int, heads: int, width: int, token_stride: int
    ) -> None:
        """``x`` [tokens, heads, width], a token every ``token_stride`` elements; the tables [tokens, width],
        the sines signed (see ``fusions.fold_rotations``)."""
        values = carray(pointer(x), (tokens * token_stride,))
        cosines = carray(pointer(cos), (tokens, width))
        sines = carray(pointer(sin), (tokens, width))
        results = carray(pointer(output), (tokens, heads, width))
        half = width // 2
        for token in range(tokens):
            for head in range(heads):
                first = token * token_stride + head * width
                for i in range(half):
                    low, high = widened(values[first + i]), widened(values[first + half + i])
                    left = low * widened(cosines[token, i]) + high * widened(sines[token, i])
                    right = high * widened(cosines[token, half + i]) + low * widened(sines[token, half + i])
                    results[token, head, i] = narrowed_like(left, results[token, head, i])
                    results[token, head, half + i] = narrowed_like(right, results[token, head, half + i])

    def silu_multiply(
        gate: int, up: int, output: int, rows: int, width: int, gate_stride: int, up_stride: int
    ) -> None:
        gates = carray(pointer(gate), ((rows - 1) * gate_stride + width,))
        ups = carray(pointer(up), ((rows - 1) * up_stride + width,))
        results = carray(pointer(output), (rows, width))
        for row in range(rows):
            for i in range(width):
                value = widened(gates[row * gate_stride + i])
                # exp(−|x|) does not overflow: σ(x) is e/(1 + e) or 1/(1 + e) by the sign.
                e = exp_of_negative(-abs(value))
                sigmoid = (np.float32(1) if value >= 0 else e) / (np.float32(1) + e)
                product = value * sigmoid * widened(ups[row * up_stride + i])
                results[row, i] = narrowed_like(product, results[row, i])

    found = {"take_new": taking(pointer, size)}
    found |= {each.__name__: each for each in (rms_norm, add_rms_norm, rotate, silu_multiply)}
    return {f"{name}_{form}": function for name, function in found.items()}


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
        if a[0] == MULTIPLY_FLOATS:
            multiply_floats(a[1], a[2], a[3], a[4], a[5], a[6], a[7], part, parts)
        elif a[0] == MULTIPLY_HALVES:
            multiply_halves(a[1], a[2], a[3], a[4], a[5], a[6], a[7], part, parts)
        elif a[0] == MULTIPLY_BYTES:
            multiply_bytes(a[1], a[2], a[3], a[4], a[5], a[6], a[7], part, parts)
        elif a[0] == ATTEND_FLOATS:
            attend_floats(a, worker, part, parts)
        else:
            attend_halves(a, worker, part, parts)
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

OPERATORS = {
    "rms_norm": types.void(_i, _i, _i, _i, _i, _f),
    "add_rms_norm": types.void(*[_i] * 7, _f),
    "rotate": types.void(*[_i] * 8),
    "silu_multiply": types.void(*[_i] * 7),
    "take_new": types.void(*[_i] * 17, _f, _f),
}
JOBS = {"run_job": (run_job, types.void(_i, _i)), "help_until_idle": (help_until_idle, types.int64(_i, _i))}

EXPORTED: dict[str, tuple[Any, Any]] = JOBS | {
    name: (function, OPERATORS[name.rsplit("_", 1)[0]])
    for form, pointer, size in (("floats", float_pointer, 4), ("halves", half_pointer, 2))
    for name, function in _operators(form, pointer, size).items()
}
"""What is called from outside, by its name, with its signature."""
