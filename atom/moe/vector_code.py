"""Writing LLVM vector code for numba's intrinsics: what the loop vectorizer would not make of a loop.

Vectors have :data:`LANES` lanes of 32 bits. The functions take the builder of the function being emitted first.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

LANES = 16

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
INTS, FLOATS = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
HALVES = ir.VectorType(I16, LANES)


def constant(vector: ir.VectorType, value: float) -> ir.Constant:
    """A value in all lanes."""
    return ir.Constant(vector, [value] * vector.count)


def call(b: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """A call of an LLVM intrinsic by name."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


def load(b: ir.IRBuilder, address: ir.Value, offset: int, kind: ir.Type) -> ir.Value:
    """An unaligned value ``offset`` bytes after an address."""
    value = b.load(b.inttoptr(b.add(address, I64(offset)), kind.as_pointer()))
    value.align = 1
    return value


def store(b: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    """Store a vector of 32-bit lanes at an address."""
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = 4


def spread(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A 32-bit scalar in all lanes."""
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = b.insert_element(undefined, value, I32(0))
    return b.shuffle_vector(first, undefined, constant(INTS, 0))


def load_bf16(b: ir.IRBuilder, address: ir.Value, offset: int) -> ir.Value:
    """A vector of bf16 in memory as float32: its bits are the upper half."""
    bits = b.zext(load(b, address, offset, HALVES), INTS)
    return b.bitcast(b.shl(bits, constant(INTS, 16)), FLOATS)


def zeroed_sums(b: ir.IRBuilder, rows: int, vectors: int = 2) -> list[list[ir.Value]]:
    """Variables for some float32 vectors a row, set to zero; LLVM keeps them in registers."""
    slots = [[cgutils.alloca_once(b, FLOATS) for _ in range(vectors)] for _ in range(rows)]
    for slot in (slot for row in slots for slot in row):
        b.store(constant(FLOATS, 0.0), slot)
    return slots


def add_product(b: ir.IRBuilder, slot: ir.Value, left: ir.Value, right: ir.Value) -> None:
    """``slot += left * right``, rounded once where the CPU has such an instruction."""
    product = b.fmul(left, right, flags=("contract",))
    b.store(b.fadd(b.load(slot), product, flags=("contract",)), slot)
