"""Dispatch and combine between arenas on one GPU: identity across wires, the reference, graphs, and a real rendezvous."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from atom.errors import LaunchRefused
from atom.moe.mega_moe import MegaMoE, create_mega_moe
from atom.moe.reference import quantized_layer
from atom.moe.spec import ExpertRecipe, GateMode
from atom.wire.format import AOperand, Wire, WireLayout
from tests.gpu.layers import (
    BIASED,
    choice,
    geometry,
    of_rank,
    random_experts,
    random_tokens,
    relative_error,
)

pytest.importorskip("triton", reason="Triton is not installed")
symmetric = pytest.importorskip("atom.moe.symmetric")

OPERANDS = pytest.mark.parametrize("operand", list(AOperand))
PLAIN = ExpertRecipe(gate_mode=GateMode.CONCAT)
BF16 = 2.0**-7

ROUTINGS = {
    "random": lambda shape, ids, rank: ids,
    "all to rank 1": lambda shape, ids, rank: ids % shape.local_experts + shape.local_experts,
    "all at home": lambda shape, ids, rank: ids % shape.local_experts + rank * shape.local_experts,
}


def batch(shape, counts, device, routing="random", seed=0):
    inputs = []
    for rank, count in enumerate(counts):
        x, weights, ids = random_tokens(shape, count, device, seed * 100 + rank)
        if routing != "random":
            few = torch.rand(count, shape.local_experts, device=device).argsort(1)[:, : shape.topk]
            ids = ROUTINGS[routing](shape, few.int(), rank).contiguous()
        inputs.append((x, weights, ids))
    return inputs


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("routing", ROUTINGS)
@OPERANDS
def test_wires_agree_to_the_bit_and_with_plain_torch(device, ranks, routing, operand):
    shape = geometry(experts=32, ranks=ranks, max_tokens=200)
    counts = [130, 0, 200, 1][:ranks]
    weights = random_experts(shape, PLAIN, device)
    inputs = batch(shape, counts, device, routing)
    found = {}
    for wire in (Wire.BF16, operand.wire):
        group = symmetric.VirtualRanks(shape, PLAIN, choice(wire, operand), device)
        prepared = [
            rank.prepare(of_rank(weights, shape, index)) for index, rank in enumerate(group.ranks)
        ]
        found[wire] = group(inputs, prepared)
        # The arenas are used again and again.
        again = group(inputs, prepared)
        assert all(torch.equal(a, b) for a, b in zip(found[wire], again, strict=True))
        row = WireLayout.of(wire, shape.hidden)
        for index, rank in enumerate(group.ranks):
            ids = inputs[index][2] // shape.local_experts
            goes = torch.stack([(ids == other).any(1) for other in range(ranks)])
            goes[index] = False
            counters = rank.counters
            assert counters.rows == 2 * int(goes.sum())
            assert counters.payload == counters.rows * row.payload_bytes
            assert counters.scales == counters.rows * row.scale_bytes
            assert counters.calls == 2
        assert sum(rank.counters.combine for rank in group.ranks) == sum(
            rank.counters.rows * 2 * shape.hidden for rank in group.ranks
        )
    for index, (narrow, wide) in enumerate(zip(found[operand.wire], found[Wire.BF16], strict=True)):
        assert torch.equal(narrow, wide)
        if counts[index]:
            wanted = quantized_layer(*inputs[index], weights, shape, PLAIN, operand)
            assert relative_error(narrow, wanted) < BF16


@OPERANDS
def test_large_batches_agree_to_the_bit(device, operand):
    shape = geometry(hidden=1024, inter=512, experts=8, topk=2, ranks=2, max_tokens=4096)
    weights = random_experts(shape, BIASED, device)
    inputs = batch(shape, [4096, 3000], device)
    found = []
    for wire in (Wire.BF16, operand.wire):
        group = symmetric.VirtualRanks(shape, BIASED, choice(wire, operand), device)
        prepared = [rank.prepare(of_rank(weights, shape, i)) for i, rank in enumerate(group.ranks)]
        found.append(group(inputs, prepared))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_graph_replays_with_other_routings(device):
    shape = geometry(experts=32, ranks=4, max_tokens=64)
    weights = random_experts(shape, PLAIN, device)
    group = symmetric.VirtualRanks(shape, PLAIN, choice(Wire.FP4, AOperand.FP4), device)
    prepared = [rank.prepare(of_rank(weights, shape, i)) for i, rank in enumerate(group.ranks)]
    static = batch(shape, [64] * 4, device)
    group(static, prepared)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = group(static, prepared)
    for seed, routing in enumerate(ROUTINGS, start=1):
        for held, new in zip(static, batch(shape, [64] * 4, device, routing, seed), strict=True):
            for a, b in zip(held, new, strict=True):
                a.copy_(b)
        graph.replay()
        replayed = [out.clone() for out in outputs]
        for a, b in zip(replayed, group(static, prepared), strict=True):
            assert torch.equal(a, b)
    assert group.ranks[0].counters.calls == 1 + 3 * 2


def test_one_rank_without_a_group(device, caplog):
    shape = geometry()
    weights = random_experts(shape, PLAIN, device)
    tokens = random_tokens(shape, 33, device)
    found = []
    for wire in (Wire.BF16, Wire.FP4):
        mega = create_mega_moe(
            shape, PLAIN, choice(wire, AOperand.FP4), group=None, device=device, environ={}
        )
        assert isinstance(mega, MegaMoE) and isinstance(mega, symmetric.SymmetricMegaMoE)
        found.append(mega(*tokens, mega.prepare(weights)))
        assert mega.counters.rows == 0 and mega.counters.calls == 1
        mega.close()
        mega.close()
        with pytest.raises(ValueError, match="closed"):
            mega(*tokens, weights)
    assert torch.equal(*found)
    wanted = quantized_layer(*tokens, weights, shape, PLAIN, AOperand.FP4)
    assert relative_error(found[0], wanted) < BF16


def test_a_real_rendezvous(device, tmp_path):
    """One process can be a group of one: the memory, its addresses and the barrier are the real ones."""
    shape = geometry(max_tokens=64)
    weights = random_experts(shape, PLAIN, device)
    tokens = random_tokens(shape, 50, device)
    dist.init_process_group(
        "nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        layout = symmetric.ArenaLayout.of(shape, Wire.FP4)
        arena, peers, barrier = symmetric.rendezvous(layout.total, dist.group.WORLD, device)
        assert peers == [arena.data_ptr()]
        mega = symmetric.SymmetricMegaMoE(
            shape, PLAIN, choice(Wire.FP4, AOperand.FP4), [arena], device, barrier=barrier
        )
        prepared = mega.prepare(weights)
        dispatched = mega.dispatch(*tokens)
        barrier()
        mega.experts(dispatched, prepared)
        barrier()
        found = mega.combine(dispatched)
        wanted = quantized_layer(*tokens, weights, shape, PLAIN, AOperand.FP4)
        assert relative_error(found, wanted) < BF16
    finally:
        dist.destroy_process_group()


def test_an_arena_that_does_not_fit_is_refused(device):
    shape = geometry(hidden=7168, ranks=4, max_tokens=10_000_000)
    layout = symmetric.ArenaLayout.of(shape, Wire.BF16)
    free = torch.cuda.mem_get_info(device)[0]
    text = symmetric.arena_refusal(shape, choice(Wire.BF16, AOperand.FP4), layout, free)
    assert "GiB" in text and "--max-num-batched-tokens" in text and "MEGA_WIRE" in text
    assert issubclass(LaunchRefused, Exception)


def test_too_many_tokens_are_refused(device):
    shape = geometry(ranks=2, max_tokens=8)
    group = symmetric.VirtualRanks(shape, PLAIN, choice(Wire.FP4, AOperand.FP4), device)
    with pytest.raises(ValueError, match="9 tokens on one rank exceed max_tokens=8"):
        group.ranks[0].dispatch(*random_tokens(shape, 9, device))
