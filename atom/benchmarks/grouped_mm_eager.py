"""The expert layer with bf16 experts through ``torch``'s grouped_mm, as transformers' ``grouped_mm_experts_forward`` does it.

Shape legend: T tokens, K topk, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import torch


def eager_layer(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """bf16 ``[T, H]``.

    Args:
        x: bf16 ``[T, H]``. topk_weights: f32 ``[T, K]``. topk_ids: int32 ``[T, K]``.
        gate_up: bf16 ``[E, 2I, H]``, gate rows first. down: bf16 ``[E, H, I]``.
    """
    tokens, topk = topk_ids.shape
    ids, order = topk_ids.flatten().sort()
    back = order.argsort()
    counts = torch.histc(ids.float(), bins=len(gate_up), min=0, max=len(gate_up) - 1)
    offsets = counts.cumsum(0).to(torch.int32)
    rows = x[order // topk]
    gate, up = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=offsets).chunk(2, dim=-1)
    inner = torch.nn.functional.silu(gate) * up
    y = torch._grouped_mm(inner, down.transpose(1, 2), offs=offsets)
    y = y * topk_weights.flatten()[order][:, None].to(y.dtype)
    return y[back].view(tokens, topk, -1).sum(1).to(x.dtype)
