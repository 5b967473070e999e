"""Layers for tests: random experts, activations to the bit, and routings of every kind."""

from __future__ import annotations

import numpy as np
import torch

from atom.moe import experts_kernel as kernel
from atom.moe.experts import quantize_experts
from atom.moe.spec import Activation, ExpertRecipe, ExpertWeights, GateMode, MoEGeometry


def geometry(
    hidden: int = 96,
    inter: int = 64,
    experts: int = 16,
    topk: int = 4,
    ranks: int = 1,
    rank: int = 0,
    max_tokens: int = 64,
) -> MoEGeometry:
    """A small geometry; by default a row has three scale bytes, which do not fill a 32-bit word."""
    return MoEGeometry(
        hidden=hidden,
        inter=inter,
        experts=experts,
        topk=topk,
        ep_size=ranks,
        ep_rank=rank,
        max_tokens=max_tokens,
    )


RECIPES = {
    "silu": ExpertRecipe(gate_mode=GateMode.CONCAT),
    "silu, clamped, biased": ExpertRecipe(
        gate_mode=GateMode.INTERLEAVE, swiglu_limit=0.75, bias=True
    ),
    "swiglu, clamped, biased": ExpertRecipe(
        gate_mode=GateMode.INTERLEAVE, activation=Activation.SWIGLU, swiglu_limit=0.75, bias=True
    ),
    "swiglu": ExpertRecipe(
        gate_mode=GateMode.CONCAT, activation=Activation.SWIGLU, swiglu_alpha=1.25
    ),
}
"""Each gate order, each activation, with and without a clamp and biases."""


def random_experts(shape: MoEGeometry, recipe: ExpertRecipe, seed: int) -> ExpertWeights:
    """All experts of a layer, the same for every rank."""
    random = torch.Generator().manual_seed(seed)
    e, h, i = shape.experts, shape.hidden, shape.inter

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random)

    return quantize_experts(
        normal(e, 2 * i, h) / h**0.5,
        normal(e, h, i) / i**0.5,
        layout=GateMode.CONCAT,
        gate_mode=recipe.gate_mode,
        bias1=normal(e, 2 * i) / 2 if recipe.bias else None,
        bias2=normal(e, h) / 2 if recipe.bias else None,
    )


def random_tokens(
    shape: MoEGeometry, count: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden_states bf16 ``[T, H]``, topk_weights f32 ``[T, K]``, topk_ids int32 ``[T, K]`` with distinct ids."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, shape.hidden, generator=random)
    x *= 2.0 ** torch.randint(-4, 4, x.shape, generator=random)
    weights = torch.rand(count, shape.topk, generator=random)
    ids = torch.rand(count, shape.experts, generator=random).argsort(dim=1)[:, : shape.topk]
    return x.bfloat16(), weights, ids.int()


def kernel_activation(gate: torch.Tensor, up: torch.Tensor, recipe: ExpertRecipe) -> torch.Tensor:
    """The CPU kernel's own activation, ``[M, I]`` twice to ``[M, I]``: its exponential is not torch's to the last bit."""
    layer = np.zeros(1, kernel.LAYER)
    swiglu = recipe.activation is Activation.SWIGLU
    layer["slope"] = recipe.swiglu_alpha if swiglu else 1
    layer["offset"] = swiglu
    layer["limit"] = recipe.swiglu_limit or np.inf
    pairs = torch.stack((gate, up), dim=1).numpy()
    out = np.empty(gate.shape, np.float32)
    for row, active in zip(pairs, out, strict=True):
        kernel._activate(layer[0], row, np.zeros_like(row), active)
    return torch.from_numpy(out)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """‖found - wanted‖ / ‖wanted‖ in float64."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
