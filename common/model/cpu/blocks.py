"""Products of some rows with panels of weights, sums in registers all the while: in LLVM's own words, as a
compiler that vectorizes loops keeps fewer of them there.

For each input the weights of a panel are read once, made float32, and multiplied by each row's value. 16
registers hold the sums of six rows (docs/benchmarks.md).
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from common.model.cpu.atoms import prefetch_at
from common.model.cpu.panels import LANES, PANEL, VECTORS

AHEAD_BYTES = 2048
"""Weights are asked for so many bytes before they are read: a panel is one stream, which prefetchers alone
leave waiting (21 against 17 ms for four rows, docs/benchmarks.md)."""

_BYTE, _INT, _WORD, _FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
_FUSED = ("contract",)


def block_of(rows: int, streams: int, weight_bytes: int) -> Any:
    """A kernel of so many rows and panels at once, ``weight_bytes`` 4 (float32), 2 (bf16) or 1 (int8). It is
    called with

    - ``weight``, the first panel's address, and ``apart``, how many bytes further each next one lies;
    - ``x``, the rows' address, and ``ins``, how many float32 a row has;
    - ``output``, the address of the first panel's first output in the first row, and ``outs``, how many
      outputs a row has;
    - ``left``, how many of them there are from that one on, and ``between``, how many outputs further each
      next panel begins.
    """

    def block(
        typingctx: Any,
        weight: Any,
        apart: Any,
        x: Any,
        ins: Any,
        output: Any,
        outs: Any,
        left: Any,
        between: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weight, apart, x, ins, output, outs, left, between = arguments
            panels = [_address(builder, weight, apart, stream) for stream in range(streams)]
            values = [_address(builder, x, builder.mul(ins, _WORD(4)), row) for row in range(rows)]
            sums = [_zeros(builder, rows) for _ in range(streams)]
            with cgutils.for_range(builder, ins) as loop:
                place = builder.mul(loop.index, _WORD(PANEL * weight_bytes))
                read = [_weights(builder, panel, place, weight_bytes) for panel in panels]
                for row, address in enumerate(values):
                    value = _everywhere(builder, _load(builder, address, loop.index, _FLOAT))
                    for stream in range(streams):
                        for total, weights in zip(sums[stream][row], read[stream], strict=True):
                            _add_product(builder, total, value, weights)
            for stream in range(streams):
                first = builder.mul(between, _WORD(stream))
                there = builder.sub(left, first)
                for row in range(rows):
                    index = builder.add(builder.mul(outs, _WORD(row)), first)
                    target = builder.gep(_pointer(builder, output), [index], source_etype=_FLOAT)
                    found = [builder.load(total, typ=_FLOATS) for total in sums[stream][row]]
                    _store(builder, found, target, there)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return intrinsic(block)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType())


def _address(builder: Any, first: Any, apart: Any, number: int) -> Any:
    return _pointer(builder, builder.add(first, builder.mul(apart, _WORD(number))))


def _load(builder: Any, pointer: Any, index: Any, kind: Any) -> Any:
    at = builder.gep(pointer, [index], source_etype=kind)
    return builder.load(at, typ=kind, align=4)


def _zeros(builder: Any, rows: int) -> list[list[Any]]:
    """Of each row, a panel's sums."""
    zero = ir.Constant(_FLOATS, [0.0] * LANES)
    found = [[cgutils.alloca_once(builder, _FLOATS) for _ in range(VECTORS)] for _ in range(rows)]
    for each in found:
        for total in each:
            builder.store(zero, total)
    return found


def _weights(builder: Any, panel: Any, place: Any, weight_bytes: int) -> list[Any]:
    """A panel's of one input, as ``VECTORS`` of float32."""
    prefetch_at(builder, builder.gep(panel, [builder.add(place, _WORD(AHEAD_BYTES))], source_etype=_BYTE))
    at = builder.gep(panel, [place], source_etype=_BYTE)
    if weight_bytes == 2:
        words = builder.load(at, typ=_INTS, align=2)
        low = builder.shl(words, ir.Constant(_INTS, [16] * LANES))
        high = builder.and_(words, ir.Constant(_INTS, [0xFFFF0000] * LANES))
        return [builder.bitcast(low, _FLOATS), builder.bitcast(high, _FLOATS)]
    parts = [
        builder.gep(at, [_WORD(LANES * weight_bytes * number)], source_etype=_BYTE)
        for number in range(VECTORS)
    ]
    if weight_bytes == 4:
        return [builder.load(part, typ=_FLOATS, align=4) for part in parts]
    bytes_kind = ir.VectorType(_BYTE, LANES)
    return [builder.sitofp(builder.load(part, typ=bytes_kind, align=1), _FLOATS) for part in parts]


def _everywhere(builder: Any, value: Any) -> Any:
    """In each lane."""
    nothing = ir.Constant(_FLOATS, ir.Undefined)
    first = builder.insert_element(nothing, value, _INT(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(_INTS, [0] * LANES))


def _add_product(builder: Any, total: Any, value: Any, weights: Any) -> None:
    product = builder.fmul(value, weights, flags=_FUSED)
    builder.store(builder.fadd(builder.load(total, typ=_FLOATS), product, flags=_FUSED), total)


def _store(builder: Any, found: list[Any], target: Any, there: Any) -> None:
    """A panel's sums of a row, as many as there are outputs."""
    with builder.if_else(builder.icmp_signed(">=", there, _WORD(PANEL))) as (whole, part):
        with whole:
            for number, total in enumerate(found):
                at = builder.gep(target, [_WORD(number)], source_etype=_FLOATS)
                builder.store(total, at, align=4)
        with part:
            scratch = cgutils.alloca_once(builder, ir.ArrayType(_FLOATS, VECTORS))
            kept = _pointer(builder, builder.ptrtoint(scratch, _WORD))
            for number, total in enumerate(found):
                builder.store(total, builder.gep(kept, [_WORD(number)], source_etype=_FLOATS))
            with cgutils.for_range(builder, there) as loop:
                at = builder.gep(target, [loop.index], source_etype=_FLOAT)
                builder.store(_load(builder, kept, loop.index, _FLOAT), at, align=4)
