"""MX quantization on a GPU: the rules of :mod:`atom.wire.mx_reference`, bit for bit, as Triton kernels.

One source for CUDA and ROCm. Besides the kernels, this module holds the element-wise steps that other kernels fuse
(:func:`scale_byte`, :func:`encode_words`, :func:`round_to_mx`), so that whoever quantizes a value gets the same byte.

How elements are encoded, given that scales are powers of two and hence ``x / scale`` is exact:

- e4m3: the hardware's conversion, round to nearest even.
- e2m1 from bf16: scaled by another 2^-14, a value's float16 bits are its e2m1 exponent and mantissa bits followed by nine
  more, subnormals included, so that one integer addition rounds to nearest even. Two elements share a 32-bit word in
  that addition. float16 keeps all that counts: bf16 has 8 significant bits, and what float16's subnormals cut off lies
  below 2^-10, far from the first midpoint (0.25).
- e2m1 from float32: the same idea in float32's own bits above 2, a float addition that rounds to halves below 2.

Shape legend: T tokens, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.wire.format import BLOCK, Wire
from atom.wire.mx_reference import check_codes, check_input, element_format

__all__ = ["dequantize", "dequantize_to_bf16", "quantize", "quantize_into"]

_TILES = {Wire.FP4: (2048, 1), Wire.FP8: (8192, 4), Wire.BF16: (4096, 4)}
"""Elements that one program takes at a time, and its warps, for each format of the result (measured: docs/gpu_results.md).
e2m1 needs so much arithmetic that short programs, of which many fit, hide it best."""

_PROGRAMS = 4096
"""Programs where the number of rows is known on the GPU only: enough to fill it, few enough to find no rows quickly."""

_ROUND_TO_HALVES = tl.constexpr(6291456.0)
"""1.5 * 2^22: float32 numbers near it are multiples of a half, e2m1's smallest step."""

