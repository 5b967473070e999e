"""A few rows times a small bf16 matrix on a CPU, as part of a compiled loop.

At a decode step's few rows and a small model's sizes a library's matrix product takes longer to call than to run. Here
the matrix is packed once, :data:`COLUMNS` outputs side by side for each input, and up to :data:`ROWS` rows share each
packed line that is read. Products and sums are float32.
"""

from __future__ import annotations

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from atom.moe.vector_code import (
    F32,
    I64,
    LANES,
    add_product,
    load,
    load_bf16,
    spread,
    store,
    zeroed_sums,
)

ROWS = 8
"""Rows of one pass, at most."""

COLUMNS = 2 * LANES
"""Outputs of one pass."""


def pack(weight_NK: torch.Tensor) -> torch.Tensor:
    """bf16 ``[N, K]`` as :func:`multiply_rows` reads it: ``[ceil(N / COLUMNS), K, COLUMNS]``, padded with zeros."""
    outputs, inputs = weight_NK.shape
    padded = weight_NK.new_zeros(-(-outputs // COLUMNS) * COLUMNS, inputs)
    padded[:outputs] = weight_NK
    return padded.view(-1, COLUMNS, inputs).transpose(1, 2).contiguous()


def _emit(b: ir.IRBuilder, count: int, args: list[ir.Value]) -> None:
    x, x_stride, weights, inputs, out, out_stride = args
    rows = [b.add(x, b.mul(I64(r), x_stride)) for r in range(count)]
    sums = zeroed_sums(b, count)
    with cgutils.for_range(b, inputs) as loop:
        line = b.add(weights, b.mul(loop.index, I64(2 * COLUMNS)))
        columns = [load_bf16(b, line, 2 * LANES * v) for v in range(2)]
        for row, pair in zip(rows, sums, strict=True):
            element = spread(b, load(b, b.add(row, b.mul(loop.index, I64(4))), 0, F32))
            for slot, column in zip(pair, columns, strict=True):
                add_product(b, slot, element, column)
    for r, pair in enumerate(sums):
        for v, slot in enumerate(pair):
            store(b, b.load(slot), b.add(out, b.add(b.mul(I64(r), out_stride), I64(4 * LANES * v))))


@intrinsic
def multiply_rows(typingctx, count, x, x_stride, weights, inputs, out, out_stride):
    """``out[r] = x[r] @ weights`` for ``count`` rows (1 to :data:`ROWS`) and :data:`COLUMNS` outputs.

    Addresses, byte strides and counts are integers; ``x`` and ``out`` are float32, ``weights`` is one packed
    ``[K, COLUMNS]``.
    """

    def codegen(context, b, signature, args):
        count, *addresses = args
        done = b.append_basic_block("done")
        switch = b.switch(count, done)
        for rows in range(1, ROWS + 1):
            case = b.append_basic_block(f"rows{rows}")
            switch.add_case(I64(rows), case)
            b.position_at_end(case)
            _emit(b, rows, addresses)
            b.branch(done)
        b.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7), codegen
