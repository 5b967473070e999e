"""MXFP4 experts on the CPU: quantization and gate order, the GEMM against plain torch to the bit, and its edges."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from atom.moe import experts_kernel as kernel
from atom.moe import experts_tile as tile
from atom.moe.experts import CpuExperts, quantize_experts, reorder_rows
from atom.moe.reference import activate, exact_layer, quantized_layer
from atom.moe.spec import ExpertRecipe, ExpertWeights, GateMode, MoEGeometry
from atom.wire import mx, mx_reference
from atom.wire.format import AOperand
from tests.moe.layers import (
    RECIPES,
    geometry,
    kernel_activation,
    random_experts,
    random_tokens,
    relative_error,
)

CONCAT, INTERLEAVE = GateMode.CONCAT, GateMode.INTERLEAVE


def run(
    shape: MoEGeometry,
    recipe: ExpertRecipe,
    operand: AOperand,
    weights: ExpertWeights,
    tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    plain: bool | None = None,
) -> torch.Tensor:
    """One layer's local experts; ``weights`` are the local ones."""
    x, topk_weights, topk_ids = tokens
    experts = CpuExperts(shape, recipe, operand, plain=plain)
    out = torch.full_like(x, 7)
    codes, scales = mx.quantize(x, operand.wire)
    experts.run(experts.prepare(weights), codes, scales, topk_ids, topk_weights, out)
    return out


# Weights.


def test_experts_are_quantized_along_their_inputs():
    gate_up, down = torch.randn(3, 128, 96), torch.randn(3, 96, 64).bfloat16()
    weights = quantize_experts(gate_up, down, layout=CONCAT, gate_mode=CONCAT)
    for found, scale, source in (
        (weights.w1, weights.w1_scale, gate_up),
        (weights.w2, weights.w2_scale, down),
    ):
        codes, scales = mx_reference.quantize(source, "fp4")
        assert torch.equal(found, codes)
        assert torch.equal(scale, scales)


@pytest.mark.parametrize("source", GateMode)
@pytest.mark.parametrize("wanted", GateMode)
def test_gate_order_is_the_wanted_one(source, wanted):
    # Row r of each kind is a power of two of its own, so that its scale byte tells which row it was.
    gates = torch.arange(0, 32)
    ups = torch.arange(64, 96)
    interleaved = torch.stack((gates, ups), dim=1).flatten()
    order = {CONCAT: torch.cat((gates, ups)), INTERLEAVE: interleaved}
    gate_up = (2.0 ** order[source].float())[None, :, None].expand(1, 64, 32)
    weights = quantize_experts(
        gate_up,
        torch.zeros(1, 32, 32),
        layout=source,
        gate_mode=wanted,
        bias1=order[source][None],
        bias2=torch.zeros(1, 32),
    )
    # The largest e2m1 value is 6, so 2^n is held as 4 * 2^(n - 2).
    assert torch.equal(weights.w1_scale[0, :, 0].long() - 127 + 2, order[wanted])
    assert torch.equal(weights.bias1[0], order[wanted].float())


def test_reordering_by_hand():
    rows = torch.tensor([[10, 11, 12, 20, 21, 22]])
    assert reorder_rows(rows, CONCAT, INTERLEAVE).tolist() == [[10, 20, 11, 21, 12, 22]]
    assert reorder_rows(rows, INTERLEAVE, CONCAT).tolist() == [[10, 12, 21, 11, 20, 22]]
    assert reorder_rows(rows, CONCAT, CONCAT).tolist() == rows.tolist()


def test_experts_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 64, 32\) and down \(2, 64, 32\).*transpose"):
        quantize_experts(
            torch.zeros(2, 64, 32), torch.zeros(2, 64, 32), layout=CONCAT, gate_mode=CONCAT
        )


def test_an_unknown_layout_is_named():
    with pytest.raises(ValueError, match="columns"):
        quantize_experts(
            torch.zeros(1, 64, 32), torch.zeros(1, 32, 32), layout="columns", gate_mode=CONCAT
        )