_ROUND_TO_512THS = tl.constexpr(24576.0)
"""1.5 * 2^14: float32 numbers near it are multiples of 2^-9, e4m3's smallest step."""

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels. It rounds conversions to e4m3 in a way of its own, and calls a reduction's
function once an element, so such steps are written in another way for it."""


@triton.jit
def _max_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_amax(magnitudes, axis: tl.constexpr):
    """Largest of float32 magnitudes along ``axis``; NaN if one is NaN."""
    if INTERPRETED:
        nan = magnitudes != magnitudes
        amax = tl.max(tl.where(nan, 0.0, magnitudes), axis)
        return tl.where(tl.max(nan.to(tl.int32), axis) > 0, float("nan"), amax)
    return tl.reduce(magnitudes, axis, _max_or_nan)


@triton.jit
def scale_byte(amax, FP4: tl.constexpr):
    """e8m0 byte (int32) of a block whose largest magnitude is ``amax`` (float32).

    The added constant carries into the exponent exactly where the mantissa exceeds that of the largest element (1.5 for
    e2m1's 6, 1.75 for e4m3's 448), and takes that element's exponent off.
    """
    bits = amax.to(tl.int32, bitcast=True)
    if FP4:
        exponent = (bits + (0x3FFFFF - (2 << 23))) >> 23
    else:
        exponent = (bits + (0x1FFFFF - (8 << 23))) >> 23
    exponent = tl.maximum(exponent, tl.minimum(bits, 1))
    return tl.where(bits >= 0x7F800000, 0xFF, exponent)


@triton.jit
def reciprocal_scale(scale):
    """float32 ``1 / scale`` of an e8m0 byte below 254 (int32), a normal number."""
    return ((254 - scale) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_value(scale):
    """float32 of an e8m0 byte (int32): 2^(byte - 127), NaN for 255."""
    bits = tl.where(scale == 0xFF, 0x7FC00000, tl.maximum(scale << 23, 0x00400000))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e2m1_code(scaled):
    """e2m1 codes (int32) of float32 values of magnitude at most 6."""
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = tl.abs(scaled)
    halves = (magnitude + _ROUND_TO_HALVES).to(tl.int32, bitcast=True) & 0x7
    mag_bits = bits & 0x7FFFFFFF
    rounded = ((mag_bits + 0x1FFFFF + ((mag_bits >> 22) & 1)) >> 22) - 252
    return tl.where(magnitude < 2.0, halves, rounded) | ((bits >> 28) & 0x8)


@triton.jit
def e4m3_code(scaled):
    """e4m3fn codes (uint8) of float32 values of magnitude at most 448; NaN gives some code."""
    if not INTERPRETED:
        return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = tl.abs(scaled)
    steps = (magnitude + _ROUND_TO_512THS).to(tl.int32, bitcast=True) & 0xF
    mag_bits = bits & 0x7FFFFFFF
    rounded = ((mag_bits + 0x7FFFF + ((mag_bits >> 20) & 1)) >> 20) - 960
    code = tl.where(magnitude < 0.015625, steps, rounded) & 0x7F
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e2m1_value(code):
    """float32 values of e2m1 codes (int32): as float32 bits the code means 2^-126 times its value."""
    bits = ((code & 0x7) << 22) | ((code & 0x8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def round_to_mx(values, FP4: tl.constexpr):
    """Quantize float32 ``[rows, 32]`` blocks and return what they then stand for, in bf16 (exact).

    A block that holds a NaN or an infinity becomes NaN throughout.
    """
    scale = scale_byte(block_amax(tl.abs(values), 1), FP4)
    scaled = values * reciprocal_scale(scale)[:, None]
    if FP4:
        value = e2m1_value(e2m1_code(scaled))
    else:
        value = e4m3_code(scaled).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return (value * scale_value(scale)[:, None]).to(tl.bfloat16)


@triton.jit
def encode_words(words, FP4: tl.constexpr, NAN_MAKES_POISON: tl.constexpr):
    """Quantize blocks of bf16 elements, two a 32-bit word.

    Args:
        words: int32 ``[blocks, 16]``, the even element in the low half.
        NAN_MAKES_POISON: the target's conversion of any NaN to e4m3 gives 0x7F, so that no select is needed.

    Returns:
        codes: int16 ``[blocks, 8]`` with four e2m1 codes each, or uint8 ``[blocks, 32]`` of e4m3.
        scales: int32 ``[blocks]``.
    """
    BLOCKS: tl.constexpr = words.shape[0]
    even = (words << 16).to(tl.float32, bitcast=True)
    odd = (words & -65536).to(tl.float32, bitcast=True)
    scale = scale_byte(block_amax(_max_or_nan(tl.abs(even), tl.abs(odd)), 1), FP4)
    poisoned = (scale == 0xFF)[:, None]
    if FP4:
        # Two factors: their product can lie below the normal numbers, from where its bits cannot be written directly.
        factor = (reciprocal_scale(scale) * 6.103515625e-05)[:, None]
        low = (even * factor).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = (odd * factor).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        pair = low | (high << 16)
        # Each half now holds sign(1) exponent(2, after three zeros) mantissa(1) and nine bits to round off.
        pair += 0x00FF00FF + ((pair >> 9) & 0x00010001)
        first, second = tl.split(tl.reshape(pair, (BLOCKS, 8, 2)))
        four = ((first >> 8) & 0x008E008E) | (second & -1912566272)
        four = (four & 0x0E0E0E0E) | ((four >> 3) & 0x10101010)
        four = ((four >> 1) & 0x0F0F) | ((four >> 13) & 0xF0F0)
        codes = tl.where(poisoned, 0x3333, four).to(tl.int16)
    else:
        factor = reciprocal_scale(scale)
        if NAN_MAKES_POISON:
            factor = tl.where(scale == 0xFF, float("nan"), factor)
        factor = factor[:, None]
        scaled = tl.reshape(tl.join(even * factor, odd * factor), (BLOCKS, 32))
        codes = e4m3_code(scaled)
        if not NAN_MAKES_POISON:
            codes = tl.where(poisoned, 0x7F, codes)
    return codes, scale


@triton.jit
def _quantize_tile(
    x_ptr,
    codes_ptr,
    scales_ptr,
    first,  # row
    start,  # element
    limit,
    x_stride,
    codes_stride,
    scales_stride,
    H: tl.constexpr,
    FP4: tl.constexpr,
    NAN_MAKES_POISON: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = first + tl.arange(0, ROWS)
    live = (row < limit)[:, None]
    row = row.to(tl.int64)[:, None]
    word = start // 2 + tl.arange(0, COLS // 2)[None, :]
    x = tl.load(x_ptr + row * x_stride + word, mask=live & (word < H // 2), other=0)
    codes, scales = encode_words(tl.reshape(x, (ROWS * COLS // 32, 16)), FP4, NAN_MAKES_POISON)

    # Codes come as four e2m1 in 16 bits, or single e4m3.
    UNIT: tl.constexpr = 4 if FP4 else 1
    unit = start // UNIT + tl.arange(0, COLS // UNIT)[None, :]
    code_row = (codes_ptr + row * codes_stride).to(tl.pointer_type(codes.dtype))
    tl.store(code_row + unit, tl.reshape(codes, (ROWS, COLS // UNIT)), live & (unit < H // UNIT))
    block = start // 32 + tl.arange(0, COLS // 32)[None, :]
    scales = tl.reshape(scales.to(tl.uint8), (ROWS, COLS // 32))
    tl.store(scales_ptr + row * scales_stride + block, scales, mask=live & (block < H // 32))


@triton.jit(do_not_specialize=["rows"])
def _quantize_bf16(
    x_ptr,  # bf16 [T, H] as int32 [T, H / 2]
    codes_ptr,
    scales_ptr,
    rows,
    x_stride,  # in words
    codes_stride,
    scales_stride,
    H: tl.constexpr,
    FP4: tl.constexpr,
    NAN_MAKES_POISON: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    # One grid axis: the others end at 65535.
    COL_TILES: tl.constexpr = (H + COLS - 1) // COLS
    _quantize_tile(
        x_ptr,
        codes_ptr,
        scales_ptr,
        tl.program_id(0) // COL_TILES * ROWS,
        tl.program_id(0) % COL_TILES * COLS,
        rows,
        x_stride,
        codes_stride,
        scales_stride,
        H,
        FP4,
        NAN_MAKES_POISON,
        ROWS,
        COLS,
    )


@triton.jit
def _quantize_regions(
    x_ptr,  # bf16 [regions, region_rows, H] as int32
    codes_ptr,
    scales_ptr,
    counts_ptr,  # int32 [regions], rows that are there
    regions,
    region_rows,
    x_stride,
    codes_stride,
    scales_stride,
    H: tl.constexpr,
    FP4: tl.constexpr,
    NAN_MAKES_POISON: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    COL_TILES: tl.constexpr = (H + COLS - 1) // COLS
    for region in range(0, regions):
        count = tl.load(counts_ptr + region)
        tiles = (count + ROWS - 1) // ROWS * COL_TILES
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            _quantize_tile(
                x_ptr,
                codes_ptr,
                scales_ptr,
                region * region_rows + tile // COL_TILES * ROWS,
                tile % COL_TILES * COLS,
                region * region_rows + count,
                x_stride,
                codes_stride,
                scales_stride,
                H,
                FP4,
                NAN_MAKES_POISON,
                ROWS,
                COLS,
            )


@triton.jit(do_not_specialize=["blocks"])
def _quantize_f32(x_ptr, codes_ptr, scales_ptr, blocks, FP4: tl.constexpr, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    live = (block < blocks)[:, None]
    x = tl.load(x_ptr + block[:, None] * 32 + tl.arange(0, 32)[None, :], mask=live, other=0.0)
    scale = scale_byte(block_amax(tl.abs(x), 1), FP4)
    scaled = x * reciprocal_scale(scale)[:, None]
    if FP4:
        codes = tl.where((scale == 0xFF)[:, None], 0x3, e2m1_code(scaled))
        even, odd = tl.split(tl.reshape(codes, (BLOCKS, 16, 2)))
        codes = (even | (odd << 4)).to(tl.uint8)
    else:
        codes = e4m3_code(scaled)
        codes = tl.where((scale == 0xFF)[:, None], 0x7F, codes)
    WIDTH: tl.constexpr = codes.shape[1]
    tl.store(codes_ptr + block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], codes, mask=live)
    tl.store(scales_ptr + block, scale.to(tl.uint8), mask=block < blocks)


@triton.jit
def decode(codes_ptr, scales_ptr, start, live, FP4: tl.constexpr, COLS: tl.constexpr):
    """float32 values ``[rows, COLS]`` of columns ``start`` onwards.

    Args:
        codes_ptr: pointers ``[rows, 1]`` to rows of codes; scales_ptr: likewise, to rows of scale bytes.
        start: first column, a multiple of 32.
        live: mask ``[rows, COLS / 32]`` of the blocks to read; the others are 0.
    """
    ROWS: tl.constexpr = live.shape[0]
    BLOCKS: tl.constexpr = COLS // 32
    block = start // 32 + tl.arange(0, BLOCKS)[None, :]
    scale = scale_value(tl.load(scales_ptr + block, mask=live, other=0).to(tl.int32))
    PER_BLOCK: tl.constexpr = 16 if FP4 else 32
    WIDTH: tl.constexpr = BLOCKS * PER_BLOCK
    wide = tl.reshape(tl.broadcast_to(live[:, :, None], (ROWS, BLOCKS, PER_BLOCK)), (ROWS, WIDTH))
    at = start // 32 * PER_BLOCK + tl.arange(0, WIDTH)[None, :]
    codes = tl.load(codes_ptr + at, mask=wide, other=0)
    if FP4:
        codes = codes.to(tl.int32)
        values = tl.reshape(
            tl.join(e2m1_value(codes & 0xF), e2m1_value(codes >> 4)), (ROWS, BLOCKS, 32)
        )
    else:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        values = tl.reshape(values, (ROWS, BLOCKS, 32))
    return tl.reshape(values * scale[:, :, None], (ROWS, COLS))


@triton.jit(do_not_specialize=["rows"])
def _dequantize(
    codes_ptr,
    scales_ptr,
    out_ptr,
    rows,
    codes_stride,
    scales_stride,
    H: tl.constexpr,
    FP4: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    COL_TILES: tl.constexpr = (H + COLS - 1) // COLS
    row = tl.program_id(0) // COL_TILES * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    row = row.to(tl.int64)[:, None]
    start = tl.program_id(0) % COL_TILES * COLS
    live = inside & ((start // 32 + tl.arange(0, COLS // 32)) < H // 32)[None, :]
    values = decode(
        codes_ptr + row * codes_stride, scales_ptr + row * scales_stride, start, live, FP4, COLS
    )
    col = start + tl.arange(0, COLS)[None, :]
    values = values.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * H + col, values, mask=inside & (col < H))


def nan_makes_poison() -> bool:
    """Whether this GPU converts every NaN to e4m3's 0x7F (CUDA does; AMD keeps the sign)."""
    return torch.version.hip is None and not triton.knobs.runtime.interpret


