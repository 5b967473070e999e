"""The layers that bench_mega_moe measures: geometry and wires of its command line, random tokens and experts."""

from __future__ import annotations

import argparse

import torch

from atom.moe.spec import ExpertWeights, MoEGeometry
from atom.wire.format import BLOCK, AOperand, Wire


def pairs(args: argparse.Namespace) -> list[tuple[AOperand, Wire]]:
    """A operands and the wires that fit each, bf16 first."""
    return [
        (operand, wire)
        for operand in args.a_operand
        for wire in (Wire.BF16, operand.wire)
        if wire in args.wires
    ]


def geometry(args: argparse.Namespace, tokens: int, rank: int = 0) -> MoEGeometry:
    """The layer of the command line for batches of ``tokens`` a rank."""
    return MoEGeometry(
        hidden=args.hidden,
        inter=args.inter,
        experts=args.experts,
        topk=args.topk,
        ep_size=args.ep,
        ep_rank=rank,
        max_tokens=tokens,
    )


def random_tokens(
    shape: MoEGeometry, tokens: int, device: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden states, topk weights and ids with uniform routing."""
    random = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tokens, shape.hidden, generator=random, device=device).bfloat16()
    scores = torch.rand(tokens, shape.experts, generator=random, device=device)
    weights, ids = scores.topk(shape.topk)
    return x, weights / weights.sum(1, keepdim=True), ids.int()


def random_weights(shape: MoEGeometry, device: torch.device, seed: int) -> ExpertWeights:
    """One rank's experts, random in MXFP4, of a size that keeps activations near one; rows of ``w1`` are in any order."""
    random = torch.Generator(device).manual_seed(seed)
    e, h, i = shape.local_experts, shape.hidden, shape.inter

    def draw(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=random, device=device, dtype=torch.uint8)

    def matrix(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        # The mean square of random e2m1 codes is about 8.
        scale = 127 - round((width.bit_length() - 1) / 2 + 1.5)
        return draw(0, 256, e, rows, width // 2), draw(scale, scale + 2, e, rows, width // BLOCK)

    w1, w1_scale = matrix(2 * i, h)
    w2, w2_scale = matrix(h, i)
    return ExpertWeights(w1=w1, w1_scale=w1_scale, w2=w2, w2_scale=w2_scale)