def replaced(weights: ExpertWeights, **values) -> ExpertWeights:
    return dataclasses.replace(weights, **values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: replaced(w, w1=w.w1[:, :-1]), r"w1 is torch.uint8 \(16, 127, 48\)"),
        (lambda w: replaced(w, w1=w.w1.to(torch.int8)), "w1 is torch.int8"),
        (lambda w: replaced(w, w2_scale=w.w2_scale[..., :1]), "w2_scale.*must be contiguous"),
        (lambda w: replaced(w, w2=w.w2.transpose(1, 2)), r"w2 is torch.uint8 \(16, 32, 96\)"),
        (lambda w: replaced(w, bias1=torch.zeros(16, 128)), "have bias1.*bias=False"),
    ],
)
def test_a_layout_that_does_not_work_is_named(change, message):
    shape, recipe = geometry(), RECIPES["silu"]
    weights = random_experts(shape, recipe, 0)
    with pytest.raises(ValueError, match=message):
        CpuExperts(shape, recipe, AOperand.FP4).prepare(change(weights))


def test_missing_biases_are_named():
    shape = geometry()
    weights = random_experts(shape, RECIPES["silu"], 0)
    with pytest.raises(ValueError, match=r"lack bias1.*bias=True"):
        CpuExperts(shape, RECIPES["swiglu, clamped, biased"], AOperand.FP4).prepare(weights)


# The activation.


def test_the_exponential_is_exact_to_two_units_in_the_last_place():
    gate = torch.linspace(-80, 80, 32 * 1024).reshape(1024, 32)
    found = kernel_activation(gate, torch.ones_like(gate), RECIPES["silu"])
    wanted = silu(gate.double())
    assert ((found.double() - wanted).abs() <= 4 * wanted.abs() * 2.0**-24).all()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_activation_is_the_models(recipe):
    gate, up = torch.randn(2, 64, 96).unbind()
    torch.testing.assert_close(
        kernel_activation(gate, up, recipe), activate(gate, up, recipe), rtol=1e-6, atol=1e-6
    )


def test_activations_are_those_of_transformers():
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    gate, up = (4 * torch.randn(2, 64, 96)).unbind()

    class Model:
        alpha, limit, act_fn = 1.702, 0.75, staticmethod(silu)

    recipes = RECIPES["swiglu, clamped, biased"], RECIPES["silu, clamped, biased"]
    pairs = torch.stack((gate, up), dim=-1).flatten(1), torch.cat((gate, up), dim=-1)
    for recipe, given, experts in zip(
        recipes, pairs, (GptOssExperts, DeepseekV4Experts), strict=True
    ):
        torch.testing.assert_close(activate(gate, up, recipe), experts._apply_gate(Model, given))


# The GEMM.


@pytest.mark.parametrize("plain", [False, True], ids=["vector", "plain"])
@pytest.mark.parametrize("operand", AOperand)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_layers_are_the_references_to_the_bit(recipe, operand, plain):
    if not plain and not tile.vector_instructions():
        pytest.skip("this CPU lacks the instructions")
    shape = geometry()
    weights, tokens = random_experts(shape, recipe, 1), random_tokens(shape, 47, 2)
    found = run(shape, recipe, operand, weights, tokens, plain=plain)
    wanted = quantized_layer(*tokens, weights, shape, recipe, operand, activation=kernel_activation)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("operand", AOperand)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_layers_agree_with_torchs_own_exponential(recipe, operand):
    """torch's exponential differs in the last bit, which moves an element of a row past a rounding point now and then:
    such a row is off by a step of the A operand's format in one of its inputs, all others are equal.
    """
    shape = geometry()
    weights, tokens = random_experts(shape, recipe, 3), random_tokens(shape, 64, 4)
    found = run(shape, recipe, operand, weights, tokens)
    wanted = quantized_layer(*tokens, weights, shape, recipe, operand)
    equal = (found == wanted).all(dim=1)
    assert equal.float().mean() > 0.9
    assert relative_error(found, wanted) < 0.02


@pytest.mark.parametrize("operand", AOperand)
def test_error_against_float32(operand):
    """With random weights, A4W4 loses a fifth of the norm and A8W4 a twentieth; both come from the A operand alone."""
    shape, recipe = geometry(hidden=256, inter=96), RECIPES["silu"]
    weights, tokens = random_experts(shape, recipe, 5), random_tokens(shape, 64, 6)
    error = relative_error(
        run(shape, recipe, operand, weights, tokens), exact_layer(*tokens, weights, recipe)
    )
    print(f"layer error, {operand} A operand: {error:.6f}")
    assert error < {AOperand.FP4: 0.3, AOperand.FP8: 0.07}[operand]


