"""Rotary position embedding of queries and keys on a GPU in one kernel.

transformers writes it as ten tensor operations on tensors as large as the queries. This is the same computation, rounded to
bf16 at the same places.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

from atom.engine.norms_triton import round_to_bf16

_FUNCTION = "apply_rotary_pos_emb"


@triton.jit
def _rotate(
    x, out, head_stride, cos, sin, HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr
):
    """One token's heads ``[HEADS, D]``: ``x * cos + rotate_half(x) * sin``; x's heads lie ``head_stride`` apart."""
    HALF: tl.constexpr = D // 2
    head, d = tl.arange(0, ROWS), tl.arange(0, HALF)
    there = (head < HEADS)[:, None] & (d >= 0)[None, :]
    first = tl.load(x + head[:, None] * head_stride + d[None, :], mask=there, other=0.0)
    second = tl.load(x + head[:, None] * head_stride + HALF + d[None, :], mask=there, other=0.0)
    first, second = first.to(tl.float32), second.to(tl.float32)
    dtype = out.dtype.element_ty
    for half in tl.static_range(2):
        c = tl.load(cos + half * HALF + d).to(tl.float32)[None, :]
        s = tl.load(sin + half * HALF + d).to(tl.float32)[None, :]
        if half == 0:
            kept, turned = first * c, -second * s
        else:
            kept, turned = second * c, first * s
        total = round_to_bf16(kept) + round_to_bf16(turned)
        at = out + head[:, None] * D + half * HALF + d[None, :]
        tl.store(at, total.to(dtype), mask=there)


@triton.jit
def rotate_heads(
    query,
    key,
    cos,
    sin,
    query_out,
    key_out,
    query_head,
    query_token,
    key_head,
    key_token,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KV_ROWS: tl.constexpr,
    D: tl.constexpr,
):
    """All query and key heads of one token; outputs are contiguous ``[token, head, D]``."""
    token = tl.program_id(0).to(tl.int64)
    cos, sin = cos + token * D, sin + token * D
    out = query_out + token * (HEADS * D)
    _rotate(query + token * query_token, out, query_head, cos, sin, HEADS, ROWS, D)
    out = key_out + token * (KV_HEADS * D)
    _rotate(key + token * key_token, out, key_head, cos, sin, KV_HEADS, KV_ROWS, D)


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the heads of one sequence of tokens.

    Args:
        query: bf16 ``[1, G, T, D]``, D a power of two. key: bf16 ``[1, H, T, D]``.
        cos, sin: bf16 ``[1, T, D]``, contiguous.

    Returns:
        Both rotated, of the same shapes, each token's heads side by side in memory.
    """
    _, heads, tokens, size = query.shape
    kv_heads = key.shape[1]
    outs = [
        torch.empty(1, tokens, count, size, dtype=query.dtype, device=query.device)
        for count in (heads, kv_heads)
    ]
    if tokens:
        rotate_heads[(tokens,)](
            *(query, key, cos, sin, *outs),
            *(query.stride(1), query.stride(2), key.stride(1), key.stride(2)),
            HEADS=heads,
            KV_HEADS=kv_heads,
            ROWS=triton.next_power_of_2(heads),
            KV_ROWS=triton.next_power_of_2(kv_heads),
            D=size,
            num_warps=4,
        )
    query_out, key_out = (out.transpose(1, 2) for out in outs)
    return query_out, key_out


def _fits(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    size = q.shape[-1]
    return (
        all(t.is_cuda and t.dtype == torch.bfloat16 for t in (q, k, cos, sin))
        and q.dim() == k.dim() == 4
        and q.shape[0] == 1
        and k.shape[-1] == size == triton.next_power_of_2(size)
        and q.stride(3) == k.stride(3) == 1
        and cos.shape == sin.shape == (1, q.shape[2], size)
        and cos.is_contiguous()
        and sin.is_contiguous()
    )


def _fused(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_rotary_pos_emb(q, k, cos, sin, *args, **kwargs):
        if args or kwargs or not _fits(q, k, cos, sin):
            return original(q, k, cos, sin, *args, **kwargs)
        return rotate(q, k, cos, sin)

    apply_rotary_pos_emb.original = original
    return apply_rotary_pos_emb


def use_fused_rotary(model: nn.Module) -> bool:
    """Let the model's attention layers rotate in one kernel, if that gives what their own function gives.

    The function is looked up in the module that defines the model, so it is replaced there, for inputs that fit; it is
    compared on random ones first.

    Returns:
        Whether it was replaced, now or earlier.
    """
    if model.device.type != "cuda" or model.dtype != torch.bfloat16:
        return False
    module: ModuleType = sys.modules[type(model).__module__]
    original = getattr(module, _FUNCTION, None)
    if original is None or hasattr(original, "original"):
        return original is not None
    generator = torch.Generator(model.device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=model.device).bfloat16()

    q, k = draw(1, 3, 4, 64).transpose(1, 2), draw(1, 3, 2, 64).transpose(1, 2)
    cos, sin = draw(1, 3, 64), draw(1, 3, 64)
    try:
        expected = original(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError):
        return False
    found = rotate(q, k, cos, sin)
    same = isinstance(expected, tuple) and all(
        a.shape == b.shape and torch.allclose(a.float(), b.float(), atol=1e-30, rtol=2**-7)
        for a, b in zip(found, expected, strict=True)
    )
    if same:
        setattr(module, _FUNCTION, _fused(original))
    return same
