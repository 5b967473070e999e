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

from atom.moe import experts_tile, raw_memory, vector_code
from atom.moe.compiled import kernel
from atom.moe.experts_tile import COLUMNS, LANES, ROWS, VNNI, double_e2m1_block, multiply_rows
from atom.moe.raw_memory import (
    address,
    bits_to_f32,
    f32_pointer,
    f32_to_bits,
    i32_pointer,
    read_f32,
    read_i32,
    read_u8,
    to_bf16,
    u8_pointer,
    u16_pointer,
)
from atom.wire import mx_kernels
from atom.wire.format import BLOCK
from atom.wire.mx_kernels import F32_FP4, F32_FP8, dequantize_block, quantize_block

CHUNK = 1024
"""Rows that go through together, at most: it bounds the scratch memory."""

GROUP = 64
"""Rows of one expert that go through together, at most: their intermediate results stay in cache."""

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
            "w1",  # addresses, in the layouts of experts_tile; w1's rows are 16 gates and 16 ups in turn,
            "w1_scale",
            "bias1",  # the gates' and then the ups'
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


def scratch_bytes(hidden: int, inter: int, operand_bytes: int, rows: int) -> int:
    """Bytes of scratch memory for ``rows`` rows: operand, aux and total of each, and what a group of one expert needs."""
    row = hidden * (operand_bytes + 4) + hidden // BLOCK * 8
    group = 4 * hidden + inter * (operand_bytes + 8) + inter // BLOCK * 8
    return min(rows, CHUNK) * row + GROUP * group


@kernel(experts_tile, vector_code, raw_memory, mx_kernels)
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
    scratch,
):
    """Run the local experts of ``rows`` rows.

    Args:
        layers: :data:`LAYER` ``[1]``.
        codes, scales: the A operand's codes and e8m0 bytes, ``[R, payload]`` and ``[R, H/32]``.
        ids, weights: int32 and float32 ``[R, K]``; an id that is not local is another rank's.
        out: bf16 ``[R, H]``, the weighted sum over this rank's experts, rounded once.
        scratch: uint8, as many as :func:`scratch_bytes` says. (Memory from the allocator would be new to the process
            at each call, and its first touch takes longer than the arithmetic.)

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
        hidden = layer.hidden
        at = address(scratch)
        operand = carray(u8_pointer(at), (count, hidden * layer.operand_bytes))
        at += operand.size
        aux = carray(i32_pointer(at), (count, hidden // BLOCK, 2))
        at += 4 * aux.size
        total = carray(f32_pointer(at), (count, hidden))
        at += 4 * total.size
        total[:] = 0
        for r in range(count):
            _expand_row(
                layer,
                codes + (begin + r) * codes_stride,
                scales + (begin + r) * scales_stride,
                operand[r],
                aux[r],
            )
        _experts(layer, starts, pair_row, pair_weight, operand, aux, total, at)
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
def _experts(layer, starts, pair_row, pair_weight, operand, aux, total, scratch):
    """Add each local expert's weighted output to ``total`` (float32 ``[R, H]``); ``scratch`` is an address."""
    inter, hidden = layer.inter, layer.hidden
    bias1 = carray(f32_pointer(layer.bias1), (layer.local, 2, inter))
    bias2 = carray(f32_pointer(layer.bias2), (layer.local, hidden))
    at = scratch
    down = carray(f32_pointer(at), (GROUP, hidden))
    at += 4 * down.size
    gate_up = carray(f32_pointer(at), (GROUP, 2, inter))
    at += 4 * gate_up.size
    inner = carray(u8_pointer(at), (GROUP, inter * layer.operand_bytes))
    at += inner.size
    inner_aux = carray(i32_pointer(at), (GROUP, inter // BLOCK, 2))
    active = np.empty(inter, np.float32)
    codes = np.empty(inter, np.uint8)
    scales = np.empty(inter // BLOCK, np.uint8)
    inner_row = np.empty(GROUP, np.int64)
    for r in range(GROUP):
        inner_row[r] = r
    for expert in range(layer.local):
        for begin in range(starts[expert], starts[expert + 1], GROUP):
            count = min(GROUP, starts[expert + 1] - begin)
            _project(
                layer,
                count,
                operand,
                aux,
                address(pair_row) + 8 * begin,
                layer.w1,
                layer.w1_scale,
                expert * (inter // LANES),
                inter // LANES,
                address(gate_up),
                4 * 2 * inter,
                4 * LANES,
                4 * inter,
            )
            for r in range(count):
                _activate(layer, gate_up[r], bias1[expert], active)
                _quantize(layer, active, codes, scales)
                _expand_row(layer, address(codes), address(scales), inner[r], inner_aux[r])
            _project(
                layer,
                count,
                inner,
                inner_aux,
                address(inner_row),
                layer.w2,
                layer.w2_scale,
                expert * (hidden // COLUMNS),
                hidden // COLUMNS,
                address(down),
                4 * hidden,
                4 * COLUMNS,
                4 * LANES,
            )
            for r in range(count):
                pair = begin + r
                _add_weighted(total[pair_row[pair]], pair_weight[pair], down[r], bias2[expert])


@_helper
def _project(
    layer,
    count,
    operand,
    aux,
    index,
    weights,
    scales,
    first,
    tiles,
    out,
    out_stride,
    tile_stride,
    half_stride,
):
    """``count`` operand rows times ``tiles`` weight tiles from number ``first``: each tile's weights meet all rows in turn.

    A tile's out row is two runs of 16 float32, ``half_stride`` apart; the next tile's is ``tile_stride`` further.
    """
    blocks = aux.shape[1]
    for tile in range(tiles):
        at = (first + tile) * blocks
        for r in range(0, count, ROWS):
            multiply_rows(
                layer.strategy,
                min(ROWS, count - r),
                address(operand),
                operand.shape[1],
                index + 8 * r,
                address(aux),
                8 * blocks,
                weights + at * layer.weight_block_bytes,
                scales + at * 2 * COLUMNS,
                blocks,
                out + r * out_stride + tile * tile_stride,
                out_stride,
                half_stride,
            )


@_helper
def _add_weighted(total, weight, value, bias):
    """``total += weight * (value + bias)`` over a row of float32."""
    for n in range(total.size):
        total[n] += weight * (value[n] + bias[n])


@_helper
def _activate(layer, gate_up, bias, active):
    """Bias, clamp and activation of one row, all float32: ``[2, I]``, the same, ``[I]``."""
    limit, slope, offset = layer.limit, layer.slope, layer.offset
    gates, ups, gate_bias, up_bias = gate_up[0], gate_up[1], bias[0], bias[1]
    for n in range(active.size):
        gate = gates[n] + gate_bias[n]
        up = ups[n] + up_bias[n]
        gate = limit if gate > limit else gate
        up = limit if up > limit else up
        up = -limit if up < -limit else up
        active[n] = gate / (_f32(1) + _exp(-slope * gate)) * (up + offset)


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
def _store_bf16(values, target):
    """Round a row of float32 to bf16 at an address."""
    out = carray(u16_pointer(target), values.shape)
    for n in range(values.size):
        out[n] = to_bf16(values[n])
