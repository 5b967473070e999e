"""RMSNorm on a GPU in one kernel: float32 inside, rounded to bf16 at the same two places as transformers' six operations."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import nn

_ELEMENTS = 2048
"""Elements that a program normalizes, in whole rows."""


@triton.jit
def round_to_bf16(x):
    """A float32 rounded to bf16, ties to even, as float32. A conversion there and back is one that compilers leave out."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def rms_norm(
    x,
    weight,
    out,
    rows,
    EPSILON: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``weight * bf16(x * rsqrt(mean(x**2) + EPSILON))`` for ``ROWS`` contiguous rows of ``N``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    there = (row < rows)[:, None] & (column < N)[None, :]
    at = row[:, None] * N + column[None, :]
    value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / N + EPSILON)
    normed = round_to_bf16(value * scale[:, None])
    factor = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32)
    # The product of two bf16 is exact in float32, so this rounds once, as a bf16 product does.
    tl.store(out + at, (normed * factor[None, :]).to(out.dtype.element_ty), mask=there)


def forward_of(module: nn.Module, epsilon: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A forward for an RMSNorm module with a bf16 ``weight`` on a GPU; takes and gives bf16 of any leading shape."""
    weight = module.weight.detach()
    width = weight.shape[0]
    padded = triton.next_power_of_2(width)
    each = max(1, _ELEMENTS // padded)

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.contiguous()
        out = torch.empty_like(x)
        rows = x.numel() // width
        if rows:
            rms_norm[(triton.cdiv(rows, each),)](
                x,
                weight,
                out,
                rows,
                EPSILON=epsilon,
                N=width,
                WIDTH=padded,
                ROWS=each,
                num_warps=4,
            )
        return out

    return forward
