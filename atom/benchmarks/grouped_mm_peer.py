"""The expert layer as it is computed without this package's wire or weights: bf16 experts through ``torch``'s grouped_mm.

:mod:`~atom.benchmarks.grouped_mm_eager` does in torch operations what lies around the two matrix products;
:func:`fused_layer` does it in kernels as good as this package's own.

Shape legend: T tokens, K topk, E experts, H hidden, I intermediate, P = T * K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.moe import rows_triton
from atom.moe.experts_triton import columns
from atom.moe.plan_triton import plan_routing


def fused_layer(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """As :func:`~atom.benchmarks.grouped_mm_eager.eager_layer`."""
    (tokens, topk), hidden = topk_ids.shape, x.shape[1]
    plan = plan_routing(topk_ids, experts=len(gate_up), first_expert=0, tile_rows=128)
    rows = x.new_empty(tokens * topk, hidden)
    cols = columns(hidden)
    tiles = triton.cdiv(hidden, cols)
    _gather[(tokens * topk, tiles)](x, plan.order, rows, topk, H=hidden, COLS=cols)
    both = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=plan.offsets[1:])
    inner = silu_mul(both)
    y = torch._grouped_mm(inner, down.transpose(1, 2), offs=plan.offsets[1:])
    out = torch.empty_like(x)
    rows_triton.combine[(tokens, tiles)](
        y, plan.position, topk_weights, out, K=topk, H=hidden, COLS=cols
    )
    return out


def silu_mul(both: torch.Tensor) -> torch.Tensor:
    """bf16 ``[P, I]`` of bf16 ``[P, 2I]``, gate columns first."""
    rows, inter = both.shape[0], both.shape[1] // 2
    inner = both.new_empty(rows, inter)
    cols = columns(inter)
    _silu_mul[(rows, triton.cdiv(inter, cols))](both, inner, I=inter, COLS=cols)
    return inner


@triton.jit
def _gather(x_ptr, order_ptr, out_ptr, topk, H: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    token = (tl.load(order_ptr + row) // topk).to(tl.int64)
    x = tl.load(x_ptr + token * H + col, mask=col < H)
    tl.store(out_ptr + row * H + col, x, mask=col < H)


@triton.jit
def _silu_mul(both_ptr, out_ptr, I: tl.constexpr, COLS: tl.constexpr):  # noqa: E741
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    gate = tl.load(both_ptr + row * (2 * I) + col, mask=col < I).to(tl.float32)
    up = tl.load(both_ptr + row * (2 * I) + I + col, mask=col < I).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * I + col, value.to(tl.bfloat16), mask=col < I)