def test_by_hand():
    """Two experts on 32 inputs: the first passes the input through its gate and doubles it on the way down, the second
    has weights of zero and a bias. Token 0 goes to both, token 1 to the second twice, token 2 to the first alone.
    """
    shape = geometry(hidden=32, inter=32, experts=2, topk=2)
    recipe = ExpertRecipe(gate_mode=CONCAT, swiglu_limit=2.0, bias=True)
    eye, zero = torch.eye(32), torch.zeros(32, 32)
    weights = quantize_experts(
        torch.stack((torch.cat((eye, zero)), torch.cat((zero, zero)))),
        torch.stack((2 * eye, zero)),
        layout=CONCAT,
        gate_mode=CONCAT,
        # The first expert's ups are 1; the second's are 0, whatever its gates.
        bias1=torch.tensor([[0.0] * 32 + [1.0] * 32, [5.0] * 32 + [0.0] * 32]),
        bias2=torch.tensor([[0.0] * 32, [10.0] * 32]),
    )
    x = torch.zeros(3, 32, dtype=torch.bfloat16)
    x[0, 3], x[2, 4] = 6, -1
    topk_ids = torch.tensor([[1, 0], [1, 1], [0, 0]], dtype=torch.int32)
    topk_weights = torch.tensor([[0.5, 4.0], [0.25, 0.5], [1.0, 0.0]])
    found = run(shape, recipe, AOperand.FP8, weights, (x, topk_weights, topk_ids)).float()

    def through(gate: float) -> float:
        # 448 is e4m3's largest value; the block's scale is the power of two that makes it fit.
        active = silu(torch.tensor([gate] + [0.0] * 31))
        return 2 * float(mx.dequantize(*mx.quantize(active, "fp8"), "fp8")[0])

    wanted = torch.zeros(3, 32)
    wanted[0] = 0.5 * 10
    wanted[0, 3] += 4.0 * through(2.0)  # clamped from 6
    wanted[1] = 0.25 * 10 + 0.5 * 10
    wanted[2, 4] = through(-1.0)
    assert torch.equal(found, wanted.bfloat16().float())


@pytest.mark.parametrize("operand", AOperand)
def test_a_row_does_not_depend_on_its_batch(operand):
    shape, recipe = geometry(), RECIPES["silu"]
    weights, tokens = random_experts(shape, recipe, 7), random_tokens(shape, 40, 8)
    together = run(shape, recipe, operand, weights, tokens)
    for count in (1, 3, 8, 13):
        some = tuple(part[:count].clone() for part in tokens)
        assert torch.equal(run(shape, recipe, operand, weights, some), together[:count])
    order = torch.randperm(40)
    shuffled = tuple(part[order] for part in tokens)
    assert torch.equal(run(shape, recipe, operand, weights, shuffled), together[order])


