"""Triton kernels of the expert GEMM with MXFP4 weights, for GPUs without an fp4 matrix unit: 4-bit weights are read from
memory and become bf16 operands in registers.

Products of dequantized values are exact in bf16 and sums are float32, so these kernels compute what a scaled matrix
instruction would, up to the order of the sums; that order depends on nothing but the sizes.

Weights are held in words, made once by :func:`pack_weights`. A word holds eight consecutive elements of a row as four
pairs, one element of each pair in either half, at bits that one or two shifts and a mask bring to where bf16 has its sign
and the low bits of its exponent and mantissa. That bf16 number is 2^-126 times the element; one packed multiplication by
the block's scale, which is stored raised accordingly, makes the operand. Inputs come in the order in which the pairs
come: see :func:`permuted`.

The weights are the left operand of the dot product, so a tile is ``[weight rows, tokens]``: the matrix unit's long side
lies along the weights and its short one along the few tokens that an expert has.

Shape legend: T token rows, R rows sorted by expert, E experts, N weight rows, K input elements, I intermediate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from atom.moe.plan_triton import take_tile
from atom.wire.mx_triton import INTERPRETED, round_to_mx

PAD = 256
"""Input elements are padded to a multiple of this; any STEP divides it."""

_PAIR = tl.constexpr(0x81C081C0 - (1 << 32))
_SIGNS = tl.constexpr(0x80008000 - (1 << 32))
_MAGNITUDES = tl.constexpr(0x01C001C0)


@triton.jit
def permuted(k, STEP: tl.constexpr):
    """Where input element ``k`` stands: within each STEP, first the first pairs of all words, then the second, and so on."""
    return (k & -STEP) | ((k & 6) * (STEP // 8)) | ((k & (STEP - 8)) >> 2) | (k & 1)


@triton.jit
def _element_of(position, STEP: tl.constexpr):
    """Inverse of :func:`permuted`."""
    within = position & (STEP - 1)
    return (
        (position & -STEP)
        | ((within & (STEP // 4 - 2)) << 2)
        | ((within // (STEP // 4)) << 1)
        | (position & 1)
    )


@triton.jit
def pack_weights(
    codes_ptr,  # e2m1 pairs as int32 [rows, K / 8]
    scales_ptr,  # uint8 [rows, K / 32]
    words_ptr,  # int32 [rows, KP / 8]
    raised_ptr,  # uint8 [rows, KP / 32]
    rows,
    raise_by,
    K: tl.constexpr,
    KP: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Rearrange codes into words and raise their scales by ``raise_by``."""
    COL_TILES: tl.constexpr = (KP // 8 + WORDS - 1) // WORDS
    row = tl.program_id(0) // COL_TILES * ROWS + tl.arange(0, ROWS)[:, None]
    word = tl.program_id(0) % COL_TILES * WORDS + tl.arange(0, WORDS)[None, :]
    inside = row < rows
    row = row.to(tl.int64)
    live = inside & (word < K // 8)
    codes = tl.load(codes_ptr + row * (K // 8) + word, mask=live, other=0)
    scale = tl.load(scales_ptr + row * (K // 32) + word // 4, mask=live, other=0).to(tl.int32)
    codes = tl.where(scale == 0xFF, 0, codes)
    packed = tl.zeros_like(codes)
    for i in tl.static_range(8):
        code = (codes >> (4 * i)) & 0xF
        # Bits of the magnitude and of the sign of each of a half's four elements; see _shifted.
        magnitude_at = (6, 3, 9, 0)[i // 2]
        sign_at = (15, 12, 14, 13)[i // 2]
        half = ((code & 0x7) << magnitude_at) | (((code >> 3) & 1) << sign_at)
        packed |= half << (16 * (i % 2))
    inside &= word < KP // 8
    tl.store(words_ptr + row * (KP // 8) + word, packed, mask=inside)
    raised = tl.where(scale == 0xFF, 0xFF, scale + raise_by).to(tl.uint8)
    tl.store(raised_ptr + row * (KP // 32) + word // 4, raised, mask=inside & (word % 4 == 0))


@triton.jit
def _shifted(words, PAIR: tl.constexpr):
    """The PAIR-th pair of each word, as two bf16 of 2^-126 times the elements (int32)."""
    if PAIR == 0:
        return words & _PAIR
    if PAIR == 1:
        return (words << 3) & _PAIR
    if PAIR == 2:
        return ((words >> 3) & _MAGNITUDES) | ((words << 1) & _SIGNS)
    return ((words << 6) & _MAGNITUDES) | ((words << 2) & _SIGNS)


@triton.jit
def _factors(raised):
    """Two bf16 scales (int32) of each raised scale byte. 255 becomes infinity, and its elements are 0, so NaN results."""
    return raised.to(tl.int32) * 0x00800080


@triton.jit
def _scaled(pairs, factors, PTX: tl.constexpr):
    """Products of the bf16 pairs in two int32 tensors, as int32."""
    if PTX:
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;",
            "=r,r,r",
            [pairs, factors],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    factor = (factors & -65536).to(tl.float32, bitcast=True)
    low = ((pairs << 16).to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True)
    high = ((pairs & -65536).to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True)
    return ((low >> 16) & 0xFFFF) | (high & -65536)


@triton.jit
def _unpack(words, factors, PAIR: tl.constexpr, PTX: tl.constexpr):
    """bf16 operand ``[rows, 2 * words]`` of the PAIR-th pair of each word, the two elements adjacent."""
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    pairs = _scaled(_shifted(words, PAIR), factors, PTX)
    low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(tl.join(low, high), (ROWS, 2 * WORDS))


@triton.jit
def _word_factors(scales_ptr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Factors ``[ROWS, WORDS]`` from pointers ``[ROWS, WORDS / 4]`` to raised scale bytes."""
    factors = _factors(tl.load(scales_ptr))
    factors = tl.broadcast_to(factors[:, :, None], (ROWS, WORDS // 4, 4))
    return tl.reshape(factors, (ROWS, WORDS))


@triton.jit
def _inputs(x_ptr, k, PAIR: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, STEP: tl.constexpr):
    """bf16 ``[STEP / 4, tokens]`` that the PAIR-th pairs of the words from element ``k`` on meet; padding is 0.

    ``x_ptr`` is pointers ``[1, tokens]`` to permuted rows.
    """
    position = k + PAIR * (STEP // 4) + tl.arange(0, STEP // 4)[:, None]
    if K == KP:
        return tl.load(x_ptr + position)
    return tl.load(x_ptr + position, mask=_element_of(position, STEP) < K, other=0.0)


@triton.jit
def dot(a, b, sums):
    """``sums + a @ b`` of bf16 operands, in float32. The interpreter would take their bits for integers."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums)
    return tl.dot(a, b, sums)


@triton.jit
def _raise(sums, LOWERED: tl.constexpr):
    """float32 ``sums`` times 2^LOWERED."""
    if LOWERED > 0:
        return sums * tl.full((1, 1), (127 + LOWERED) << 23, tl.int32).to(tl.float32, bitcast=True)
    return sums


@triton.jit
def activate(gate, up, SWIGLU: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """The activation between the two projections, in float32; see :class:`atom.moe.spec.Activation`."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    if SWIGLU:
        return gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gate_up(
    x_ptr,  # bf16 [T, KP], permuted
    words_ptr,  # int32 [E, 2I, KP / 8], gate rows first
    scales_ptr,  # uint8 [E, 2I, KP / 32], raised
    bias_ptr,  # f32 [E, 2I] or unused
    out_ptr,  # bf16 [R, IP], permuted
    order_ptr,
    offsets_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    LOWERED: tl.constexpr,  # powers of two that the scales lack
    TOPK: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    IP: tl.constexpr,
    FP4: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SWIGLU: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    COL_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
    OUT_STEP: tl.constexpr,
    PTX: tl.constexpr,
):
    """Gate and up projections of one tile, the activation, and its rounding to the A operand's format."""
    total = tl.load(tile_start_ptr + EXPERTS) * COL_TILES
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert, first, end, col_tile = take_tile(
            index, offsets_ptr, tile_expert_ptr, tile_start_ptr, COL_TILES, ROWS
        )
        row = first + tl.arange(0, ROWS)
        live = row < end
        slot = tl.load(order_ptr + row, mask=live, other=0) // TOPK
        x = x_ptr + slot.to(tl.int64)[None, :] * KP

        col = col_tile * COLS + tl.arange(0, COLS)
        weight = (expert * (2 * I) + tl.minimum(col, I - 1)).to(tl.int64)[:, None]
        WORDS: tl.constexpr = STEP // 8
        word = words_ptr + weight * (KP // 8) + tl.arange(0, WORDS)[None, :]
        scale = scales_ptr + weight * (KP // 32) + tl.arange(0, WORDS // 4)[None, :]
        UP_WORDS: tl.constexpr = I * (KP // 8)
        UP_SCALES: tl.constexpr = I * (KP // 32)

        gate = tl.zeros((COLS, ROWS), tl.float32)
        up = tl.zeros((COLS, ROWS), tl.float32)
        for k in range(0, KP, STEP):
            gate_words = tl.load(word + k // 8)
            up_words = tl.load(word + k // 8 + UP_WORDS)
            gate_factors = _word_factors(scale + k // 32, COLS, WORDS)
            up_factors = _word_factors(scale + k // 32 + UP_SCALES, COLS, WORDS)
            for pair in tl.static_range(4):
                inputs = _inputs(x, k, pair, K, KP, STEP)
                gate = dot(_unpack(gate_words, gate_factors, pair, PTX), inputs, gate)
                up = dot(_unpack(up_words, up_factors, pair, PTX), inputs, up)

        gate = _raise(gate, LOWERED)
        up = _raise(up, LOWERED)
        if HAS_BIAS:
            bias = bias_ptr + expert * (2 * I) + col
            gate += tl.load(bias, mask=col < I, other=0.0)[:, None]
            up += tl.load(bias + I, mask=col < I, other=0.0)[:, None]
        values = activate(gate, up, SWIGLU, LIMIT, ALPHA)
        values = tl.reshape(tl.trans(values), (ROWS * COLS // 32, 32))
        values = tl.reshape(round_to_mx(values, FP4), (ROWS, COLS))
        out = out_ptr + row.to(tl.int64)[:, None] * IP + permuted(col, OUT_STEP)[None, :]
        tl.store(out, values, mask=live[:, None] & (col < I)[None, :])


@triton.jit
def down(
    x_ptr,  # bf16 [R, KP], permuted
    words_ptr,  # int32 [E, N, KP / 8]
    scales_ptr,  # uint8 [E, N, KP / 32], raised
    bias_ptr,  # f32 [E, N] or unused
    out_ptr,  # [R, N]
    offsets_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    LOWERED: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COL_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
    PTX: tl.constexpr,
):
    """Down projection of one tile."""
    total = tl.load(tile_start_ptr + EXPERTS) * COL_TILES
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert, first, end, col_tile = take_tile(
            index, offsets_ptr, tile_expert_ptr, tile_start_ptr, COL_TILES, ROWS
        )
        row = first + tl.arange(0, ROWS)
        live = row < end
        x = x_ptr + tl.where(live, row, first).to(tl.int64)[None, :] * KP

        col = col_tile * COLS + tl.arange(0, COLS)
        weight = (expert * N + tl.minimum(col, N - 1)).to(tl.int64)[:, None]
        WORDS: tl.constexpr = STEP // 8
        word = words_ptr + weight * (KP // 8) + tl.arange(0, WORDS)[None, :]
        scale = scales_ptr + weight * (KP // 32) + tl.arange(0, WORDS // 4)[None, :]

        sums = tl.zeros((COLS, ROWS), tl.float32)
        for k in range(0, KP, STEP):
            words = tl.load(word + k // 8)
            factors = _word_factors(scale + k // 32, COLS, WORDS)
            for pair in tl.static_range(4):
                inputs = _inputs(x, k, pair, K, KP, STEP)
                sums = dot(_unpack(words, factors, pair, PTX), inputs, sums)

        sums = _raise(sums, LOWERED)
        if HAS_BIAS:
            sums += tl.load(bias_ptr + expert * N + col, mask=col < N, other=0.0)[:, None]
        out = out_ptr + row.to(tl.int64)[:, None] * N + col[None, :]
        values = tl.trans(sums).to(out_ptr.dtype.element_ty)
        tl.store(out, values, mask=live[:, None] & (col < N)[None, :])


@triton.jit
def unpack_weights(
    words_ptr,  # int32 [groups, N, KP / 8]
    scales_ptr,  # uint8 [groups, N, KP / 32], raised
    out_ptr,  # bf16 pairs as int32 [groups, rows, K / 2]
    groups,
    first_row,
    rows,
    LOWERED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    WORDS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Rows ``first_row`` to ``first_row + rows`` of each group of weights as bf16, elements in their own order.

    A thread takes single words and writes 16 bytes for each, so neighbours write in one piece what they read in one piece;
    the hint keeps the compiler from giving a thread four adjacent words.
    """
    WIDTH: tl.constexpr = K // 8
    tiles = tl.cdiv(rows * WIDTH, WORDS)
    for index in range(tl.program_id(0), groups * tiles, tl.num_programs(0)):
        group = (index // tiles).to(tl.int64)
        word = index % tiles * WORDS + tl.arange(0, WORDS)
        live = word < rows * WIDTH
        if K == KP:
            at = word
            scale_at = word // 4
        else:
            at = word // WIDTH * (KP // 8) + word % WIDTH
            scale_at = word // WIDTH * (KP // 32) + word % WIDTH // 4
        row = group * N + first_row
        at = tl.max_contiguous(words_ptr + row * (KP // 8) + at, 1)
        words = tl.load(at, mask=live, other=0)
        scale_at = tl.max_contiguous(scales_ptr + row * (KP // 32) + scale_at, 1)
        factors = _factors(tl.load(scale_at, mask=live, other=0))
        first = _scaled(_shifted(words, 0), factors, PTX)
        second = _scaled(_shifted(words, 1), factors, PTX)
        third = _scaled(_shifted(words, 2), factors, PTX)
        fourth = _scaled(_shifted(words, 3), factors, PTX)
        if LOWERED > 0:
            # bf16 of 2^LOWERED, twice.
            rest = tl.zeros_like(words) + (127 + LOWERED) * 0x00800080
            first = _scaled(first, rest, PTX)
            second = _scaled(second, rest, PTX)
            third = _scaled(third, rest, PTX)
            fourth = _scaled(fourth, rest, PTX)
        pairs = tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (4 * WORDS,))
        pair = index % tiles * (4 * WORDS) + tl.arange(0, 4 * WORDS)
        tl.store(out_ptr + group * rows * (K // 2) + pair, pairs, mask=pair < rows * (K // 2))
