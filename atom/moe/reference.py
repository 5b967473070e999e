"""What a MoE layer computes, in plain torch on one process: the references that every backend is compared with.

- :func:`exact_layer`: float32, nothing quantized but the weights. Errors are given against it.
- :func:`quantized_layer`: the steps of "dispatch, expert GEMM, combine" as the backends take them, without ranks or rows.

Both take the whole layer's experts. Shape suffixes: T tokens, K topk, E experts of all ranks, H hidden, I inter, M rows of
one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import torch
from torch.nn.functional import silu

from atom.moe.experts import reorder_rows
from atom.moe.spec import Activation, ExpertRecipe, ExpertWeights, GateMode, MoEGeometry
from atom.wire import mx_reference
from atom.wire.format import BLOCK, AOperand, Wire

Activate = Callable[[torch.Tensor, torch.Tensor, ExpertRecipe], torch.Tensor]


def exact_layer(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: ExpertWeights,
    recipe: ExpertRecipe,
) -> torch.Tensor:
    """The layer in float32 with exact activations.

    Args:
        hidden_states: ``[T, H]``. topk_weights, topk_ids: ``[T, K]``.
        weights: all E experts, with ``w1`` in the order of ``recipe.gate_mode``.
        recipe: how experts are computed.

    Returns:
        float32 ``[T, H]``.
    """
    x = hidden_states.float()
    out = torch.zeros_like(x)
    for expert, tokens, choices in _by_expert(topk_ids):
        w1, b1, w2, b2 = _expert(weights, recipe, expert)
        gate, up = (x[tokens] @ w1.T + b1).chunk(2, dim=-1)
        y = activate(gate, up, recipe) @ w2.T + b2
        out.index_add_(0, tokens, y * topk_weights[tokens, choices, None].float())
    return out


def quantized_layer(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: ExpertWeights,
    geometry: MoEGeometry,
    recipe: ExpertRecipe,
    a_operand: AOperand,
    *,
    activation: Activate | None = None,
) -> torch.Tensor:
    """The layer as ``geometry.ep_size`` ranks compute it, on either wire.

    Each rank adds its experts' weighted outputs in float32, in ascending order of ids, and rounds the sum to bf16; these are
    added in float32 in rank order and rounded to bf16.

    Args:
        hidden_states: bf16 ``[T, H]``. topk_weights, topk_ids: ``[T, K]``.
        weights: all E experts, with ``w1`` in the order of ``recipe.gate_mode``.
        geometry: sizes; its ``ep_rank`` does not matter. recipe: how experts are computed.
        a_operand: format of the A operand.
        activation: what to use instead of :func:`activate`, for comparisons to the bit.

    Returns:
        bf16 ``[T, H]``.
    """
    fmt = a_operand.wire
    codes, scales = mx_reference.quantize(hidden_states, fmt)
    total = torch.zeros(hidden_states.shape, device=hidden_states.device)
    partial = torch.zeros_like(total)
    rank = 0
    for expert, tokens, choices in _by_expert(topk_ids):
        if expert // geometry.local_experts != rank:
            total += partial.bfloat16().float()
            partial.zero_()
            rank = expert // geometry.local_experts
        w1, b1, w2, b2 = _expert(weights, recipe, expert)
        gate_up = _block_product(codes[tokens], scales[tokens], fmt, w1) + b1
        inner = (activation or activate)(*gate_up.chunk(2, dim=-1), recipe)
        y = _block_product(*mx_reference.quantize(inner, fmt), fmt, w2) + b2
        partial.index_add_(0, tokens, topk_weights[tokens, choices, None] * y)
    return (total + partial.bfloat16().float()).bfloat16()


def activate(gate: torch.Tensor, up: torch.Tensor, recipe: ExpertRecipe) -> torch.Tensor:
    """The activation between the two projections: ``[M, I]`` twice to ``[M, I]``.

    As ``DeepseekV4Experts._apply_gate`` (``SILU``) and ``GptOssExperts._apply_gate`` (``SWIGLU``) of transformers.
    """
    if recipe.swiglu_limit > 0:
        gate = gate.clamp(max=recipe.swiglu_limit)
        up = up.clamp(-recipe.swiglu_limit, recipe.swiglu_limit)
    if recipe.activation is Activation.SWIGLU:
        return gate * torch.sigmoid(recipe.swiglu_alpha * gate) * (up + 1)
    return silu(gate) * up


def join_ranks(parts: Sequence[ExpertWeights]) -> ExpertWeights:
    """The ranks' local experts, in rank order, as one layer's."""
    names = [field.name for field in fields(ExpertWeights) if field.name != "prepared"]
    values = {name: [getattr(part, name) for part in parts] for name in names}
    return ExpertWeights(
        **{name: None if found[0] is None else torch.cat(found) for name, found in values.items()}
    )


def _by_expert(topk_ids: torch.Tensor):
    """Each expert that has tokens, in ascending order, with its tokens and which of their choices it is."""
    for expert in topk_ids.unique().tolist():
        yield expert, *torch.where(topk_ids == expert)


def _expert(weights: ExpertWeights, recipe: ExpertRecipe, expert: int):
    """One expert in float32: gate rows then up rows ``[2I, H]``, bias ``[2I]``, down ``[H, I]``, bias ``[H]``."""

    def dequantized(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return mx_reference.dequantize(codes[expert], scales[expert], Wire.FP4)

    def ordered(rows: torch.Tensor) -> torch.Tensor:
        return reorder_rows(rows.unsqueeze(0), recipe.gate_mode, GateMode.CONCAT).squeeze(0)

    w1 = ordered(dequantized(weights.w1, weights.w1_scale))
    w2 = dequantized(weights.w2, weights.w2_scale)
    if not recipe.bias:
        return w1, w1.new_zeros(len(w1)), w2, w2.new_zeros(len(w2))
    return w1, ordered(weights.bias1[expert]), w2, weights.bias2[expert]


def _block_product(
    codes: torch.Tensor, scales: torch.Tensor, fmt: Wire, weight: torch.Tensor
) -> torch.Tensor:
    """Quantized rows ``[M, K]`` times ``weight`` float32 ``[N, K]``: each MX block's dot product exact (in float64), then
    rounded to float32 and added to the blocks before it in float32."""
    x = mx_reference.dequantize(codes, scales, fmt).double().split(BLOCK, dim=-1)
    total = torch.zeros(len(codes), len(weight), device=weight.device)
    for x_block, w_block in zip(x, weight.double().split(BLOCK, dim=-1), strict=True):
        total += (x_block @ w_block.T).float()
    return total
