"""The torch.distributed backend on GPUs: bit identity across wires, the reference, and NCCL or RCCL as the group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from atom.moe.distributed import DistributedMegaMoE
from atom.moe.reference import quantized_layer
from atom.wire.format import AOperand, Wire, WireChoice
from tests.moe.layers import RECIPES, geometry, random_experts, relative_error
from tests.moe.test_distributed import local_part, tokens_of
from tests.ranks import run_ranks


def layer(
    rank: int, ranks: int, recipe: str, wire: Wire, operand: AOperand, grouped: bool
) -> tuple[str, torch.Tensor]:
    """What carried the rows, and this rank's results, on the CPU."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    shape = geometry(ranks=ranks, rank=rank)
    choice = WireChoice(wire=wire, a_operand=operand, wire_found="", a_operand_found="")
    group = dist.group.WORLD if grouped else None
    mega = DistributedMegaMoE(shape, RECIPES[recipe], choice, group, device)
    everything = random_experts(shape, RECIPES[recipe], 0)
    weights = mega.prepare(local_part(everything, shape, device))
    tokens = [part.to(device) for part in tokens_of(rank, ranks, "random")]
    return mega.built.transport, mega(*tokens, weights).cpu()


@pytest.mark.parametrize("operand", AOperand)
@pytest.mark.parametrize("recipe", RECIPES)
def test_wires_give_equal_results_near_the_references(recipe, operand):
    """Sums come in another order than the reference's, which moves an element past a rounding point now and then."""
    outs = [layer(0, 1, recipe, wire, operand, False)[1] for wire in (Wire.BF16, operand.wire)]
    assert torch.equal(*outs)
    shape = geometry()
    weights = random_experts(shape, RECIPES[recipe], 0)
    wanted = quantized_layer(*tokens_of(0, 1, "random"), weights, shape, RECIPES[recipe], operand)
    assert relative_error(outs[0], wanted) < 0.02


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_group_of_gpus_gives_what_one_gives_alone(ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{torch.cuda.device_count()} GPUs")
    wanted_name = "nccl" if torch.version.hip is None else "rccl"
    shape = geometry(ranks=ranks)
    weights = random_experts(shape, RECIPES["silu"], 0)
    for wire in (Wire.BF16, Wire.FP4):
        answers = run_ranks(
            ranks, layer, ranks, "silu", wire, AOperand.FP4, True, backend="nccl", timeout=120
        )
        assert [name for name, _ in answers] == [wanted_name] * ranks
        tokens = zip(*(tokens_of(rank, ranks, "random") for rank in range(ranks)), strict=True)
        wanted = quantized_layer(
            *map(torch.cat, tokens), weights, shape, RECIPES["silu"], AOperand.FP4
        )
        assert relative_error(torch.cat([out for _, out in answers]), wanted) < 0.02