def test_batches_of_any_length():
    """Past the rows that go through together, and with more rows of one expert than a pass of the kernel takes."""
    shape = geometry(hidden=32, inter=32, experts=4, topk=2)
    recipe = RECIPES["silu"]
    weights = random_experts(shape, recipe, 9)
    x, topk_weights, topk_ids = random_tokens(shape, kernel.CHUNK + 21, 10)
    topk_ids[: kernel.CHUNK // 2] = torch.tensor([2, 1])
    found = run(shape, recipe, AOperand.FP4, weights, (x, topk_weights, topk_ids))
    wanted = quantized_layer(
        x,
        topk_weights,
        topk_ids,
        weights,
        shape,
        recipe,
        AOperand.FP4,
        activation=kernel_activation,
    )
    assert torch.equal(found, wanted)


def test_no_rows():
    shape, recipe = geometry(), RECIPES["silu"]
    weights = random_experts(shape, recipe, 11)
    assert run(shape, recipe, AOperand.FP4, weights, random_tokens(shape, 0, 12)).shape == (0, 96)


def test_other_ranks_experts_are_passed_over():
    whole, recipe = geometry(), RECIPES["swiglu, clamped, biased"]
    everything, tokens = random_experts(whole, recipe, 13), random_tokens(whole, 20, 14)
    part = geometry(ranks=4, rank=2)
    here = slice(8, 12)
    local = replaced(
        everything,
        **{
            name: getattr(everything, name)[here].clone()
            for name in ("w1", "w1_scale", "w2", "w2_scale", "bias1", "bias2")
        },
    )
    found = run(part, recipe, AOperand.FP4, local, tokens)
    x, topk_weights, topk_ids = tokens
    elsewhere = (topk_ids < 8) | (topk_ids >= 12)
    wanted = quantized_layer(
        x,
        topk_weights.masked_fill(elsewhere, 0),
        topk_ids,
        everything,
        whole,
        recipe,
        AOperand.FP4,
        activation=kernel_activation,
    )
    assert torch.equal(found, wanted)
    assert not found[elsewhere.all(dim=1)].any()


@pytest.mark.parametrize("bad", [-1, 16])
def test_ids_of_no_expert_are_refused(bad):
    shape, recipe = geometry(), RECIPES["silu"]
    x, topk_weights, topk_ids = random_tokens(shape, 5, 15)
    topk_ids[3, 2] = bad
    with pytest.raises(ValueError, match=rf"holds {bad}: .*0\.\.15"):
        run(
            shape,
            recipe,
            AOperand.FP4,
            random_experts(shape, recipe, 16),
            (x, topk_weights, topk_ids),
        )


@pytest.mark.parametrize("operand", AOperand)
def test_a_row_with_nan_stays_alone(operand):
    shape, recipe = geometry(), RECIPES["silu"]
    weights, tokens = random_experts(shape, recipe, 17), random_tokens(shape, 9, 18)
    clean = run(shape, recipe, operand, weights, tokens)
    tokens[0][4, 50] = float("nan")
    found = run(shape, recipe, operand, weights, tokens)
    others = [r for r in range(9) if r != 4]
    assert found[4].isnan().all()
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("plain", [False, True], ids=["vector", "plain"])
def test_scales_at_both_ends(plain):
    """A weight scale of 2^-127 counts, and one of NaN reaches the outputs that it belongs to and no others."""
    if not plain and not tile.vector_instructions():
        pytest.skip("this CPU lacks the instructions")
    shape, recipe = geometry(experts=1, topk=1), RECIPES["silu"]
    weights = random_experts(shape, recipe, 19)
    x, topk_weights, topk_ids = random_tokens(shape, 3, 20)
    clean = run(shape, recipe, AOperand.FP4, weights, (x, topk_weights, topk_ids), plain=plain)
    weights.w2_scale[0, 5] = 255
    weights.w2_scale[0, 6] = 0
    weights.w2[0, 6] = 0x22
    found = run(shape, recipe, AOperand.FP4, weights, (x, topk_weights, topk_ids), plain=plain)
    assert found[:, 5].isnan().all()
    # 2^-127 times the row is some subnormal of bf16, or nothing at all, but no more than that.
    assert (found[:, 6].abs() < 2.0**-110).all()
    others = [c for c in range(96) if c not in (5, 6)]
    assert torch.equal(found[:, others], clean[:, others])


def test_rows_are_read_where_they_lie():
    """The parts of packed rows: strided views of one buffer."""
    shape, recipe = geometry(), RECIPES["silu"]
    weights, (x, topk_weights, topk_ids) = random_experts(shape, recipe, 21), random_tokens(
        shape, 6, 22
    )
    codes, scales = mx.quantize(x, "fp4")
    packed = torch.zeros(6, 48 + 4 + 16 + 16, dtype=torch.uint8)
    packed[:, :48], packed[:, 48:51] = codes, scales
    packed[:, 52:68] = topk_ids.view(torch.uint8)
    packed[:, 68:] = topk_weights.view(torch.uint8)
    experts = CpuExperts(shape, recipe, AOperand.FP4)
    out = torch.zeros(6, 200, dtype=torch.bfloat16)
    experts.run(
        experts.prepare(weights),
        packed[:, :48],
        packed[:, 48:51],
        packed[:, 52:68].view(torch.int32),
        packed[:, 68:].view(torch.float32),
        out[:, 3:99],
    )
    assert torch.equal(
        out[:, 3:99], run(shape, recipe, AOperand.FP4, weights, (x, topk_weights, topk_ids))
    )
    assert not out[:, :3].any() and not out[:, 99:].any()


def test_packed_weights_are_not_larger_than_mxfp4_and_its_scales_in_bf16():
    if not tile.vector_instructions():
        pytest.skip("this CPU lacks the instructions")
    shape, recipe = geometry(), RECIPES["silu"]
    weights = random_experts(shape, recipe, 23)
    held = CpuExperts(shape, recipe, AOperand.FP4).prepare(weights).prepared.held
    assert held["w1"].nbytes == weights.w1.nbytes
    assert held["w1_scale"].nbytes == 2 * weights.w1_scale.nbytes
    assert isinstance(held["bias1"], torch.Tensor) and np.prod(held["bias1"].shape) == 16 * 128
