"""MX quantization in plain torch: slow, on any device, and written so that each rule can be checked against its source.

:mod:`atom.wire.mx` (CPU) and the GPU kernels are compared with this module byte for byte.

The rules, for each block of 32 elements along the last axis (OCP Microscaling Formats v1.0, sections 5.1 to 6.3;
scale rounding as NVIDIA's ROUND_UP, torchao's RCEIL and aiter's RoundUp):

- ``amax`` is the largest magnitude. The e8m0 scale is the smallest power of two not below ``amax / max_pos``, with
  ``max_pos`` 6 for e2m1 and 448 for e4m3; its byte is the exponent plus 127. A block that is not all zero gets at
  least byte 1 (2^-126), so that scales and their reciprocals are normal float32 numbers.
- ``amax`` 0: scale byte 0.
- ``amax`` NaN or infinite: scale byte 255, which makes all 32 elements NaN. The codes say nothing then; all are
  :data:`POISON_CODE`, the ones that aiter's formulas give, so that a row is a function of its input.
- An element is ``x / scale`` (exact: a power of two), rounded to nearest, ties to even. The scale rule leaves nothing
  above ``max_pos``. Zero keeps its sign, and so does what rounds to zero.
"""

from __future__ import annotations

from enum import Enum

import torch

from atom.wire.format import BLOCK, Wire

MAX_POS: dict[str, float] = {Wire.FP8: 448.0, Wire.FP4: 6.0}
"""Largest finite magnitude of an element: e4m3fn and e2m1 (OCP MX v1.0, tables 1 and 5)."""

