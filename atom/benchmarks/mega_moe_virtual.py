"""The part of bench_mega_moe that runs the ranks of an expert group as virtual ranks on one GPU."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from atom.benchmarks import gpu_timing, grouped_mm_eager, grouped_mm_peer
from atom.benchmarks.mega_moe_layers import geometry, pairs, random_tokens, random_weights
from atom.benchmarks.mega_moe_records import save
from atom.moe.experts_triton import TritonExperts
from atom.moe.reference import exact_layer, join_ranks
from atom.moe.spec import ExpertRecipe, ExpertWeights, GateMode, MoEGeometry
from atom.moe.symmetric import ArenaLayout, VirtualRanks
from atom.wire import mx_triton
from atom.wire.format import AOperand, Wire, WireChoice, WireLayout

RECIPE = ExpertRecipe(gate_mode=GateMode.CONCAT)
SAMPLE = 16
"""Tokens of rank 0 that are compared with float32."""

GRAPH_TOKENS = 1024
"""Batches of at most so many tokens are timed as a graph, which is how a server runs them."""

STAGE_OF = {
    "_quantize_bf16": "quantize",
    "_quantize_regions": "quantize",
    "count_tokens": "dispatch",
    "assign_slots": "dispatch",
    "send_rows": "dispatch",
    "_count": "plan",
    "_scan": "plan",
    "_place": "plan",
    "expand_slots": "expand",
    "expand_sorted": "expand",
    "unpack_weights": "unpack",
    "gate_up": "gemm1",
    "dense_gate_up": "gemm1",
    "scaled_gate_up": "gemm1",
    "down": "gemm2",
    "dense_down": "gemm2",
    "scaled_down": "gemm2",
    "return_results": "combine",
    "gather_results": "combine",
    "combine": "combine",
}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Records of every batch size, A operand and wire."""
    device = torch.device("cuda", 0)
    copy = gpu_timing.copy_gb_per_s(device)
    shape = geometry(args, max(args.tokens))
    weights = [random_weights(shape, device, rank) for rank in range(shape.ep_size)]
    # Every wire and A operand reads the same prepared weights.
    prepared = [
        TritonExperts(replace(shape, ep_rank=rank), RECIPE, AOperand.FP4, device).prepare(mine)
        for rank, mine in enumerate(weights)
    ]
    records = []
    for tokens in args.tokens:
        shape = geometry(args, tokens)
        inputs = [random_tokens(shape, tokens, device, rank) for rank in range(shape.ep_size)]
        sample = [part[:SAMPLE] for part in inputs[0]]
        exact = exact_layer(*sample, join_ranks(weights), RECIPE)
        peer = None if args.no_peer else _peer_ms(shape, prepared[0], tokens, device)
        first: dict[AOperand, list[torch.Tensor]] = {}
        for operand, wire in pairs(args):
            record, outputs = _one(args, shape, inputs, prepared, operand, wire)
            record |= {"copy_gb_per_s": copy, "error": _error(outputs[0][:SAMPLE], exact)}
            moved = dispatch_bytes(shape, inputs, operand, wire)
            record["dispatch_share_of_copy"] = (
                moved / record["dispatch_and_quantize_ms"] / 1e6 / copy
            )
            wanted = first.setdefault(operand, outputs)
            record["identical"] = all(
                torch.equal(a, b) for a, b in zip(outputs, wanted, strict=True)
            )
            if peer is not None:
                record |= {"grouped_mm_ms": peer}
                record["of_grouped_mm"] = record["total_ms"] / shape.ep_size / peer["fused"]
            records.append(record)
            save(records, args.json)
            del outputs, wanted
        del first
        torch.cuda.empty_cache()
    return records


