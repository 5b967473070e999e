"""Triton kernels of the expert GEMM on scaled matrix instructions (gfx950, gfx1250, and NVIDIA's sm_100 on): both operands stay
in their 4- or 8-bit codes, and the unit applies the block scales.

Shape legend: T token rows, R rows sorted by expert, E experts, N weight rows, K input elements, I intermediate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from atom.moe.gemm_triton import activate
from atom.moe.plan_triton import take_tile
from atom.wire.mx_triton import block_amax, e2m1_code, e4m3_code, reciprocal_scale, scale_byte


@triton.jit
def _operand(codes_ptr, scales_ptr, k, K: tl.constexpr, STEP: tl.constexpr, FP4: tl.constexpr):
    """Codes ``[rows, STEP or STEP / 2]`` and scales ``[rows, STEP / 32]`` from element ``k`` of rows at ``[rows, 1]`` on.

    Beyond K codes are 0 and so is what they contribute, as the other operand's codes there are 0 as well.
    """
    PACK: tl.constexpr = 2 if FP4 else 1
    at = k // PACK + tl.arange(0, STEP // PACK)[None, :]
    block = k // 32 + tl.arange(0, STEP // 32)[None, :]
    if K % STEP == 0:
        return tl.load(codes_ptr + at), tl.load(scales_ptr + block)
    codes = tl.load(codes_ptr + at, mask=at < K // PACK, other=0)
    return codes, tl.load(scales_ptr + block, mask=block < K // 32, other=0)


@triton.jit
def _store_mx(
    values,  # f32 [ROWS, COLS]
    codes_ptr,
    scales_ptr,
    row,
    first_col,
    live,
    WIDTH: tl.constexpr,
    FP4: tl.constexpr,
):
    """Quantize a tile and store codes and scales of its ``live`` rows."""
    ROWS: tl.constexpr = values.shape[0]
    COLS: tl.constexpr = values.shape[1]
    blocks = tl.reshape(values, (ROWS * COLS // 32, 32))
    scale = scale_byte(block_amax(tl.abs(blocks), 1), FP4)
    scaled = blocks * reciprocal_scale(scale)[:, None]
    if FP4:
        even, odd = tl.split(tl.reshape(e2m1_code(scaled), (ROWS, COLS // 2, 2)))
        codes = (even | (odd << 4)).to(tl.uint8)
    else:
        codes = tl.reshape(e4m3_code(scaled), (ROWS, COLS))
    PACK: tl.constexpr = 2 if FP4 else 1
    row = row.to(tl.int64)[:, None]
    at = first_col // PACK + tl.arange(0, COLS // PACK)[None, :]
    mask = live[:, None] & (at < WIDTH // PACK)
    tl.store(codes_ptr + row * (WIDTH // PACK) + at, codes, mask=mask)
    block = first_col // 32 + tl.arange(0, COLS // 32)[None, :]
    scale = tl.reshape(scale.to(tl.uint8), (ROWS, COLS // 32))
    mask = live[:, None] & (block < WIDTH // 32)
    tl.store(scales_ptr + row * (WIDTH // 32) + block, scale, mask=mask)


@triton.jit
def scaled_gate_up(
    codes_ptr,  # uint8 [T, K / 2 or K], the A operand, rows codes_stride apart
    scales_ptr,  # uint8 [T, K / 32], rows scales_stride apart
    weight_ptr,  # uint8 [E, 2I, K / 2], gate rows first
    weight_scales_ptr,  # uint8 [E, 2I, K / 32]
    bias_ptr,  # f32 [E, 2I] or unused
    out_codes_ptr,  # uint8 [R, I / 2 or I]
    out_scales_ptr,  # uint8 [R, I / 32]
    order_ptr,
    offsets_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    codes_stride,
    scales_stride,
    TOPK: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
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
    """Gate and up projections of one tile, the activation, and its quantization to the A operand's format."""
    total = tl.load(tile_start_ptr + EXPERTS) * COL_TILES
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert, first, end, col_tile = take_tile(
            index, offsets_ptr, tile_expert_ptr, tile_start_ptr, COL_TILES, ROWS
        )
        row = first + tl.arange(0, ROWS)
        live = row < end
        slot = (tl.load(order_ptr + row, mask=live, other=0) // TOPK).to(tl.int64)[:, None]
        x_codes = codes_ptr + slot * codes_stride
        x_scales = scales_ptr + slot * scales_stride
        col = col_tile * COLS + tl.arange(0, COLS)
        weight = (expert * (2 * I) + tl.minimum(col, I - 1)).to(tl.int64)[:, None]
        codes = weight_ptr + weight * (K // 2)
        scales = weight_scales_ptr + weight * (K // 32)
        FORMAT: tl.constexpr = "e2m1" if FP4 else "e4m3"

        gate = tl.zeros((ROWS, COLS), tl.float32)
        up = tl.zeros((ROWS, COLS), tl.float32)
        for k in range(0, K, STEP):
            a, a_scale = _operand(x_codes, x_scales, k, K, STEP, FP4)
            b, b_scale = _operand(codes, scales, k, K, STEP, True)
            c, c_scale = _operand(codes + I * (K // 2), scales + I * (K // 32), k, K, STEP, True)
            gate = tl.dot_scaled(a, a_scale, FORMAT, b.T, b_scale, "e2m1", gate)
            up = tl.dot_scaled(a, a_scale, FORMAT, c.T, c_scale, "e2m1", up)
        if HAS_BIAS:
            bias = bias_ptr + expert * (2 * I) + col
            gate += tl.load(bias, mask=col < I, other=0.0)[None, :]
            up += tl.load(bias + I, mask=col < I, other=0.0)[None, :]
        values = activate(gate, up, SWIGLU, LIMIT, ALPHA)
        _store_mx(values, out_codes_ptr, out_scales_ptr, row, col_tile * COLS, live, I, FP4)


@triton.jit
def scaled_down(
    codes_ptr,  # uint8 [R, K / 2 or K]
    scales_ptr,  # uint8 [R, K / 32]
    weight_ptr,  # uint8 [E, N, K / 2]
    weight_scales_ptr,  # uint8 [E, N, K / 32]
    bias_ptr,  # f32 [E, N] or unused
    out_ptr,  # [R, N]
    offsets_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    FP4: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COL_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Down projection of one tile."""
    total = tl.load(tile_start_ptr + EXPERTS) * COL_TILES
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert, first, end, col_tile = take_tile(
            index, offsets_ptr, tile_expert_ptr, tile_start_ptr, COL_TILES, ROWS
        )
        row = first + tl.arange(0, ROWS)
        live = row < end
        wide_row = tl.where(live, row, first).to(tl.int64)[:, None]
        PACK: tl.constexpr = 2 if FP4 else 1
        x_codes = codes_ptr + wide_row * (K // PACK)
        x_scales = scales_ptr + wide_row * (K // 32)
        col = col_tile * COLS + tl.arange(0, COLS)
        weight = (expert * N + tl.minimum(col, N - 1)).to(tl.int64)[:, None]
        FORMAT: tl.constexpr = "e2m1" if FP4 else "e4m3"

        sums = tl.zeros((ROWS, COLS), tl.float32)
        for k in range(0, K, STEP):
            a, a_scale = _operand(x_codes, x_scales, k, K, STEP, FP4)
            b, b_scale = _operand(
                weight_ptr + weight * (K // 2),
                weight_scales_ptr + weight * (K // 32),
                k,
                K,
                STEP,
                True,
            )
            sums = tl.dot_scaled(a, a_scale, FORMAT, b.T, b_scale, "e2m1", sums)
        if HAS_BIAS:
            sums += tl.load(bias_ptr + expert * N + col, mask=col < N, other=0.0)[None, :]
        out = out_ptr + row.to(tl.int64)[:, None] * N + col[None, :]
        mask = live[:, None] & (col < N)[None, :]
        tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=mask)
