"""What numba lacks: typed pointers from addresses, atomic words, and an exponential that vectorizes."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

WORD_BYTES = 8
FAST = {"reassoc", "contract", "arcp", "nsz"}
"""Sums may be taken in another order; NaN and infinity keep their meaning."""


def _pointer_to(element: Any) -> Any:
    def cast(typingctx: Any, address: Any) -> Any:
        signature = types.CPointer(element)(address)  # type: ignore[attr-defined]

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return signature, codegen

    return intrinsic(cast)


float_pointer = _pointer_to(types.float32)
half_pointer = _pointer_to(types.uint16)
"""bf16 as it lies in memory: the upper half of a float32."""
word_pointer = _pointer_to(types.int64)


@intrinsic
def widened(typingctx: Any, value: Any) -> Any:
    """A bf16 or float32 value as float32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = context.get_value_type(types.float32)
        if value == types.uint16:
            bits = builder.zext(arguments[0], context.get_value_type(types.uint32))
            return builder.bitcast(builder.shl(bits, bits.type(16)), number)
        return arguments[0]

    return types.float32(value), codegen


@intrinsic
def narrowed_like(typingctx: Any, value: Any, like: Any) -> Any:
    """A float32 as what ``like`` is: itself, or bf16, rounded to the nearest, to even ones between two; a NaN
    stays one."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if like != types.uint16:
            return arguments[0]
        bits = builder.bitcast(arguments[0], context.get_value_type(types.uint32))
        odd = builder.and_(builder.lshr(bits, bits.type(16)), bits.type(1))
        upper = builder.lshr(builder.add(builder.add(bits, bits.type(0x7FFF)), odd), bits.type(16))
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        return builder.trunc(
            builder.select(is_nan, bits.type(0x7FC0), upper), context.get_value_type(types.uint16)
        )

    return (types.uint16 if like == types.uint16 else types.float32)(value, like), codegen


def _word_at(context: Any, builder: Any, address: Any) -> Any:
    pointer = types.CPointer(types.int64)  # type: ignore[attr-defined]
    return builder.inttoptr(address, context.get_value_type(pointer))


@intrinsic
def load_word(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_word_at(context, builder, arguments[0]), "seq_cst", WORD_BYTES)

    return types.int64(address), codegen


@intrinsic
def store_word(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _word_at(context, builder, arguments[0]), "seq_cst", WORD_BYTES)
        return context.get_dummy_value()

    return types.void(address, types.int64), codegen


@intrinsic
def add_word(typingctx: Any, address: Any, value: Any) -> Any:
    """The word as it was before."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _word_at(context, builder, arguments[0])
        return builder.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.int64(address, types.int64), codegen


yield_core = types.ExternalFunction("sched_yield", types.int32())
"""Lets whoever else wants this core have it. Returns at once where nobody does."""


def prefetch_at(builder: Any, place: Any) -> None:
    """The cache line at the pointer ``place`` will be read soon."""
    kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(), *[ir.IntType(32)] * 3])
    function = builder.module.declare_intrinsic("llvm.prefetch.p0", fnty=kind)
    builder.call(function, [place, *(ir.IntType(32)(each) for each in (0, 3, 1))])


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """The cache line at ``address`` will be read soon."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        prefetch_at(builder, builder.inttoptr(arguments[0], ir.PointerType()))
        return context.get_dummy_value()

    return types.void(address), codegen


LOG2_E = np.float32(1.4426950408889634)
LN_2_HIGH, LN_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
SMALLEST = np.float32(-87.0)


@njit("float32(float32)", inline="always", error_model="numpy")
def exp_of_negative(x: Any) -> Any:
    """exp(x) for x ≤ 0 within 2e-7 relative (Cephes' polynomial); 0 below −87."""
    clamped = max(x, SMALLEST)
    whole = np.floor(clamped * LOG2_E + np.float32(0.5))
    rest = clamped - whole * LN_2_HIGH - whole * LN_2_LOW
    power = np.float32(1.9875691500e-4)
    power = power * rest + np.float32(1.3981999507e-3)
    power = power * rest + np.float32(8.3334519073e-3)
    power = power * rest + np.float32(4.1665795894e-2)
    power = power * rest + np.float32(1.6666665459e-1)
    power = power * rest + np.float32(5.0000001201e-1)
    power = power * rest * rest + rest + np.float32(1.0)
    scale = np.uint32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
    return power * scale if x > SMALLEST else np.float32(0.0)
