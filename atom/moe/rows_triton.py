"""Triton kernels on token rows around the expert GEMM: operands to bf16, and the weighted sum of the experts' results.

Shape legend: S token slots, K topk, R rows sorted by expert, H hidden.
"""

from __future__ import annotations

import triton
import triton.language as tl

from atom.moe.gemm_triton import permuted
from atom.wire.mx_triton import decode


@triton.jit(do_not_specialize=["regions", "region_slots"])
def expand_slots(
    codes_ptr,
    scales_ptr,
    out_ptr,  # bf16 [S, HP]
    counts_ptr,
    codes_stride,
    scales_stride,
    regions,
    region_slots,
    H: tl.constexpr,
    HP: tl.constexpr,
    FP4: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    STEP: tl.constexpr,
    COLS: tl.constexpr,
):
    """A operand rows of live slots as bf16, permuted for :func:`~atom.moe.gemm_triton.gate_up`. Padding is not written."""
    COL_TILES: tl.constexpr = (H + COLS - 1) // COLS
    zero = tl.zeros((1, 1), tl.int32)
    for region in range(0, regions):
        count = region_slots
        if HAS_COUNTS:
            count = tl.load(counts_ptr + region)
        for tile in range(tl.program_id(0), count * COL_TILES, tl.num_programs(0)):
            slot = (region * region_slots + tile // COL_TILES).to(tl.int64)
            start = tile % COL_TILES * COLS
            live = ((start // 32 + tl.arange(0, COLS // 32)) < H // 32)[None, :]
            codes = codes_ptr + slot * codes_stride + zero
            scales = scales_ptr + slot * scales_stride + zero
            values = decode(codes, scales, start, live, FP4, COLS).to(tl.bfloat16)
            col = start + tl.arange(0, COLS)[None, :]
            tl.store(out_ptr + slot * HP + permuted(col, STEP), values, mask=col < H)


@triton.jit
def expand_sorted(
    codes_ptr,
    scales_ptr,
    out_ptr,  # bf16 [R, H]
    order_ptr,
    offsets_ptr,
    codes_stride,
    scales_stride,
    TOPK: tl.constexpr,
    EXPERTS: tl.constexpr,
    H: tl.constexpr,
    FP4: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """A operand rows as bf16 in the order of the plan."""
    total = tl.load(offsets_ptr + EXPERTS)
    first = tl.program_id(0) * ROWS
    if first >= total:
        return
    row = first + tl.arange(0, ROWS)
    inside = (row < total)[:, None]
    slot = (tl.load(order_ptr + row, mask=row < total, other=0) // TOPK).to(tl.int64)[:, None]
    start = tl.program_id(1) * COLS
    live = inside & ((start // 32 + tl.arange(0, COLS // 32)) < H // 32)[None, :]
    values = decode(
        codes_ptr + slot * codes_stride, scales_ptr + slot * scales_stride, start, live, FP4, COLS
    )
    col = start + tl.arange(0, COLS)[None, :]
    out = out_ptr + row.to(tl.int64)[:, None] * H + col
    tl.store(out, values.to(tl.bfloat16), mask=inside & (col < H))


@triton.jit
def weighted_sum(
    y_ptr,  # [R, H]
    position_ptr,
    weights_ptr,
    slot,
    start,
    K: tl.constexpr,
    H: tl.constexpr,
    COLS: tl.constexpr,
):
    """float32 ``[COLS]``: the results of a slot's local experts times their weights, summed in the order of its choices."""
    col = start + tl.arange(0, COLS)
    total = tl.zeros((COLS,), tl.float32)
    for k in tl.static_range(K):
        position = tl.load(position_ptr + slot * K + k)
        weight = tl.load(weights_ptr + slot * K + k)
        there = col < tl.where(position >= 0, H, 0)
        y = tl.load(y_ptr + position.to(tl.int64) * H + col, mask=there, other=0.0)
        total += tl.where(position >= 0, weight, 0.0) * y.to(tl.float32)
    return total


@triton.jit
def combine(
    y_ptr,
    position_ptr,
    weights_ptr,  # f32 [S, K]
    out_ptr,  # bf16 [S, H]
    K: tl.constexpr,
    H: tl.constexpr,
    COLS: tl.constexpr,
):
    """One rank's whole combine: all slots are live and their results stay here."""
    slot = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * COLS
    total = weighted_sum(y_ptr, position_ptr, weights_ptr, slot, start, K, H, COLS)
    col = start + tl.arange(0, COLS)
    tl.store(out_ptr + slot * H + col, total.to(tl.bfloat16), mask=col < H)
