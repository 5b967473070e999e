"""Layers for the GPU's tests, made where they are used."""

from __future__ import annotations

import torch

from atom.moe.spec import ExpertRecipe, ExpertWeights, GateMode, MoEGeometry
from atom.wire import mx_reference
from atom.wire.format import BLOCK, AOperand, Wire, WireChoice


def geometry(
    hidden: int = 512,
    inter: int = 256,
    experts: int = 16,
    topk: int = 4,
    ranks: int = 1,
    max_tokens: int = 512,
) -> MoEGeometry:
    return MoEGeometry(
        hidden=hidden,
        inter=inter,
        experts=experts,
        topk=topk,
        ep_size=ranks,
        ep_rank=0,
        max_tokens=max_tokens,
    )


def choice(wire: Wire, operand: AOperand) -> WireChoice:
    return WireChoice(wire=wire, a_operand=operand, wire_found="", a_operand_found="")


def random_experts(
    shape: MoEGeometry, recipe: ExpertRecipe, device: torch.device, seed: int = 0
) -> ExpertWeights:
    """All experts of a layer, random in MXFP4."""
    random = torch.Generator(device).manual_seed(seed)
    e, h, i = shape.experts, shape.hidden, shape.inter

    def quantized(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.randn(e, rows, width, generator=random, device=device) / width**0.5
        weights *= 2.0 ** torch.randint(-2, 3, (e, rows, 1), generator=random, device=device)
        return mx_reference.quantize(weights, Wire.FP4)

    def bias(width: int) -> torch.Tensor | None:
        if not recipe.bias:
            return None
        return torch.randn(e, width, generator=random, device=device) / 2

    w1, w1_scale = quantized(2 * i, h)
    w2, w2_scale = quantized(h, i)
    assert w1_scale.shape[2] * BLOCK == h
    return ExpertWeights(
        w1=w1, w1_scale=w1_scale, w2=w2, w2_scale=w2_scale, bias1=bias(2 * i), bias2=bias(h)
    )


def of_rank(weights: ExpertWeights, shape: MoEGeometry, rank: int) -> ExpertWeights:
    """One rank's experts."""
    mine = slice(rank * shape.local_experts, (rank + 1) * shape.local_experts)
    names = ("w1", "w1_scale", "w2", "w2_scale", "bias1", "bias2")
    found = {name: getattr(weights, name) for name in names}
    return ExpertWeights(**{name: None if v is None else v[mine] for name, v in found.items()})


def random_tokens(
    shape: MoEGeometry, count: int, device: torch.device, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden_states bf16 ``[T, H]``, topk_weights f32 ``[T, K]``, topk_ids int32 ``[T, K]`` with distinct ids."""
    random = torch.Generator(device).manual_seed(seed)
    x = torch.randn(count, shape.hidden, generator=random, device=device)
    x *= 2.0 ** torch.randint(-4, 4, x.shape, generator=random, device=device)
    weights = torch.rand(count, shape.topk, generator=random, device=device)
    ids = torch.rand(count, shape.experts, generator=random, device=device).argsort(dim=1)
    return x.bfloat16(), weights, ids[:, : shape.topk].int().contiguous()


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """‖found - wanted‖ / ‖wanted‖ in float64."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


BIASED = ExpertRecipe(gate_mode=GateMode.INTERLEAVE, swiglu_limit=0.75, bias=True)
