"""The part of bench_mega_moe whose ranks are processes: over gloo on CPUs, or torchrun's on GPUs."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from atom import envs
from atom.benchmarks import link_limit
from atom.benchmarks.dispatch_peers import all_to_all_ep, all_to_all_rows
from atom.benchmarks.grouped_mm_eager import eager_layer
from atom.benchmarks.mega_moe_layers import geometry, pairs, random_tokens, random_weights
from atom.benchmarks.mega_moe_records import save
from atom.moe import distributed
from atom.moe.distributed import DistributedMegaMoE
from atom.moe.experts import reorder_rows
from atom.moe.mega_moe import MegaMoE
from atom.moe.reference import exact_layer, join_ranks
from atom.moe.spec import ExpertRecipe, ExpertWeights, GateMode, MoEGeometry
from atom.wire import mx, mx_reference
from atom.wire.format import AOperand, Wire, WireChoice, WireLayout

RECIPE = ExpertRecipe(gate_mode=GateMode.INTERLEAVE)
SAMPLE = 16
"""Tokens of rank 0 that are compared with float32."""


def measure(args: argparse.Namespace) -> list[dict[str, Any]] | None:
    """Records of every batch size, A operand and wire; None on other ranks than 0."""
    if envs.read("WORLD_SIZE") is not None:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device((envs.read("LOCAL_RANK") or 0) % torch.cuda.device_count())
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
        return _rank(args)
    with tempfile.TemporaryDirectory(prefix="atom-bench-") as folder:
        path = Path(folder)
        torch.multiprocessing.spawn(_spawned, (args, path), args.ep)
        return torch.load(path / "records", weights_only=True)


def _spawned(rank: int, args: argparse.Namespace, folder: Path) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), args.ep), rank=rank, world_size=args.ep
    )
    torch.set_num_threads(args.threads)
    records = _rank(args)
    if records is not None:
        torch.save(records, folder / "records")


def _rank(args: argparse.Namespace) -> list[dict[str, Any]] | None:
    group = dist.group.WORLD
    rank = group.rank()
    device = torch.device("cpu")
    if torch.cuda.is_available() and envs.read("WORLD_SIZE") is not None:
        device = torch.device("cuda", torch.cuda.current_device())
    weights = random_weights(geometry(args, 1, rank), device, rank)
    prepared: dict[AOperand, ExpertWeights] = {}
    records = []
    with torch.inference_mode():
        link = _link(args, group, device)
        for tokens in args.tokens:
            shape = geometry(args, tokens, rank)
            inputs = random_tokens(shape, tokens, device, rank)
            exact = _exact(inputs, weights, shape, group)
            peer = None if args.no_peer else _peer(shape, weights, tokens, device, group)
            dispatches = _dispatch_peers(args, inputs, shape, group)
            first: dict[AOperand, torch.Tensor] = {}
            for operand, wire in pairs(args):
                record, out = _one(args, shape, inputs, weights, operand, wire, group, prepared)
                same = torch.tensor(int(torch.equal(out, first.setdefault(operand, out))))
                dist.all_reduce(same, dist.ReduceOp.MIN, group=group)
                record["identical"] = bool(same)
                record["error"] = 0.0 if exact is None else _error(out[:SAMPLE], exact)
                if peer is not None:
                    record["grouped_mm_ms"] = {"eager": peer}
                    record["of_grouped_mm"] = record["total_ms"] / peer
                if link is not None:
                    record |= link
                    rate = record["sent_bytes"] / shape.ep_size / record["dispatch_ms"] / 1e6
                    record["dispatch_share_of_link"] = rate / record["link_gb_per_s"]
                    record["dispatch_peers_ms"] = dispatches
                records.append(record)
                if rank == 0:
                    save(records, args.json)
    dist.destroy_process_group()
    return records if rank == 0 else None


def _link(
    args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device
) -> dict[str, float] | None:
    """What the link carries, where that is asked for."""
    if not args.dispatch_peers:
        return None
    symmetric = args.backend == "symmetric"
    return {"link_gb_per_s": link_limit.link_gb_per_s(group, device, symmetric=symmetric)}


def _dispatch_peers(
    args: argparse.Namespace,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    shape: MoEGeometry,
    group: dist.ProcessGroup,
) -> dict[str, float]:
    """Milliseconds of other dispatches of the same tokens, where they are asked for and can run."""
    x, topk_weights, ids = inputs
    if not args.dispatch_peers or link_limit.shares_gpus(group, x.device):
        return {}
    ids = ids.long()
    found = {}
    for peer in (
        all_to_all_rows(group, x, ids, shape.local_experts),
        all_to_all_ep(group, x, ids, topk_weights, shape.local_experts),
    ):
        found[peer.name] = link_limit.host_ms(peer.dispatch, args.repeats, group, x.device)
    return found


def _one(
    args: argparse.Namespace,
    shape: MoEGeometry,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    weights: ExpertWeights,
    operand: AOperand,
    wire: Wire,
    group: dist.ProcessGroup,
    prepared_for: dict[AOperand, ExpertWeights],
) -> tuple[dict[str, Any], torch.Tensor]:
    device = inputs[0].device
    choice = WireChoice(wire=wire, a_operand=operand, wire_found="", a_operand_found="")
    if args.backend == "symmetric":
        from atom.moe import symmetric as backend
    else:
        backend = distributed
    mega = backend.build(shape, RECIPE, choice, group=group, device=device)
    if operand not in prepared_for:
        prepared_for[operand] = mega.prepare(weights)
    prepared = prepared_for[operand]
    out = mega(*inputs, prepared)
    counters = mega.counters
    sent, combined = counters.dispatched, counters.combine
    record = {
        "backend": args.backend,
        "transport": mega.built.transport,
        "virtual": False,
        "ranks": shape.ep_size,
        "tokens": inputs[0].shape[0],
        "wire": str(wire),
        "a_operand": str(operand),
        "row_bytes": WireLayout.of(wire, shape.hidden).row_bytes,
        "sent_bytes": _sum(sent, group),
        "combine_bytes": _sum(combined, group),
    }
    if isinstance(mega, DistributedMegaMoE) or shape.ep_size == 1:
        record |= _timed_by_host(mega, inputs, prepared, operand, args.repeats, group)
    else:
        from atom.benchmarks.mega_moe_symmetric import layer_times

        record |= layer_times(mega, inputs, prepared, args.repeats, group)
        wait_for_rows = partial(_dispatched, mega, inputs)
        record["dispatch_host_ms"] = link_limit.host_ms(wait_for_rows, args.repeats, group, device)
    # A peer may still be writing here.
    dist.barrier(group=group)
    mega.close()
    return record, out


def _dispatched(mega: Any, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    mega.dispatch(*inputs)
    mega.wait()


def _timed_by_host(
    mega: MegaMoE,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    prepared: ExpertWeights,
    operand: AOperand,
    repeats: int,
    group: dist.ProcessGroup,
) -> dict[str, Any]:
    """Milliseconds of a layer whose dispatch waits on the host; it contains quantization."""
    device = inputs[0].device
    calls: dict[str, Callable[[], object]] = {"total": partial(mega, *inputs, prepared)}
    if device.type == "cpu":
        calls["quantize"] = partial(mx.quantize, inputs[0], operand.wire)
    calls |= _stages(mega, inputs, prepared)
    medians = {
        name: link_limit.host_ms(call, repeats, group, device) for name, call in calls.items()
    }
    # Quantization is a part of dispatch; what is told apart is how long it takes alone.
    return {
        "total_ms": medians.pop("total"),
        "stages": medians,
        "dispatch_ms": medians["dispatch"],
        "dispatch_host_ms": medians["dispatch"],
        "dispatch_and_quantize_ms": medians["dispatch"],
    }


def _stages(
    mega: MegaMoE,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    prepared: ExpertWeights,
) -> dict[str, Callable[[], object]]:
    """Each stage as a call that can be repeated."""
    if isinstance(mega, DistributedMegaMoE):
        dispatched, handle = mega.dispatch(*inputs)
        results = mega.compute(dispatched, prepared)
        return {
            "dispatch": partial(mega.dispatch, *inputs),
            "experts": partial(mega.compute, dispatched, prepared),
            "combine": partial(mega.combine, results, handle),
        }
    handle = mega.dispatch(*inputs)
    return {
        "dispatch": partial(mega.dispatch, *inputs),
        "experts": partial(mega.experts, handle, prepared),
        "combine": partial(mega.combine, handle),
    }


def _sum(value: int, group: dist.ProcessGroup) -> int:
    total = torch.tensor([value])
    dist.all_reduce(total, group=group)
    return int(total)


def _peer(
    shape: MoEGeometry,
    weights: ExpertWeights,
    tokens: int,
    device: torch.device,
    group: dist.ProcessGroup,
) -> float:
    """Milliseconds of a bf16 grouped_mm layer over this rank's experts, with as many assignments as a rank has."""
    w1 = mx_reference.dequantize(weights.w1, weights.w1_scale, Wire.FP4).bfloat16()
    w1 = reorder_rows(w1, RECIPE.gate_mode, GateMode.CONCAT)
    w2 = mx_reference.dequantize(weights.w2, weights.w2_scale, Wire.FP4).bfloat16()
    x, topk_weights, ids = random_tokens(shape, tokens, device, 0)
    ids = ids % shape.local_experts
    call = partial(eager_layer, x, topk_weights, ids, w1, w2)
    return link_limit.host_ms(call, 5, group, device)


def _exact(
    inputs: tuple[torch.Tensor, ...],
    weights: ExpertWeights,
    shape: MoEGeometry,
    group: dist.ProcessGroup,
) -> torch.Tensor | None:
    """Rank 0's first tokens in float32 with the same weights; None on other ranks."""
    if group.rank():
        return None
    device = inputs[0].device
    parts = [weights]
    parts += [random_weights(shape, device, rank) for rank in range(1, shape.ep_size)]
    sample = [part[:SAMPLE] for part in inputs]
    return exact_layer(*sample, join_ranks(parts), RECIPE).double()


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())
