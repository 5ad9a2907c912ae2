"""Products of a few rows with weights that are read from memory once: bf16, or bytes with scales.

Bound by memory, so what counts is how it is read. Four outputs are computed together, a quarter of the weight
apart: prefetchers keep up with four streams where one leaves them waiting (24 against 30 ms for a step's
weights on one core, docs/benchmarks.md), and every value of ``x`` is loaded once for four products.
"""

from typing import Any

import numpy as np
from numba import carray, njit

from common.model.cpu.atoms import FAST, byte_pointer, float_pointer, half_pointer, widened


@njit(fastmath=FAST, error_model="numpy")
def multiply_halves(
    weight: int, x: int, output: int, outs: int, ins: int, rows: int, part: int, parts: int
) -> None:
    """Part ``part`` of ``parts`` of ``x`` [rows, ins] · ``weight`` [outs, ins]ᵀ, the weight in bf16."""
    _multiply(carray(half_pointer(weight), (outs, ins)), x, output, rows, part, parts)


@njit(fastmath=FAST, error_model="numpy")
def multiply_bytes(
    weight: int, x: int, output: int, outs: int, ins: int, rows: int, part: int, parts: int, scales: int
) -> None:
    """The same of an int8 weight, output i then times ``scales`` [outs]."""
    _multiply(carray(byte_pointer(weight), (outs, ins)), x, output, rows, part, parts)
    factors = carray(float_pointer(scales), (outs,))
    results = carray(float_pointer(output), (rows, outs))
    quarter = (outs + 3) // 4
    for stream in range(4):
        # Each output is scaled by the part that computed it, once: a short last quarter ends early.
        first = stream * quarter
        for i in range(first + part * quarter // parts, min(first + (part + 1) * quarter // parts, outs)):
            for row in range(rows):
                results[row, i] *= factors[i]


@njit(fastmath=FAST, error_model="numpy")
def _multiply(w: Any, x: int, output: int, rows: int, part: int, parts: int) -> None:
    """One row of ``x`` is computed alone, more in fours; a last four that is short repeats its last row."""
    outs, ins = w.shape
    values = carray(float_pointer(x), (rows, ins))
    results = carray(float_pointer(output), (rows, outs))
    quarter = (outs + 3) // 4
    last = rows - 1
    zero = np.float32(0)
    for i0 in range(part * quarter // parts, (part + 1) * quarter // parts):
        i1 = i0 + quarter
        i2 = i1 + quarter
        i3 = i2 + quarter
        w0, w1 = w[i0], w[min(i1, outs - 1)]
        w2, w3 = w[min(i2, outs - 1)], w[min(i3, outs - 1)]
        row = 0
        while last > row:
            row1, row2, row3 = min(row + 1, last), min(row + 2, last), min(row + 3, last)
            x0, x1, x2, x3 = values[row], values[row1], values[row2], values[row3]
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = zero
            c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = zero
            for j in range(ins):
                v0, v1, v2, v3 = widened(w0[j]), widened(w1[j]), widened(w2[j]), widened(w3[j])
                a, b, c, d = x0[j], x1[j], x2[j], x3[j]
                a0 += v0 * a
                a1 += v1 * a
                a2 += v2 * a
                a3 += v3 * a
                b0 += v0 * b
                b1 += v1 * b
                b2 += v2 * b
                b3 += v3 * b
                c0 += v0 * c
                c1 += v1 * c
                c2 += v2 * c
                c3 += v3 * c
                d0 += v0 * d
                d1 += v1 * d
                d2 += v2 * d
                d3 += v3 * d
            results[row, i0], results[row1, i0], results[row2, i0], results[row3, i0] = a0, b0, c0, d0
            if i1 < outs:
                results[row, i1], results[row1, i1], results[row2, i1], results[row3, i1] = a1, b1, c1, d1
            if i2 < outs:
                results[row, i2], results[row1, i2], results[row2, i2], results[row3, i2] = a2, b2, c2, d2
            if i3 < outs:
                results[row, i3], results[row1, i3], results[row2, i3], results[row3, i3] = a3, b3, c3, d3
            row += 4
        if row == last:
            x0 = values[row]
            a0 = a1 = a2 = a3 = zero
            for j in range(ins):
                a = x0[j]
                a0 += widened(w0[j]) * a
                a1 += widened(w1[j]) * a
                a2 += widened(w2[j]) * a
                a3 += widened(w3[j]) * a
            results[row, i0] = a0
            if i1 < outs:
                results[row, i1] = a1
            if i2 < outs:
                results[row, i2] = a2
            if i3 < outs:
                results[row, i3] = a3
