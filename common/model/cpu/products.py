"""Products of rows with weights that are read from memory once: float32, bf16, or bytes with scales.

One or two rows are bound by memory, so what counts is how it is read: several panels are computed together, a
part of the weight apart, as prefetchers keep up with four streams where one leaves them waiting
(docs/benchmarks.md). More rows are bound by arithmetic: panel after panel is multiplied by all of them, in
blocks.
"""

from typing import Any

from numba import carray, njit

from common.model.cpu.atoms import FAST, float_pointer
from common.model.cpu.blocks import block_of
from common.model.cpu.panels import BLOCK_ROWS, PANEL, STREAMS

_OF_ONE, _OF_TWO = STREAMS[1], STREAMS[2]


@njit(error_model="numpy")
def _nothing(rows: int, *arguments: int) -> None:
    pass


def _block_by_rows(weight_bytes: int) -> Any:
    """What computes a block of some rows, each number of them by a kernel of its own."""
    found = _nothing
    for rows in range(1, BLOCK_ROWS + 1):
        found = _block_or(rows, block_of(rows, STREAMS.get(rows, 1), weight_bytes), found)
    return found


def _block_or(own_rows: int, own: Any, others: Any) -> Any:
    @njit(error_model="numpy")
    def block(rows: int, *arguments: int) -> None:
        if rows == own_rows:
            own(*arguments)
        else:
            others(rows, *arguments)

    return block


def _product(weight_bytes: int) -> Any:
    block_of_rows = _block_by_rows(weight_bytes)

    @njit(error_model="numpy")
    def multiply(
        weight: int, x: int, output: int, outs: int, ins: int, rows: int, scales: int, part: int, parts: int
    ) -> None:
        # Panels are those of each stream.
        streams = _OF_ONE if rows == 1 else _OF_TWO if rows == 2 else 1
        panels = (outs + streams * PANEL - 1) // (streams * PANEL)
        blocks = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS
        panel_bytes = PANEL * ins * weight_bytes
        for panel in range(part * panels // parts, (part + 1) * panels // parts):
            first = panel * PANEL
            for block in range(blocks):
                row = block * rows // blocks
                block_of_rows(
                    (block + 1) * rows // blocks - row,
                    weight + panel * panel_bytes,
                    panels * panel_bytes,
                    x + 4 * row * ins,
                    ins,
                    output + 4 * (row * outs + first),
                    outs,
                    outs - first,
                    panels * PANEL,
                )
            if scales != 0:
                for stream in range(streams):
                    _scale(output, outs, rows, scales, first + stream * panels * PANEL)

    return multiply


@njit(fastmath=FAST, error_model="numpy")
def _scale(output: int, outs: int, rows: int, scales: int, first: int) -> None:
    """The outputs of a panel."""
    factors = carray(float_pointer(scales), (outs,))
    results = carray(float_pointer(output), (rows, outs))
    for i in range(first, min(first + PANEL, outs)):
        for row in range(rows):
            results[row, i] *= factors[i]


multiply_floats = _product(4)
"""Part ``part`` of ``parts`` of ``x`` [rows, ins] · ``weight`` [outs, ins]ᵀ, the weight in float32 and in
panels (``common.model.cpu.panels``), output i then times ``scales`` [outs]; the address 0: times nothing."""
multiply_halves = _product(2)
"""The same of a bf16 weight."""
multiply_bytes = _product(1)
"""The same of an int8 weight."""
