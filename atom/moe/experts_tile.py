"""The inner kernel of the CPU expert GEMM: a few rows times 32 columns of MXFP4 weights, over the whole input dimension.

Rows and columns meet one MX block (32 inputs) at a time. Within a block the dot product is taken on the element codes,
whose products are exact; it is then multiplied by both blocks' scales and added to a float32 sum, block after block. What
a row yields depends on that row and the weights alone, never on the rows beside it.

Two strategies, emitted as LLVM vector code through numba's ``intrinsic``, since LLVM's loop vectorizer makes code from the
scalar form that is ten times slower:

- ``VNNI`` for an fp4 A operand: twice an e2m1 value is an integer of magnitude at most 12, so a block's dot product is an
  exact sum of int8 products (``vpdpbusd``). That instruction wants one unsigned side: weights are raised by
  :data:`RAISED`, and the sum starts from ``-RAISED`` times the sum of the row's block. Weights are read as packed codes,
  5 bits a weight with its scale, and looked up in a register.
- ``PLAIN`` for either format, on any CPU: float32, the weights held as int8, twice their value. For fp4 a block's dot
  product is exact here too, so it gives the very result of ``VNNI``. (bf16 products, ``vdpbf16ps``, take longer on the
  Xeons at hand: 70 against 114 GFLOP/s.)

Memory, as :mod:`atom.moe.experts` prepares it, for N columns and K inputs:

- operand row: K int8 (``VNNI``: twice the value) or float32 (``PLAIN``), not scaled;
- aux row: for each block a float32 factor (its scale times the strategy's constant) and an int32 to start the sum from;
- weights: ``[N/32, K/32]`` blocks of :data:`WEIGHT_BLOCK_BYTES`; their scales: bf16 ``[N/32, K/32, 32]``.
"""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from atom.moe.vector_code import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    add_product,
    call,
    constant,
    load,
    load_bf16,
    spread,
    store,
    zeroed_sums,
)
from atom.wire.format import BLOCK

VNNI, PLAIN = range(2)

ROWS = 8
"""Rows of one pass, at most."""

COLUMNS = 32
"""Columns of one pass: two vectors of 16."""

RAISED = 12
"""What is added to twice a weight to make it unsigned."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

OPERAND_BYTES = {VNNI: 1, PLAIN: 4}
"""Bytes of one element of an operand row."""

WEIGHT_BLOCK_BYTES = {VNNI: 512, PLAIN: 1024}

NIBBLE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""``VNNI``: which of eight consecutive inputs the nibbles of a column's 32-bit word hold, from the lowest."""

FACTOR = {VNNI: 0.25, PLAIN: 0.5}
"""The strategy's constant: ``VNNI`` doubles both sides, ``PLAIN`` the weights."""

BYTES = ir.VectorType(I8, 64)


def vector_instructions() -> bool:
    """Whether this CPU has the instructions that ``VNNI`` is made of."""
    needed = ("avx512f", "avx512bw", "avx512vl", "avx512vnni")
    features = llvm.get_host_cpu_features()
    return all(features.get(name, False) for name in needed)


# A strategy's block: the rows' and their aux's addresses and that of the weights at this block, to dot products.