def tile(hidden: int, fmt: Wire) -> dict[str, int]:
    """Tile of a row-wise kernel that makes rows in ``fmt``, and its warps, as keyword arguments of its launch."""
    elements, warps = _TILES[fmt]
    cols = max(BLOCK, min(1024, triton.next_power_of_2(hidden)))
    return {"ROWS": elements // cols, "COLS": cols, "num_warps": warps}


def tiles(rows: int, hidden: int, shape: dict[str, int]) -> int:
    """Tiles of that shape in ``[rows, hidden]``."""
    return triton.cdiv(rows, shape["ROWS"]) * triton.cdiv(hidden, shape["COLS"])


def quantize(x: torch.Tensor, fmt: Wire | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize blocks of 32 elements along the last axis.

    Args:
        x: bf16 or f32 ``[..., hidden]`` on a GPU, any strides, hidden a multiple of 32.
        fmt: ``"fp8"`` or ``"fp4"``, or the Wire of that name.

    Returns:
        codes: uint8 ``[..., hidden]``, or ``[..., hidden / 2]`` for fp4 with the even element in the low nibble.
        scales: uint8 ``[..., hidden / 32]``, e8m0.

    Raises:
        ValueError: another format, dtype or row width.
    """
    fmt = element_format(fmt)
    check_input(x)
    hidden = x.shape[-1]
    width = hidden // 2 if fmt is Wire.FP4 else hidden
    codes = torch.empty(*x.shape[:-1], width, dtype=torch.uint8, device=x.device)
    scales = torch.empty(*x.shape[:-1], hidden // BLOCK, dtype=torch.uint8, device=x.device)
    if x.dtype is torch.bfloat16:
        quantize_into(
            x.reshape(-1, hidden), fmt, codes.view(-1, width), scales.view(-1, hidden // BLOCK)
        )
    elif x.numel():
        blocks = x.numel() // BLOCK
        grid = (triton.cdiv(blocks, 32),)
        _quantize_f32[grid](x.contiguous(), codes, scales, blocks, FP4=fmt is Wire.FP4, BLOCKS=32)
    return codes, scales


def quantize_into(
    x: torch.Tensor,
    fmt: Wire | str,
    payload_out: torch.Tensor,
    scales_out: torch.Tensor,
    *,
    counts: torch.Tensor | None = None,
) -> None:
    """Quantize rows straight into wire rows: two column ranges of one buffer, or two tensors.

    Args:
        x: bf16 ``[T, H]``; a copy is made unless its rows are whole 32-bit words apart.
        fmt: element format.
        payload_out: uint8 ``[T, payload_bytes]``, any row stride, bytes of a row adjacent; 2-byte aligned for fp4.
        scales_out: uint8 ``[T, at least H / 32]``, likewise. Columns after the scales are left as they are.
        counts: int32 ``[n]`` on the GPU, or None. T is then n equal regions, and of region i only the first
            ``counts[i]`` rows are read and written.

    Raises:
        ValueError: another format or dtype, or shapes that do not belong together.
    """
    fmt = element_format(fmt)
    check_input(x)
    rows, hidden = x.shape
    width = hidden // 2 if fmt is Wire.FP4 else hidden
    if payload_out.shape != (rows, width) or scales_out.shape[0] != rows:
        raise ValueError(
            f"x {tuple(x.shape)} does not fit payload_out {tuple(payload_out.shape)} and scales_out "
            f"{tuple(scales_out.shape)}: {rows} rows of {width} and at least {hidden // BLOCK} bytes are needed."
        )
    if x.dtype is not torch.bfloat16:
        raise ValueError(
            f"cannot quantize rows of {x.dtype}: give bfloat16 (x.to(torch.bfloat16))."
        )
    if not rows:
        return
    if x.stride(1) != 1 or x.stride(0) % 2 or x.data_ptr() % 4:
        x = x.contiguous()
    strides = (x.stride(0) // 2, payload_out.stride(0), scales_out.stride(0))
    shape = tile(hidden, fmt)
    programs = tiles(rows, hidden, shape)
    shape |= {"H": hidden, "FP4": fmt is Wire.FP4, "NAN_MAKES_POISON": nan_makes_poison()}
    if counts is None:
        _quantize_bf16[(programs,)](
            x.view(torch.int32), payload_out, scales_out, rows, *strides, **shape
        )
        return
    regions = counts.numel()
    assert rows % regions == 0, f"{rows} rows in {regions} regions"
    _quantize_regions[(min(programs, _PROGRAMS),)](
        x.view(torch.int32),
        payload_out,
        scales_out,
        counts,
        regions,
        rows // regions,
        *strides,
        **shape,
    )


def dequantize(codes: torch.Tensor, scales: torch.Tensor, fmt: Wire | str) -> torch.Tensor:
    """Code times scale, in float32 ``[..., hidden]``.

    Args:
        codes: uint8 ``[..., hidden]``, or ``[..., hidden / 2]`` for fp4.
        scales: uint8 ``[..., hidden / 32]``.
        fmt: element format.

    Raises:
        ValueError: another format or dtype, or shapes that do not belong together.
    """
    return _dequantized(codes, scales, fmt, torch.float32)


def dequantize_to_bf16(codes: torch.Tensor, scales: torch.Tensor, fmt: Wire | str) -> torch.Tensor:
    """As :func:`dequantize`, in bf16; exact, since a code has at most four significant bits."""
    return _dequantized(codes, scales, fmt, torch.bfloat16)


def _dequantized(
    codes: torch.Tensor, scales: torch.Tensor, fmt: Wire | str, dtype: torch.dtype
) -> torch.Tensor:
    fmt = element_format(fmt)
    hidden = check_codes(codes, scales, fmt)
    out = torch.empty(*codes.shape[:-1], hidden, dtype=dtype, device=codes.device)
    rows = out.numel() // hidden if hidden else 0
    if rows:
        codes = codes.reshape(rows, codes.shape[-1])
        scales = scales.reshape(rows, scales.shape[-1])
        shape = tile(hidden, Wire.BF16)
        _dequantize[(tiles(rows, hidden, shape),)](
            codes,
            scales,
            out,
            rows,
            codes.stride(0),
            scales.stride(0),
            H=hidden,
            FP4=fmt is Wire.FP4,
            **shape,
        )
    return out