def _one(
    args: argparse.Namespace,
    shape: MoEGeometry,
    inputs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    prepared: list[ExpertWeights],
    operand: AOperand,
    wire: Wire,
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    device = inputs[0][0].device
    choice = WireChoice(wire=wire, a_operand=operand, wire_found="", a_operand_found="")
    group = VirtualRanks(shape, RECIPE, choice, device)
    if shape.ep_size == 1:
        call = partial(_alone, group, inputs, prepared)
        dispatch = partial(mx_triton.quantize, inputs[0][0], operand)
    else:
        call = partial(group, inputs, prepared)
        dispatch = partial(_dispatch, group, inputs)
    outputs = call()
    counters = [rank.counters for rank in group.ranks]
    tokens = inputs[0][0].shape[0]
    time_of = gpu_timing.graph_ms if tokens <= GRAPH_TOKENS else gpu_timing.call_ms
    stages: dict[str, float] = {}
    for kernel, ms in gpu_timing.kernel_ms(call, repeats=args.repeats).items():
        stage = STAGE_OF.get(kernel, "other")
        stages[stage] = stages.get(stage, 0.0) + ms
    record = {
        "backend": "symmetric",
        "virtual": True,
        "ranks": shape.ep_size,
        "tokens": tokens,
        "wire": str(wire),
        "a_operand": str(operand),
        "row_bytes": WireLayout.of(wire, shape.hidden).row_bytes,
        "arena_bytes": ArenaLayout.of(shape, wire).total,
        "stages": stages,
        "total_ms": time_of(call, repeats=args.repeats),
        "dispatch_and_quantize_ms": gpu_timing.graph_ms(dispatch, repeats=args.repeats),
        "sent_bytes": sum(each.dispatched for each in counters),
        "combine_bytes": sum(each.combine for each in counters),
    }
    return record, outputs


def _alone(group, inputs, prepared) -> list[torch.Tensor]:
    return [group.ranks[0](*inputs[0], prepared[0])]


def _dispatch(group: VirtualRanks, inputs: list[tuple[torch.Tensor, ...]]) -> None:
    for rank, mine in zip(group.ranks, inputs, strict=True):
        rank.dispatch(*mine)
    for rank in group.ranks:
        rank.operand()


def dispatch_bytes(
    shape: MoEGeometry,
    inputs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    operand: AOperand,
    wire: Wire,
) -> int:
    """Bytes that dispatch and quantization must read and write, all ranks together."""
    narrow = WireLayout.of(operand, shape.hidden)
    operand_bytes = narrow.payload_bytes + narrow.scale_bytes
    tokens = sum(x.shape[0] for x, _, _ in inputs)
    read = tokens * 2 * shape.hidden
    if shape.ep_size == 1:
        return read + tokens * operand_bytes
    rows = 0
    for _, _, ids in inputs:
        ranks = ids // shape.local_experts
        rows += sum(int((ranks == rank).any(1).sum()) for rank in range(shape.ep_size))
    if wire.quantizing:
        return read + rows * operand_bytes
    return read + rows * (2 * shape.hidden * 2 + operand_bytes)


def _peer_ms(
    shape: MoEGeometry, weights: ExpertWeights, tokens: int, device: torch.device
) -> dict[str, float]:
    """Milliseconds of bf16 grouped_mm layers over one rank's experts, with as many assignments as a rank has."""
    local = replace(
        shape,
        experts=shape.local_experts,
        ep_size=1,
        ep_rank=0,
        topk=min(shape.topk, shape.local_experts),
    )
    unit = TritonExperts(local, RECIPE, AOperand.FP4, device)
    packed = weights.prepared
    w1 = unit.unpacked(packed.words1, packed.scales1, packed.lowered1, shape.hidden)
    w2 = unit.unpacked(packed.words2, packed.scales2, packed.lowered2, shape.inter)
    inputs = random_tokens(local, tokens, device, 0)
    time_of = gpu_timing.graph_ms if tokens <= GRAPH_TOKENS else gpu_timing.call_ms
    return {
        name: time_of(partial(layer, *inputs, w1, w2), repeats=7)
        for name, layer in (
            ("eager", grouped_mm_eager.eager_layer),
            ("fused", grouped_mm_peer.fused_layer),
        )
    }


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