def _vnni_block(b: ir.IRBuilder, rows: list, auxes: list, weights: ir.Value) -> list:
    table = ir.Constant(BYTES, [int(2 * v) + RAISED for v in E2M1] * 4)
    sums = [[spread(b, load(b, aux, 4, I32))] * 2 for aux in auxes]
    for eight in range(BLOCK // 8):
        words = [load(b, weights, 128 * eight + 64 * v, INTS) for v in range(2)]
        for half in range(2):
            columns = []
            for word in words:
                shifted = b.lshr(word, constant(INTS, 4)) if half else word
                index = b.and_(b.bitcast(shifted, BYTES), constant(BYTES, 0xF))
                value = call(b, "llvm.x86.avx512.pshuf.b.512", BYTES, table, index)
                columns.append(b.bitcast(value, INTS))
            for r, row in enumerate(rows):
                four = spread(b, load(b, row, 8 * eight + 4 * half, I32))
                name = "llvm.x86.avx512.vpdpbusd.512"
                sums[r] = [call(b, name, INTS, sums[r][v], columns[v], four) for v in range(2)]
    return [[b.sitofp(value, FLOATS) for value in pair] for pair in sums]


def _plain_block(b: ir.IRBuilder, rows: list, auxes: list, weights: ir.Value) -> list:
    slots = zeroed_sums(b, len(rows))
    with cgutils.for_range(b, I64(BLOCK)) as loop:
        at = b.add(weights, b.mul(loop.index, I64(COLUMNS)))
        small = ir.VectorType(I8, LANES)
        columns = [b.sitofp(load(b, at, LANES * v, small), FLOATS) for v in range(2)]
        for row, pair in zip(rows, slots, strict=True):
            element = spread(b, load(b, b.add(row, b.mul(loop.index, I64(4))), 0, F32))
            for slot, column in zip(pair, columns, strict=True):
                add_product(b, slot, element, column)
    return [[b.load(slot) for slot in pair] for pair in slots]


_BLOCKS = {VNNI: _vnni_block, PLAIN: _plain_block}


def _emit(b: ir.IRBuilder, strategy: int, count: int, args: list[ir.Value]) -> None:
    """The whole pass for ``count`` rows."""
    operand, operand_stride, index, aux, aux_stride, weights, scales, blocks, *rest = args
    out, out_stride, half_stride = rest
    numbers = [load(b, index, 8 * r, I64) for r in range(count)]
    rows = [b.add(operand, b.mul(number, operand_stride)) for number in numbers]
    auxes = [b.add(aux, b.mul(number, aux_stride)) for number in numbers]
    slots = zeroed_sums(b, count)

    def at(address: ir.Value, block: ir.Value, width: int) -> ir.Value:
        return b.add(address, b.mul(block, I64(width)))

    with cgutils.for_range(b, blocks) as loop:
        here = [at(row, loop.index, BLOCK * OPERAND_BYTES[strategy]) for row in rows]
        aux_here = [at(row, loop.index, 8) for row in auxes]
        weights_here = at(weights, loop.index, WEIGHT_BLOCK_BYTES[strategy])
        dots = _BLOCKS[strategy](b, here, aux_here, weights_here)
        scales_here = at(scales, loop.index, 2 * COLUMNS)
        columns = [load_bf16(b, scales_here, 2 * LANES * v) for v in range(2)]
        for pair, dot, row_aux in zip(slots, dots, aux_here, strict=True):
            factor = spread(b, load(b, row_aux, 0, F32))
            for v in range(2):
                add_product(b, pair[v], b.fmul(dot[v], factor), columns[v])
    for r, pair in enumerate(slots):
        row_out = b.add(out, b.mul(I64(r), out_stride))
        for v in range(2):
            store(b, b.load(pair[v]), b.add(row_out, b.mul(I64(v), half_stride)))


@intrinsic
def multiply_rows(
    typingctx,
    strategy,
    count,
    operand,
    operand_stride,
    index,
    aux,
    aux_stride,
    weights,
    scales,
    blocks,
    out,
    out_stride,
    half_stride,
):
    """``out[r] = operand[index[r]] @ weights`` for ``count`` rows (1 to :data:`ROWS`) and :data:`COLUMNS` columns.

    Addresses, byte strides and counts are integers; ``index`` is the address of int64 row numbers; ``blocks`` is K/32;
    an out row is two runs of 16 float32, ``half_stride`` bytes apart. On a CPU without the instructions, ``VNNI`` and ``BF16`` do nothing.
    """

    def codegen(context, b, signature, args):
        strategy, count, *addresses = args
        done = b.append_basic_block("done")
        key = b.add(b.mul(strategy, I64(16)), count)
        switch = b.switch(key, done)
        for kind in (VNNI, PLAIN) if vector_instructions() else (PLAIN,):
            for rows in range(1, ROWS + 1):
                case = b.append_basic_block(f"strategy{kind}rows{rows}")
                switch.add_case(I64(kind * 16 + rows), case)
                b.position_at_end(case)
                _emit(b, kind, rows, addresses)
                b.branch(done)
        b.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 13), codegen


@intrinsic
def double_e2m1_block(typingctx, codes, values, start):
    """The 32 packed e2m1 codes at ``codes`` to int8, twice each value, at ``values``; to the int32 at ``start`` goes
    ``-RAISED`` times their sum, where ``VNNI`` sums start."""

    def codegen(context, b, signature, args):
        codes, values, start = args
        pairs = load(b, codes, 0, ir.VectorType(I8, BLOCK // 2))
        # In 16-bit lanes the low nibble stays in the low byte and the high nibble moves to the high byte.
        wide = b.zext(pairs, ir.VectorType(I16, BLOCK // 2))
        low = b.and_(wide, constant(wide.type, 0xF))
        high = b.shl(b.lshr(wide, constant(wide.type, 4)), constant(wide.type, 8))
        code = b.bitcast(b.or_(low, high), ir.VectorType(I8, BLOCK))
        # 0 1 2 3 4 6 8 12 is the code itself up to 4, and a shifted (2 + mantissa) above.
        magnitude = b.and_(code, constant(code.type, 7))
        mantissa = b.or_(b.and_(magnitude, constant(code.type, 1)), constant(code.type, 2))
        exponent = b.lshr(magnitude, constant(code.type, 1))
        normal = b.lshr(b.shl(mantissa, exponent), constant(code.type, 1))
        small = b.icmp_unsigned("<", magnitude, constant(code.type, 2))
        value = b.select(small, magnitude, normal)
        negative = b.icmp_unsigned(">", code, constant(code.type, 7))
        value = b.select(negative, b.sub(constant(code.type, 0), value), value)
        b.store(value, b.inttoptr(values, value.type.as_pointer())).align = 1
        total = call(
            b,
            f"llvm.vector.reduce.add.v{BLOCK}i16",
            I16,
            b.sext(value, ir.VectorType(I16, BLOCK)),
        )
        raised = b.mul(b.sext(total, I32), I32(-RAISED))
        b.store(raised, b.inttoptr(start, I32.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), codegen
