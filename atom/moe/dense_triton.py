"""Triton kernels of the expert GEMM on bf16 weights, for batches so large that unpacking a layer's weights to memory once
costs less than unpacking them in every tile. Operands come through tensor descriptors (TMA on Hopper).

Programs are persistent: each takes tiles of the plan in turn.

Weights come in pieces of some of their rows: the next piece is unpacked while one is multiplied.

Shape legend: R rows sorted by expert, E experts, N weight rows of a piece, K input elements, I intermediate, H hidden.
"""

from __future__ import annotations

import triton
import triton.language as tl

from atom.moe.gemm_triton import activate, dot
from atom.moe.plan_triton import take_tile
from atom.wire.mx_triton import round_to_mx


@triton.jit
def dense_gate_up(
    x_desc,  # bf16 [R, K], blocks [ROWS, STEP]
    weight_desc,  # bf16 [E * 2 * N, K], gate rows of an expert first, blocks [COLS, STEP]
    bias_ptr,  # f32 [E, 2I] or unused
    out_ptr,  # bf16 [R, I]
    offsets_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    first_col,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    FP4: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SWIGLU: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    COL_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Columns ``first_col`` to ``first_col + N`` of the gate and up projections, the activation, and its rounding to the A
    operand's format, as bf16."""
    total = tl.load(tile_start_ptr + EXPERTS) * COL_TILES
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert, first, end, col_tile = take_tile(
            index, offsets_ptr, tile_expert_ptr, tile_start_ptr, COL_TILES, ROWS
        )
        gate_row = expert * (2 * N) + col_tile * COLS
        gate = tl.zeros((ROWS, COLS), tl.float32)
        up = tl.zeros((ROWS, COLS), tl.float32)
        for k in range(0, K, STEP):
            x = x_desc.load([first, k])
            gate = dot(x, weight_desc.load([gate_row, k]).T, gate)
            up = dot(x, weight_desc.load([gate_row + N, k]).T, up)
        row = first + tl.arange(0, ROWS)
        col = col_tile * COLS + tl.arange(0, COLS)
        inside = col < N
        col += first_col
        if HAS_BIAS:
            bias = bias_ptr + expert * (2 * I) + col
            gate += tl.load(bias, mask=inside, other=0.0)[None, :]
            up += tl.load(bias + I, mask=inside, other=0.0)[None, :]
        values = activate(gate, up, SWIGLU, LIMIT, ALPHA)
        values = round_to_mx(tl.reshape(values, (ROWS * COLS // 32, 32)), FP4)
        tl.store(
            out_ptr + row.to(tl.int64)[:, None] * I + col[None, :],
            tl.reshape(values, (ROWS, COLS)),
            mask=(row < end)[:, None] & inside[None, :],
        )


@triton.jit
def dense_down(
    x_desc,  # bf16 [R, K], blocks [ROWS, STEP]
    weight_desc,  # bf16 [E * N, K], blocks [COLS, STEP]
    bias_ptr,  # f32 [E, H] or unused
    out_ptr,  # bf16 [R, H]
    offsets_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    first_col,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COL_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Columns ``first_col`` to ``first_col + N`` of the down projection."""
    total = tl.load(tile_start_ptr + EXPERTS) * COL_TILES
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert, first, end, col_tile = take_tile(
            index, offsets_ptr, tile_expert_ptr, tile_start_ptr, COL_TILES, ROWS
        )
        sums = tl.zeros((ROWS, COLS), tl.float32)
        for k in range(0, K, STEP):
            x = x_desc.load([first, k])
            sums = dot(x, weight_desc.load([expert * N + col_tile * COLS, k]).T, sums)
        row = first + tl.arange(0, ROWS)
        col = col_tile * COLS + tl.arange(0, COLS)
        inside = col < N
        col += first_col
        if HAS_BIAS:
            sums += tl.load(bias_ptr + expert * H + col, mask=inside, other=0.0)[None, :]
        tl.store(
            out_ptr + row.to(tl.int64)[:, None] * H + col[None, :],
            sums.to(tl.bfloat16),
            mask=(row < end)[:, None] & inside[None, :],
        )