POISON_CODE: dict[str, int] = {Wire.FP8: 0x7F, Wire.FP4: 0x3}
"""Element code throughout a block that holds a NaN or an infinity."""

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantize(x: torch.Tensor, fmt: Wire | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize blocks of 32 elements along the last axis.

    Args:
        x: bf16 or f32 ``[..., hidden]``, hidden a multiple of 32, any strides, any device.
        fmt: ``"fp8"`` (e4m3fn) or ``"fp4"`` (e2m1), or the :class:`Wire` of that name.

    Returns:
        codes: uint8 ``[..., hidden]``, or ``[..., hidden / 2]`` for fp4 with the even element in the low nibble.
        scales: uint8 ``[..., hidden / 32]``, e8m0.

    Raises:
        ValueError: another format, dtype or row width.
    """
    fmt = element_format(fmt)
    check_input(x)
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    amax = blocks.abs().amax(dim=-1)
    scales = _scale_bytes(amax, fmt)
    scaled = blocks / _scale_values(scales).unsqueeze(-1)
    codes = _e4m3_codes(scaled) if fmt is Wire.FP8 else _e2m1_codes(scaled)
    codes = torch.where((scales == 0xFF).unsqueeze(-1), POISON_CODE[fmt], codes)
    codes = codes.to(torch.uint8).reshape(x.shape)
    if fmt is Wire.FP4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return codes, scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, fmt: Wire | str) -> torch.Tensor:
    """Undo :func:`quantize`: code times scale, in float32.

    Every product is exact, with one exception at the top of the range: a magnitude that was rounded up to 2^128
    comes back as infinity, since float32 ends below it.

    Args:
        codes: uint8 ``[..., hidden]``, or ``[..., hidden / 2]`` for fp4.
        scales: uint8 ``[..., hidden / 32]``.
        fmt: as in :func:`quantize`.

    Returns:
        float32 ``[..., hidden]``; NaN throughout a block whose scale byte is 255.

    Raises:
        ValueError: another format or dtype, or shapes that do not belong together.
    """
    fmt = element_format(fmt)
    hidden = check_codes(codes, scales, fmt)
    if fmt is Wire.FP8:
        values = codes.view(torch.float8_e4m3fn).float()
    else:
        nibbles = torch.stack((codes & 0xF, codes >> 4), dim=-1).reshape(*codes.shape[:-1], hidden)
        table = torch.tensor(
            [*_E2M1_MAGNITUDES, *(-m for m in _E2M1_MAGNITUDES)], device=codes.device
        )
        values = table[nibbles.long()]
    blocks = values.reshape(*scales.shape, BLOCK)
    return (blocks * _scale_values(scales).unsqueeze(-1)).reshape(*codes.shape[:-1], hidden)


def element_format(fmt: Wire | str) -> Wire:
    """The quantizing Wire that ``fmt`` names.

    Raises:
        ValueError: it names none.
    """
    name = fmt.value if isinstance(fmt, Enum) else fmt
    if name not in MAX_POS:
        raise ValueError(f"{fmt!r} is not an MX element format: use 'fp8' (e4m3) or 'fp4' (e2m1).")
    return Wire(name)


def check_input(x: torch.Tensor) -> None:
    """Refuse a tensor that :func:`quantize` cannot take.

    Raises:
        ValueError: not bf16 or f32, or a last axis that is absent, empty or not whole blocks of 32.
    """
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"cannot quantize {x.dtype}: give bfloat16 or float32 (x.to(torch.bfloat16))."
        )
    if x.dim() == 0 or not x.shape[-1] or x.shape[-1] % BLOCK:
        raise ValueError(
            f"a row of shape {tuple(x.shape)} is not whole MX blocks: the last axis must be a multiple of {BLOCK}. "
            f"Pad it with zeros, or use the bf16 wire."
        )


def check_codes(codes: torch.Tensor, scales: torch.Tensor, fmt: Wire) -> int:
    """Refuse codes and scales that do not belong together; return hidden.

    Raises:
        ValueError: a dtype other than uint8, or shapes other than those :func:`quantize` returns.
    """
    if codes.dtype is not torch.uint8 or scales.dtype is not torch.uint8:
        raise ValueError(
            f"codes are {codes.dtype} and scales {scales.dtype}: both must be uint8 (.view(torch.uint8))."
        )
    hidden = codes.shape[-1] * (2 if fmt is Wire.FP4 else 1) if codes.dim() else 0
    if not hidden or scales.shape != (*codes.shape[:-1], hidden // BLOCK) or hidden % BLOCK:
        raise ValueError(
            f"{fmt} codes {tuple(codes.shape)} and scales {tuple(scales.shape)} do not belong together: "
            f"there must be one scale byte for each {BLOCK} elements."
        )
    return hidden


def _scale_bytes(amax: torch.Tensor, fmt: Wire) -> torch.Tensor:
    """e8m0 bytes of the smallest power of two not below ``amax / max_pos`` (f32 ``[...]`` to uint8 ``[...]``).

    With ``max_pos = m * 2^e`` and ``1 <= m < 2``, the quotient's exponent is amax's less ``e``, and one more where
    amax's mantissa is above ``m``: no division, hence no rounding.
    """
    bits = amax.view(torch.int32)
    max_bits = int(torch.tensor(MAX_POS[fmt]).view(torch.int32))
    exponent = (bits >> 23) - ((max_bits >> 23) - 127)
    exponent = exponent + ((bits & 0x7FFFFF) > (max_bits & 0x7FFFFF))
    exponent = exponent.clamp(min=1)
    exponent = torch.where(bits == 0, 0, exponent)
    return torch.where(bits >= 0x7F800000, 0xFF, exponent).to(torch.uint8)


def _scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Float32 values of e8m0 bytes: 2^(byte - 127), and NaN for 255."""
    bits = scales.to(torch.int32) << 23
    bits = torch.where(scales == 0, 0x00400000, bits)
    return torch.where(scales == 0xFF, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def _e4m3_codes(scaled: torch.Tensor) -> torch.Tensor:
    """e4m3fn codes (int32) of float32 values of magnitude at most 448."""
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32)


def _e2m1_codes(scaled: torch.Tensor) -> torch.Tensor:
    """e2m1 codes (int32) of float32 values of magnitude at most 6: count the midpoints passed.

    A value on a midpoint goes to the neighbour with the even code, hence > and >= in turn.
    """
    m = scaled.abs()
    passed = (m > 0.25, m >= 0.75, m > 1.25, m >= 1.75, m > 2.5, m >= 3.5, m > 5.0)
    magnitude = torch.stack(passed).sum(dim=0, dtype=torch.int32)
    return magnitude | (torch.signbit(scaled).to(torch.int32) << 3)
