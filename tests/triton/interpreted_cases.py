"""The GPU kernels run by Triton's interpreter, on any machine. Collected by test_interpreter.py in a process of its own,
since kernels learn at import whether they are interpreted.

The interpreter cuts float32 off where a GPU rounds to bf16, so sums are compared before that last step.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atom.moe.expert_tiles import DENSE_TILES, UNPACK_TILES, Way
from atom.moe.experts_triton import TritonExperts
from atom.moe.plan_triton import plan_routing
from atom.moe.reference import quantized_layer
from atom.moe.symmetric import VirtualRanks
from atom.wire import mx, mx_reference, mx_triton
from atom.wire.format import AOperand, Wire, WireChoice
from tests.moe.layers import RECIPES, geometry, random_experts, random_tokens, relative_error
from tests.wire.test_mx import random_rows

ELEMENTS = pytest.mark.parametrize("fmt", ["fp8", "fp4"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
OPERANDS = pytest.mark.parametrize("operand", list(AOperand))
VECTORS = Path(__file__).parent.parent / "data" / "mx_vectors.safetensors"
CPU = torch.device("cpu")
TRUNCATED = 2.0**-7
"""A step of bf16, relative."""


@ELEMENTS
@DTYPES
def test_quantized_bytes(fmt, dtype):
    vectors = load_file(VECTORS)
    codes, scales = mx_triton.quantize(vectors["x"].to(dtype), fmt)
    assert torch.equal(codes, vectors[f"{fmt}_codes"])
    assert torch.equal(scales, vectors[f"{fmt}_scales"])
    for kind in ("any", "near", "tie"):
        x = random_rows(kind, dtype)[:: 64 if dtype is torch.float32 else 16]
        codes, scales = mx_triton.quantize(x, fmt)
        wanted = mx.quantize(x, fmt)
        assert torch.equal(codes, wanted[0]) and torch.equal(scales, wanted[1])
        found, wanted = mx_triton.dequantize(*wanted, fmt), mx_reference.dequantize(*wanted, fmt)
        assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))


@pytest.mark.parametrize("counts", [None, [0, 16, 5, 1]], ids=["all", "some"])
@pytest.mark.parametrize("experts, first, total", [(16, 0, 16), (8, 16, 24), (96, 96, 384)])
def test_plan(experts, first, total, counts):
    slots, topk, tile = 64, 3, 4
    ids = torch.rand(slots, total).argsort(1)[:, :topk].int().contiguous()
    live = torch.ones(slots, dtype=torch.bool)
    held = None
    if counts is not None:
        held = torch.tensor(counts, dtype=torch.int32)
        live = torch.arange(slots) % 16 < held[torch.arange(slots) // 16]
    plan = plan_routing(ids, experts=experts, first_expert=first, tile_rows=tile, counts=held)
    local = ids.flatten() - first
    there = (local >= 0) & (local < experts) & live.repeat_interleave(topk)
    rows = [torch.where(there & (local == e))[0].tolist() for e in range(experts)]
    order = [index for row in rows for index in row]
    assert plan.offsets.diff().tolist() == [len(row) for row in rows]
    assert plan.order[: len(order)].tolist() == order
    position = torch.full((slots * topk,), -1, dtype=torch.int32)
    position[order] = torch.arange(len(order), dtype=torch.int32)
    alive = live.repeat_interleave(topk)
    assert torch.equal(plan.position[alive], position[alive])
    tiles = [e for e, row in enumerate(rows) for _ in range(-(-len(row) // tile))]
    assert plan.tile_expert[: len(tiles)].tolist() == tiles
    assert plan.tile_start.tolist() == [
        tiles.index(e) if e in tiles else sum(t < e for t in tiles) for e in range(experts + 1)
    ]


TILES = {
    Way.UNPACK: replace(
        UNPACK_TILES[12],
        up=replace(UNPACK_TILES[12].up, cols=32),
        down=replace(UNPACK_TILES[12].down, cols=128),
    ),
    Way.DENSE: replace(
        DENSE_TILES,
        up=replace(DENSE_TILES.up, rows=16, cols=64),
        down=replace(DENSE_TILES.down, rows=16, cols=128),
        pieces=2,
    ),
}
"""Tiles that suit a small layer: more than one is needed, and the last is not full."""


@pytest.mark.parametrize(
    "way, recipe, operand",
    [
        (Way.UNPACK, "silu", AOperand.FP8),
        (Way.UNPACK, "swiglu, clamped, biased", AOperand.FP4),
        (Way.DENSE, "silu, clamped, biased", AOperand.FP8),
        (Way.DENSE, "swiglu", AOperand.FP4),
    ],
)
def test_experts(way, recipe, operand):
    shape, recipe = geometry(hidden=160, inter=96, experts=3, topk=2), RECIPES[recipe]
    weights = random_experts(shape, recipe, seed=1)
    x, topk_weights, topk_ids = random_tokens(shape, 20, seed=2)
    experts = TritonExperts(shape, recipe, operand, CPU)
    codes, scales = mx.quantize(x, operand.wire)
    plan, y = experts.project(
        experts.prepare(weights), codes, scales, topk_ids, 0, chosen=(way, TILES[way])
    )
    rows = y[plan.position.view(20, 2).long()].float()
    found = (rows * topk_weights[:, :, None]).sum(1).bfloat16()
    wanted = quantized_layer(x, topk_weights, topk_ids, weights, shape, recipe, operand)
    if way is Way.UNPACK:
        # Sums in another order may round to another bf16.
        assert (found == wanted).float().mean() > 0.99
    assert relative_error(found, wanted) < TRUNCATED


@OPERANDS
def test_wires_agree_and_bytes_are_counted(operand):
    shape = geometry(hidden=64, experts=6, topk=3, ranks=3, max_tokens=8)
    recipe = RECIPES["silu"]
    weights = random_experts(shape, recipe, seed=3)
    counts = [8, 0, 1]
    inputs = [random_tokens(shape, count, seed=rank) for rank, count in enumerate(counts)]
    inputs[2][2][:] = torch.tensor([[2, 3, 4]])
    found = {}
    for wire in (Wire.BF16, operand.wire):
        choice = WireChoice(wire=wire, a_operand=operand, wire_found="", a_operand_found="")
        group = VirtualRanks(shape, recipe, choice, CPU)
        local = [
            replace(
                weights,
                **{
                    name: getattr(weights, name)[2 * r : 2 * r + 2]
                    for name in ("w1", "w1_scale", "w2", "w2_scale")
                },
            )
            for r in range(3)
        ]
        prepared = [rank.prepare(mine) for rank, mine in zip(group.ranks, local, strict=True)]
        found[wire] = group(inputs, prepared)
        for rank, (_, _, ids) in enumerate(inputs):
            goes = [((ids // 2) == other).any(1) for other in range(3) if other != rank]
            assert group.ranks[rank].counters.rows == sum(int(g.sum()) for g in goes)
    for (x, topk_weights, ids), narrow, wide in zip(
        inputs, found[operand.wire], found[Wire.BF16], strict=True
    ):
        assert torch.equal(narrow, wide)
        if len(x):
            wanted = quantized_layer(x, topk_weights, ids, weights, shape, recipe, operand)
            # Cut off twice: each rank's sum, and their total.
            assert relative_error(narrow, wanted) < 2 * TRUNCATED
