"""The expert GEMM on the GPU against plain torch, on every way, and its replay from a graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom.moe.expert_tiles import DENSE_TILES, UNPACK_TILES, Way
from atom.moe.reference import quantized_layer
from atom.moe.spec import Activation, ExpertRecipe, GateMode
from atom.wire.format import AOperand
from tests.gpu.layers import BIASED, geometry, random_experts, random_tokens, relative_error

module = pytest.importorskip("atom.moe.experts_triton", reason="Triton is not installed")
mx_triton = pytest.importorskip("atom.wire.mx_triton")

OPERANDS = pytest.mark.parametrize("operand", list(AOperand))
RECIPES = {
    "silu": ExpertRecipe(gate_mode=GateMode.CONCAT),
    "silu, clamped, biased": BIASED,
    "swiglu, clamped, biased": ExpertRecipe(
        gate_mode=GateMode.INTERLEAVE, activation=Activation.SWIGLU, swiglu_limit=0.75, bias=True
    ),
}
WAYS = {
    **{f"unpack {tiles.up.rows}": (Way.UNPACK, tiles) for tiles in UNPACK_TILES.values()},
    "dense": (Way.DENSE, DENSE_TILES),
    "dense, whole": (Way.DENSE, replace(DENSE_TILES, pieces=1)),
}
BF16 = 2.0**-8
"""Half a step of bf16, relative."""


def run(experts, weights, tokens, operand, way=None):
    x, topk_weights, topk_ids = tokens
    if way is not None:
        experts.choose = lambda assignments: way
    out = torch.full_like(x, 7)
    codes, scales = mx_triton.quantize(x, operand)
    experts.run(experts.prepare(weights), codes, scales, topk_ids, topk_weights, out)
    return out


@pytest.mark.parametrize("way", WAYS)
@OPERANDS
def test_layer_equals_plain_torch(device, way, operand):
    shape, recipe = geometry(), RECIPES["silu"]
    weights = random_experts(shape, recipe, device)
    for count in (1, 150):
        tokens = random_tokens(shape, count, device, seed=count)
        experts = module.TritonExperts(shape, recipe, operand, device)
        found = run(experts, weights, tokens, operand, WAYS[way])
        wanted = quantized_layer(*tokens, weights, shape, recipe, operand)
        assert relative_error(found, wanted) < BF16
        if "dense" not in way:
            # Sums in another order round to another bf16 now and then; an element of the activation that fell on the other
            # side of a midpoint moves a row a little.
            assert (found == wanted).float().mean() > 0.98


@pytest.mark.parametrize("recipe", RECIPES)
@OPERANDS
@pytest.mark.parametrize("hidden, inter", [(512, 256), (288, 96)])
@pytest.mark.parametrize("way", ["unpack 16", "dense"])
def test_every_recipe_and_widths_that_fill_no_tile(device, recipe, operand, hidden, inter, way):
    shape, recipe = geometry(hidden=hidden, inter=inter), RECIPES[recipe]
    weights = random_experts(shape, recipe, device)
    tokens = random_tokens(shape, 40, device)
    experts = module.TritonExperts(shape, recipe, operand, device)
    found = run(experts, weights, tokens, operand, WAYS[way])
    assert relative_error(found, quantized_layer(*tokens, weights, shape, recipe, operand)) < BF16


@OPERANDS
def test_scaled_instructions_emulated(device, operand):
    """Triton computes ``dot_scaled`` on any GPU; where there are no such instructions it is only slow."""
    shape, recipe = geometry(), BIASED
    weights = random_experts(shape, recipe, device)
    tokens = random_tokens(shape, 40, device)
    experts = module.TritonExperts(shape, recipe, operand, device, scaled=True)
    found = run(experts, weights, tokens, operand)
    assert relative_error(found, quantized_layer(*tokens, weights, shape, recipe, operand)) < BF16


def test_scales_of_every_size(device):
    shape, recipe = geometry(), RECIPES["silu"]
    weights = random_experts(shape, recipe, device)
    weights.w2_scale.add_(20)
    weights.w1_scale.sub_(20)
    tokens = random_tokens(shape, 9, device)
    for way in ("unpack 16", "dense"):
        experts = module.TritonExperts(shape, recipe, AOperand.FP4, device)
        found = run(experts, weights, tokens, AOperand.FP4, WAYS[way])
        wanted = quantized_layer(*tokens, weights, shape, recipe, AOperand.FP4)
        assert relative_error(found, wanted) < BF16


def test_a_weight_or_token_that_is_nan_stays_with_its_rows(device):
    shape, recipe = geometry(), RECIPES["silu"]
    weights = random_experts(shape, recipe, device)
    weights.w1_scale[3, 7, 1] = 0xFF
    x, topk_weights, topk_ids = random_tokens(shape, 60, device)
    x[5, 100] = float("nan")
    for way in ("unpack 16", "dense"):
        experts = module.TritonExperts(shape, recipe, AOperand.FP4, device)
        found = run(experts, weights, (x, topk_weights, topk_ids), AOperand.FP4, WAYS[way])
        poisoned = (topk_ids == 3).any(1)
        poisoned[5] = True
        assert torch.equal(found.isnan().all(1), poisoned)
        assert torch.equal(found.isnan().any(1), poisoned)


@pytest.mark.parametrize("way", ["unpack 16", "dense"])
def test_a_graph_replays_with_other_routings(device, way):
    shape, recipe, operand = geometry(), RECIPES["silu"], AOperand.FP4
    weights = random_experts(shape, recipe, device)
    experts = module.TritonExperts(shape, recipe, operand, device)
    experts.choose = lambda assignments: WAYS[way]
    prepared = experts.prepare(weights)
    static = random_tokens(shape, 64, device)
    out = torch.empty_like(static[0])

    def layer():
        codes, scales = mx_triton.quantize(static[0], operand)
        experts.run(prepared, codes, scales, static[2], static[1], out)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
    for seed in (1, 2, 3):
        tokens = random_tokens(shape, 64, device, seed)
        if seed == 3:
            tokens[2][:] = torch.arange(4, device=device)
        for held, new in zip(static, tokens, strict=True):
            held.copy_(new)
        out.fill_(7)
        graph.replay()
        replayed = out.clone()
        layer()
        assert torch.equal(replayed, out)
        assert relative_error(out, quantized_layer(*tokens, weights, shape, recipe, operand)) < BF16


def test_no_rows(device):
    shape, recipe = geometry(), RECIPES["silu"]
    experts = module.TritonExperts(shape, recipe, AOperand.FP4, device)
    weights = random_experts(shape, recipe, device)
    assert run(experts, weights, random_tokens(shape, 0, device), AOperand.FP4).shape == (0, 512)
