"""Reading memory by address in numba-compiled code, and the bits of float32 and bf16."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic


def _reader(kind: ir.Type, numba_type: types.Type):
    @intrinsic
    def read(typingctx, address):
        def codegen(context, builder, signature, args):
            value = builder.load(builder.inttoptr(args[0], kind.as_pointer()))
            value.align = 1
            return value

        return numba_type(types.intp), codegen

    return read


def _pointer(kind: ir.Type, numba_type: types.Type):
    @intrinsic
    def pointer(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], kind.as_pointer())

        return types.CPointer(numba_type)(types.intp), codegen

    return pointer


def _recast(source: types.Type, target: types.Type, kind: ir.Type):
    @intrinsic
    def recast(typingctx, value):
        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], kind)

        return target(source), codegen

    return recast


read_u8 = _reader(ir.IntType(8), types.uint8)
read_i32 = _reader(ir.IntType(32), types.int32)
read_f32 = _reader(ir.FloatType(), types.float32)
"""The value at an address."""

u8_pointer = _pointer(ir.IntType(8), types.uint8)
u16_pointer = _pointer(ir.IntType(16), types.uint16)
i32_pointer = _pointer(ir.IntType(32), types.int32)
i64_pointer = _pointer(ir.IntType(64), types.int64)
f32_pointer = _pointer(ir.FloatType(), types.float32)
"""An address as something that numba's ``carray`` takes."""

bits_to_f32 = _recast(types.int32, types.float32, ir.FloatType())
f32_to_bits = _recast(types.float32, types.int32, ir.IntType(32))


@njit(nogil=True, inline="always")
def address(array):
    """Where an array's data begins, signed: numba adds an unsigned address to an int as floats."""
    return np.intp(array.ctypes.data)


@njit(nogil=True, error_model="numpy")
def to_bf16(value):
    """bf16 bits of a float32, rounded to nearest even; NaN stays NaN."""
    bits = np.uint32(f32_to_bits(value))
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
    return np.uint16(0x7FC0) if value != value else np.uint16(rounded)
