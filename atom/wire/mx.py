"""MX quantization on the CPU: the rules of :mod:`atom.wire.mx_reference`, bit for bit, at memory speed.

``fmt`` is ``"fp8"`` (e4m3fn) or ``"fp4"`` (e2m1, two codes a byte, the even element in the low nibble), as a string or
a :class:`~atom.wire.format.Wire`. A scale is one e8m0 byte for each 32 elements. Tensors are CPU tensors of any strides;
rows whose elements are adjacent are read where they are, anything else is copied first.

Everything here runs on the calling thread, without the GIL while it computes.
"""

from __future__ import annotations

import torch

from atom.wire import mx_kernels as kernels
from atom.wire.format import BLOCK, Wire
from atom.wire.mx_reference import check_codes, check_input, element_format

__all__ = [
    "dequantize",
    "dequantize_to_bf16",
    "fake_quantize",
    "quantize",
    "quantize_into",
    "warmup",
]

# Strings and Wire members hash alike, so either finds its entry.
_SELECTOR = {
    (torch.bfloat16, Wire.FP8): kernels.BF16_FP8,
    (torch.bfloat16, Wire.FP4): kernels.BF16_FP4,
    (torch.float32, Wire.FP8): kernels.F32_FP8,
    (torch.float32, Wire.FP4): kernels.F32_FP4,
}
_CODE_BYTES = {Wire.FP8: BLOCK, Wire.FP4: BLOCK // 2}


def quantize(x: torch.Tensor, fmt: Wire | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize blocks of 32 elements along the last axis.

    Args:
        x: bf16 or f32 ``[..., hidden]``, hidden a multiple of 32.
        fmt: element format.

    Returns:
        codes: uint8 ``[..., hidden]``, or ``[..., hidden / 2]`` for fp4.
        scales: uint8 ``[..., hidden / 32]``.

    Raises:
        ValueError: another format, dtype or row width, or a tensor that is not on the CPU.
    """
    selector = _select_input(x, fmt)
    rows = _rows(x)
    count, hidden = rows.shape
    blocks, code_bytes = hidden // BLOCK, _CODE_BYTES[fmt]
    leading = x.shape[:-1]
    codes = torch.empty((*leading, blocks * code_bytes), dtype=torch.uint8)
    scales = torch.empty((*leading, blocks), dtype=torch.uint8)
    item = rows.element_size()
    kernels.quantize_rows(
        selector,
        rows.data_ptr(),
        rows.stride(0) * item,
        BLOCK * item,
        count,
        blocks,
        codes.data_ptr(),
        blocks * code_bytes,
        code_bytes,
        scales.data_ptr(),
        blocks,
        blocks,
    )
    return codes, scales


def quantize_at(
    fmt: Wire | str, source: int, stride: int, rows: int, hidden: int, codes: int, scales: int
) -> None:
    """:func:`quantize` of bf16 rows at an address, ``stride`` bytes apart, to contiguous codes and scales at two others."""
    blocks, code_bytes = hidden // BLOCK, _CODE_BYTES[fmt]
    kernels.quantize_rows(
        _SELECTOR[torch.bfloat16, fmt],
        source,
        stride,
        2 * BLOCK,
        rows,
        blocks,
        codes,
        blocks * code_bytes,
        code_bytes,
        scales,
        blocks,
        blocks,
    )


def quantize_into(
    x: torch.Tensor,
    fmt: Wire | str,
    payload_out: torch.Tensor,
    scales_out: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
) -> None:
    """Quantize rows straight into a send buffer, for instance into two column ranges of packed wire rows.

    With ``rows``, out row ``i`` is token ``rows[i]``. A token that is named several times, because it goes to several
    ranks, is quantized once and its bytes are copied.

    Args:
        x: bf16 or f32 ``[tokens, hidden]``.
        fmt: element format.
        payload_out: uint8 ``[n, payload_bytes]``, any row stride, bytes of a row adjacent; n is tokens, or
            ``len(rows)``. It must not overlap ``x`` or ``scales_out``.
        scales_out: uint8 ``[n, at least hidden / 32]``, likewise; columns after the scales are set to zero.
        rows: int32 or int64 ``[n]`` row numbers of ``x``.

    Raises:
        ValueError: shapes, dtypes or strides other than these, or a row number that ``x`` does not have (nothing is
            written then).
    """
    selector = _select_input(x, fmt)
    if x.dim() != 2:
        raise ValueError(
            f"x has shape {tuple(x.shape)}: give [tokens, hidden] (x.flatten(end_dim=-2))."
        )
    source = _rows(x)
    count, hidden = source.shape
    blocks, code_bytes = hidden // BLOCK, _CODE_BYTES[fmt]
    out_count = count if rows is None else rows.numel()
    _check_out("payload_out", payload_out, out_count, blocks * code_bytes, exact=True)
    _check_out("scales_out", scales_out, out_count, blocks, exact=False)
    item = source.element_size()
    out = (
        blocks,
        payload_out.data_ptr(),
        payload_out.stride(0),
        code_bytes,
        scales_out.data_ptr(),
        scales_out.stride(0),
        scales_out.shape[1],
    )
    read = (selector, source.data_ptr(), source.stride(0) * item, BLOCK * item)
    if rows is None:
        kernels.quantize_rows(*read, count, *out)
        return
    if rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"rows is {rows.dtype} of shape {tuple(rows.shape)}: give int32 or int64 row numbers [n]."
        )
    index = rows.to(torch.int64).contiguous().numpy()
    bad = kernels.quantize_gathered_rows(*read, index, count, *out)
    if bad >= 0:
        raise ValueError(f"rows[{bad}] is {index[bad]}, but x has rows 0 to {count - 1}.")


def dequantize(codes: torch.Tensor, scales: torch.Tensor, fmt: Wire | str) -> torch.Tensor:
    """Code times scale, in float32: exact, except that a magnitude that was rounded up to 2^128 is infinite.

    Args:
        codes: uint8 ``[..., hidden]``, or ``[..., hidden / 2]`` for fp4.
        scales: uint8 ``[..., hidden / 32]``.
        fmt: element format.

    Returns:
        float32 ``[..., hidden]``; NaN throughout a block whose scale byte is 255.

    Raises:
        ValueError: another format or dtype, shapes that do not belong together, or a tensor that is not on the CPU.
    """
    return _dequantize(codes, scales, fmt, torch.float32)


def dequantize_to_bf16(codes: torch.Tensor, scales: torch.Tensor, fmt: Wire | str) -> torch.Tensor:
    """:func:`dequantize`, in bf16 ``[..., hidden]``: what a bf16 GEMM with f32 accumulation reads.

    An element has at most 4 significant bits and bf16 holds 8 over float32's exponent range, so nothing is lost above
    bf16's subnormal step, 2^-133. Below it are only e4m3 subnormals under scale bytes 0 to 2; those round to nearest
    even, and bf16 input never quantizes to one that needs it. At the top, 2^128 is infinite as in float32.
    """
    return _dequantize(codes, scales, fmt, torch.bfloat16)


def fake_quantize(x: torch.Tensor, fmt: Wire | str) -> torch.Tensor:
    """``dequantize_to_bf16(*quantize(x, fmt), fmt)`` in one pass: bf16 or f32 ``[..., hidden]`` to bf16, same shape.

    Raises:
        ValueError: as :func:`quantize`.
    """
    selector = _select_input(x, fmt)
    rows = _rows(x)
    count, hidden = rows.shape
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    item = rows.element_size()
    kernels.fake_quantize_rows(
        selector,
        rows.data_ptr(),
        rows.stride(0) * item,
        BLOCK * item,
        count,
        hidden // BLOCK,
        out.data_ptr(),
        hidden * 2,
    )
    return out


def warmup() -> None:
    """Compile every kernel, or load it from numba's cache, so that the first token does not pay for it."""
    x = torch.zeros(1, BLOCK, dtype=torch.bfloat16)
    codes, scales = quantize(x, Wire.FP8)
    quantize_into(x, Wire.FP8, codes, scales, rows=torch.zeros(1, dtype=torch.int64))
    dequantize(codes, scales, Wire.FP8)
    fake_quantize(x, Wire.FP8)


def _select_input(x: torch.Tensor, fmt: Wire | str) -> int:
    """The kernels' selector for this input, after the checks that :func:`quantize` promises."""
    selector = _SELECTOR.get((x.dtype, fmt))
    if selector is None or not x.is_cpu or x.dim() == 0 or x.shape[-1] % BLOCK or not x.shape[-1]:
        element_format(fmt)
        check_input(x)
        _refuse_device(x)
    return selector


def _refuse_device(x: torch.Tensor) -> None:
    raise ValueError(
        f"a tensor is on {x.device}: these are the CPU kernels (x.cpu(), or the kernels for that device)."
    )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` as ``[rows, hidden]`` with adjacent elements, in place if its strides allow that."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _check_out(name: str, out: torch.Tensor, count: int, width: int, *, exact: bool) -> None:
    """Refuse an output that the kernels cannot write to."""
    fits = (
        out.dim() == 2
        and out.shape[0] == count
        and (out.shape[1] == width if exact else out.shape[1] >= width)
        and out.dtype is torch.uint8
        and out.is_cpu
    )
    if not fits or out.stride(1) != 1 or (count > 1 and out.stride(0) < out.shape[1]):
        raise ValueError(
            f"{name} is {out.dtype} {tuple(out.shape)} with strides {out.stride()} on {out.device}: give a CPU uint8 "
            f"view [{count}, {'' if exact else 'at least '}{width}] whose rows are adjacent bytes and do not overlap."
        )


def _dequantize(
    codes: torch.Tensor, scales: torch.Tensor, fmt: Wire | str, dtype: torch.dtype
) -> torch.Tensor:
    fmt = element_format(fmt)
    hidden = check_codes(codes, scales, fmt)
    for tensor in (codes, scales):
        if not tensor.is_cpu:
            _refuse_device(tensor)
    code_rows, scale_rows = _rows(codes), _rows(scales)
    out = torch.empty((*codes.shape[:-1], hidden), dtype=dtype)
    item = out.element_size()
    kernels.dequantize_rows(
        _SELECTOR[dtype, fmt],
        code_rows.data_ptr(),
        code_rows.stride(0),
        _CODE_BYTES[fmt],
        scale_rows.data_ptr(),
        scale_rows.stride(0),
        code_rows.shape[0],
        hidden // BLOCK,
        out.data_ptr(),
        hidden * item,
        BLOCK * item,
    )
    return out
