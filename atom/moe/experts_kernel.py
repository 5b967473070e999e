"""One layer's local experts on the CPU: route, gate and up, activation, requantization, down, weighted sum.

One compiled call a layer, on the calling thread and without the GIL. Addresses and byte strides are plain integers;
:mod:`atom.moe.experts` answers for what they point to.

Sums are float32 throughout. A row's experts are added in ascending order of their ids, so that a row's result is a
function of that row alone, whatever the batch around it.

Shape suffixes: R rows, K topk, P (row, expert) pairs of this rank, M pairs of one expert, H hidden, I inter.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from atom.moe import experts_tile, raw_memory
from atom.moe.compiled import kernel
from atom.moe.experts_tile import COLUMNS, LANES, ROWS, VNNI, double_e2m1_block, multiply_rows
from atom.moe.raw_memory import (
    address,
    bits_to_f32,
    f32_pointer,
    f32_to_bits,
    read_f32,
    read_i32,
    read_u8,
    to_bf16,
    u16_pointer,
)
from atom.wire import mx_kernels
from atom.wire.format import BLOCK
from atom.wire.mx_kernels import F32_FP4, F32_FP8, dequantize_block, quantize_block

CHUNK = 1024
"""Rows that go through together, at most: it bounds the scratch memory."""

LAYER = np.dtype(
    [
        (name, np.int64)
        for name in (
            "strategy",  # of experts_tile
            "fp8",  # 1 where the A operand is fp8, 0 where it is fp4
            "first",  # id of the first local expert
            "local",  # local experts
            "total",  # experts of all ranks
            "topk",
            "hidden",
            "inter",
            "w1",  # addresses, in the layouts of experts_tile; w1's and bias1's rows are 16 gates and 16 ups in turn
            "w1_scale",
            "bias1",
            "w2",
            "w2_scale",
            "bias2",
            "weight_block_bytes",
            "operand_bytes",
        )
    ]
    + [(name, np.float32) for name in ("factor", "slope", "limit", "offset")]
)
"""What a layer's calls have in common. The activation is ``gate * sigmoid(slope * gate) * (up + offset)``, after the
clamp at ``limit`` (infinite for none)."""

_UNIT = np.array([127], np.uint8)  # an e8m0 scale of one
_f32 = np.float32

# The numpy error model leaves out the test for a zero divisor, which would keep loops from becoming vector code.
_helper = njit(nogil=True, error_model="numpy")


@kernel(experts_tile, raw_memory, mx_kernels)
def experts_layer(
    layers,
    codes,
    codes_stride,
    scales,
    scales_stride,
    ids,
    ids_stride,
    weights,
    weights_stride,
    rows,
    out,
    out_stride,
):
    """Run the local experts of ``rows`` rows.

    Args:
        layers: :data:`LAYER` ``[1]``.
        codes, scales: the A operand's codes and e8m0 bytes, ``[R, payload]`` and ``[R, H/32]``.
        ids, weights: int32 and float32 ``[R, K]``; an id that is not local is another rank's.
        out: bf16 ``[R, H]``, the weighted sum over this rank's experts, rounded once.

    Returns:
        False where an id is no expert's, and nothing was computed.
    """
    layer = layers[0]
    for r in range(rows):
        for k in range(layer.topk):
            expert = read_i32(ids + r * ids_stride + 4 * k)
            if expert < 0 or expert >= layer.total:
                return False
    for begin in range(0, rows, CHUNK):
        count = min(CHUNK, rows - begin)
        starts, pair_row, pair_weight = _route(
            layer,
            ids + begin * ids_stride,
            ids_stride,
            weights + begin * weights_stride,
            weights_stride,
            count,
        )
        blocks = layer.hidden // BLOCK
        operand = np.empty((count, layer.hidden * layer.operand_bytes), np.uint8)
        aux = np.empty((count, blocks, 2), np.int32)
        for r in range(count):
            _expand_row(
                layer,
                codes + (begin + r) * codes_stride,
                scales + (begin + r) * scales_stride,
                operand[r],
                aux[r],
            )
        total = np.zeros((count, layer.hidden // COLUMNS, COLUMNS), np.float32)
        _experts(layer, starts, pair_row, pair_weight, operand, aux, total)
        for r in range(count):
            _store_bf16(total[r], out + (begin + r) * out_stride)
    return True


@_helper
def _route(layer, ids, ids_stride, weights, weights_stride, rows):
    """Sort the pairs by local expert, each expert's by row.

    Returns:
        starts: int64 ``[local + 1]``, expert e has pairs ``starts[e]`` to ``starts[e + 1]``.
        pair_row: int64 ``[P]``. pair_weight: float32 ``[P]``.
    """
    local = layer.local
    starts = np.zeros(local + 1, np.int64)
    for r in range(rows):
        for k in range(layer.topk):
            expert = read_i32(ids + r * ids_stride + 4 * k) - layer.first
            if 0 <= expert < local:
                starts[expert + 1] += 1
    for expert in range(local):
        starts[expert + 1] += starts[expert]
    position = starts.copy()
    pair_row = np.empty(starts[local], np.int64)
    pair_weight = np.empty(starts[local], np.float32)
    for r in range(rows):
        for k in range(layer.topk):
            expert = read_i32(ids + r * ids_stride + 4 * k) - layer.first
            if 0 <= expert < local:
                pair_row[position[expert]] = r
                pair_weight[position[expert]] = read_f32(weights + r * weights_stride + 4 * k)
                position[expert] += 1
    return starts, pair_row, pair_weight


@_helper
def _expand_row(layer, codes, scales, operand, aux):
    """One quantized row into the form that the tile kernel reads.

    Args:
        codes, scales: addresses of the row's codes and e8m0 bytes.
        operand: uint8 ``[width * operand_bytes]``. aux: int32 ``[width / 32, 2]``.
    """
    code_bytes = BLOCK if layer.fp8 else BLOCK // 2
    step = BLOCK * layer.operand_bytes
    values = address(operand)
    start = address(aux) + 4
    unit = address(_UNIT)
    blocks = aux.shape[0]
    if layer.strategy == VNNI:
        for b in range(blocks):
            double_e2m1_block(codes + b * code_bytes, values + b * step, start + 8 * b)
    else:
        selector = F32_FP8 if layer.fp8 else F32_FP4
        for b in range(blocks):
            dequantize_block(selector, codes + b * code_bytes, unit, values + b * step)
    for b in range(blocks):
        byte = np.int32(read_u8(scales + b))
        bits = np.int32(0x00400000) if byte == 0 else byte << np.int32(23)
        bits = np.int32(0x7FC00000) if byte == 255 else bits
        aux[b, 0] = f32_to_bits(bits_to_f32(bits) * layer.factor)


@_helper
def _experts(layer, starts, pair_row, pair_weight, operand, aux, total):
    """Add each local expert's weighted output to ``total`` (float32 ``[R, H/32, 32]``)."""
    most = 0
    for expert in range(layer.local):
        most = max(most, starts[expert + 1] - starts[expert])
    tiles1, tiles2 = layer.inter // LANES, layer.hidden // COLUMNS
    bias1 = carray(f32_pointer(layer.bias1), (layer.local, tiles1, 2, LANES))
    bias2 = carray(f32_pointer(layer.bias2), (layer.local, tiles2, COLUMNS))
    gate_up = np.empty((most, tiles1, 2, LANES), np.float32)
    active = np.empty((tiles1, LANES), np.float32)
    codes = np.empty(layer.inter, np.uint8)
    scales = np.empty(layer.inter // BLOCK, np.uint8)
    inner = np.empty((most, layer.inter * layer.operand_bytes), np.uint8)
    inner_aux = np.empty((most, layer.inter // BLOCK, 2), np.int32)
    inner_index = np.empty(most, np.int64)
    for r in range(most):
        inner_index[r] = r
    tile = np.empty((ROWS, COLUMNS), np.float32)
    for expert in range(layer.local):
        begin, end = starts[expert], starts[expert + 1]
        count = end - begin
        for t in range(tiles1):
            for r in range(0, count, ROWS):
                _tile(
                    layer,
                    min(ROWS, count - r),
                    operand,
                    aux,
                    address(pair_row) + 8 * (begin + r),
                    layer.w1,
                    layer.w1_scale,
                    expert * tiles1 + t,
                    address(gate_up) + 4 * COLUMNS * (r * tiles1 + t),
                    4 * COLUMNS * tiles1,
                )
        for r in range(count):
            _activate(layer, gate_up[r], bias1[expert], active)
            _quantize(layer, active, codes, scales)
            _expand_row(layer, address(codes), address(scales), inner[r], inner_aux[r])
        for t in range(tiles2):
            for r in range(0, count, ROWS):
                rows = min(ROWS, count - r)
                _tile(
                    layer,
                    rows,
                    inner,
                    inner_aux,
                    address(inner_index) + 8 * r,
                    layer.w2,
                    layer.w2_scale,
                    expert * tiles2 + t,
                    address(tile),
                    4 * COLUMNS,
                )
                for i in range(rows):
                    pair = begin + r + i
                    _add_weighted(
                        total[pair_row[pair], t], pair_weight[pair], tile[i], bias2[expert, t]
                    )


@_helper
def _tile(layer, rows, operand, aux, index, weights, scales, tile, out, out_stride):
    """``rows`` operand rows times the weights' tile number ``tile``, to the addresses ``out``."""
    blocks = aux.shape[1]
    multiply_rows(
        layer.strategy,
        rows,
        address(operand),
        operand.shape[1],
        index,
        address(aux),
        8 * blocks,
        weights + tile * blocks * layer.weight_block_bytes,
        scales + tile * blocks * 2 * COLUMNS,
        blocks,
        out,
        out_stride,
    )


@_helper
def _add_weighted(total, weight, value, bias):
    """``total += weight * (value + bias)`` over 32 columns."""
    for n in range(COLUMNS):
        total[n] += weight * (value[n] + bias[n])


@_helper
def _activate(layer, gate_up, bias, active):
    """Bias, clamp and activation of one row, all float32: ``[I/16, 2, 16]``, the same, ``[I/16, 16]``."""
    limit, slope, offset = layer.limit, layer.slope, layer.offset
    for t in range(gate_up.shape[0]):
        gates, ups, out = gate_up[t, 0], gate_up[t, 1], active[t]
        gate_bias, up_bias = bias[t, 0], bias[t, 1]
        for n in range(LANES):
            gate = gates[n] + gate_bias[n]
            up = ups[n] + up_bias[n]
            gate = limit if gate > limit else gate
            up = limit if up > limit else up
            up = -limit if up < -limit else up
            out[n] = gate / (_f32(1) + _exp(-slope * gate)) * (up + offset)


@_helper
def _quantize(layer, active, codes, scales):
    """One activated row to the A operand's format: uint8 codes and e8m0 bytes."""
    code_bytes = BLOCK if layer.fp8 else BLOCK // 2
    source, target = address(active), address(codes)
    for b in range(scales.size):
        quantize_block(
            F32_FP8 if layer.fp8 else F32_FP4,
            source + 4 * BLOCK * b,
            target + code_bytes * b,
            address(scales) + b,
        )


@njit(nogil=True, error_model="numpy", inline="always")
def _exp(x):
    """e^x in float32, within 2 units in the last place (range reduction and polynomial of Cephes' expf).

    Written out so that LLVM makes vector code of it, and so that it is the same on every machine.
    """
    x = _f32(-87.0) if x < _f32(-87.0) else x
    x = _f32(88.0) if x > _f32(88.0) else x
    n = np.floor(x * _f32(1.44269504088896341) + _f32(0.5))
    x = x - n * _f32(0.693359375)
    x = x - n * _f32(-2.12194440e-4)
    p = _f32(1.9875691500e-4)
    p = p * x + _f32(1.3981999507e-3)
    p = p * x + _f32(8.3334519073e-3)
    p = p * x + _f32(4.1665795894e-2)
    p = p * x + _f32(1.6666665459e-1)
    p = p * x + _f32(5.0000001201e-1)
    p = p * x * x + x + _f32(1)
    return p * bits_to_f32((np.int32(n) + np.int32(127)) << np.int32(23))


@_helper
def _store_bf16(values, address):
    """Round a float32 row (``[H/32, 32]``) to bf16 at an address, to nearest even; NaN stays NaN."""
    out = carray(u16_pointer(address), values.shape)
    for t in range(values.shape[0]):
        row, target = values[t], out[t]
        for n in range(COLUMNS):
            target[n] = to_bf16(row[n])
