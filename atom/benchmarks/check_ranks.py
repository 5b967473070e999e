"""Whether ranks that are processes compute what they should, on every transport that runs here.

    torchrun --nproc-per-node 2 -m atom.benchmarks.check_ranks [--json FILE]

On GPUs: symmetric memory, and NCCL where each rank has a GPU of its own; on CPUs gloo, which leaves small batches to shared
memory. For each transport, A operand and case, rows carried by a bf16 wire and by the operand's own must give
the same output to the bit, twice in a row; and the first tokens of each rank must lie within bf16 rounding of the reference:
on GPUs the CPU backend over gloo between the same ranks, on CPUs the layer in plain torch. Layers of symmetric memory are
also captured in a CUDA graph, and replayed with other routings than the one it was captured with.

Exit status: 0, or 1 when a check failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from atom import envs
from atom.benchmarks.link_limit import shares_gpus
from atom.benchmarks.mega_moe_layers import random_tokens, random_weights
from atom.moe import distributed
from atom.moe.mega_moe import MegaMoE
from atom.moe.reference import join_ranks, quantized_layer
from atom.moe.spec import ExpertRecipe, ExpertWeights, GateMode, MoEGeometry
from atom.wire.format import AOperand, Wire, WireChoice

RECIPE = ExpertRecipe(gate_mode=GateMode.INTERLEAVE)
BF16 = 2.0**-7
"""Relative error that rounding to bf16 at another place explains."""

CPU = torch.device("cpu")
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Build = Callable[[MoEGeometry, WireChoice], MegaMoE]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Tokens of each rank and where they go.

    Attributes:
        name: of the record. large: whether each rank has as many tokens as ``--large`` says instead of ``--tokens``.
        routing: what makes expert ids of numbers below a rank's count of experts, distinct in a token: (numbers, experts
            of a rank, rank) to ids; None draws from all experts.
        empty: ranks without tokens.
    """

    name: str
    large: bool = False
    routing: Callable[[torch.Tensor, int, int], torch.Tensor] | None = None
    empty: tuple[int, ...] = ()


def _all_to_rank_1(ids: torch.Tensor, local: int, rank: int) -> torch.Tensor:
    return ids % local + local


def _at_home(ids: torch.Tensor, local: int, rank: int) -> torch.Tensor:
    return ids % local + rank * local


CASES = (
    Case(name="random"),
    Case(name="all to rank 1", routing=_all_to_rank_1),
    Case(name="all at home", routing=_at_home),
    Case(name="rank 0 empty", empty=(0,)),
    Case(name="rank 0 empty, all to rank 1", routing=_all_to_rank_1, empty=(0,)),
    Case(name="large", large=True),
    Case(name="large, all to rank 1", large=True, routing=_all_to_rank_1),
)


class Checks:
    """The layer, its tokens and its references on one rank."""

    def __init__(
        self, args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """
        Args:
            args: of the command line. group: all ranks. device: of this one.
        """
        self.group = group
        self.device = device
        self._args = args
        self._shape = MoEGeometry(
            hidden=args.hidden,
            inter=args.inter,
            experts=args.experts,
            topk=args.topk,
            ep_size=group.size(),
            ep_rank=group.rank(),
            max_tokens=args.tokens,
        )
        # Drawn on the CPU, so that GPUs and CPUs hold the same.
        self._cpu_weights = random_weights(self._shape, CPU, group.rank())
        self._cpu_prepared: dict[AOperand, ExpertWeights] = {}
        self._weights = _moved(self._cpu_weights, device)
        self.records: list[dict[str, Any]] = []

    def _inputs(self, case: Case, seed: int = 0) -> Inputs:
        """This rank's tokens of a case, on its device; ids of a token are distinct."""
        shape, rank = self._shape, self.group.rank()
        count = self._args.large if case.large else self._args.tokens
        count = 0 if rank in case.empty else count
        x, weights, ids = random_tokens(shape, count, CPU, 1000 * seed + rank)
        if case.routing is not None:
            random = torch.Generator().manual_seed(1000 * seed + 500 + rank)
            numbers = torch.rand(count, shape.local_experts, generator=random).topk(shape.topk)[1]
            ids = case.routing(numbers.int(), shape.local_experts, rank).contiguous()
        return x.to(self.device), weights.to(self.device), ids.to(self.device)

    def run(self, transport: str, build: Build) -> None:
        """Every case and operand on one transport, and graphs where it is symmetric memory."""
        for operand in AOperand:
            for large in (False, True):
                cases = [case for case in CASES if case.large == large]
                self._compare(transport, build, operand, cases)
            if transport == "symmetric":
                self._replay(build, operand)

    def _compare(
        self,
        transport: str,
        build: Build,
        operand: AOperand,
        cases: Sequence[Case],
    ) -> None:
        found: dict[str, list[torch.Tensor]] = {case.name: [] for case in cases}
        for wire in (Wire.BF16, operand.wire):
            with _built(build, self._geometry(cases[0].large), wire, operand, self.group) as mega:
                prepared = mega.prepare(self._weights)
                for case in cases:
                    inputs = self._inputs(case)
                    # The second call meets what the first has left in buffers.
                    found[case.name] += [mega(*inputs, prepared) for _ in range(2)]
        for case in cases:
            outs = found[case.name]
            identical = all(torch.equal(outs[0], other) for other in outs[1:])
            wanted = self._reference(case, operand)
            here = outs[0][: len(wanted)].cpu()
            error = _relative_error(here, wanted)
            finite = bool(outs[0].isfinite().all())
            self._record(transport, operand, case.name, identical=identical and finite, error=error)

    def _geometry(self, large: bool) -> MoEGeometry:
        args = self._args
        return replace(self._shape, max_tokens=args.large if large else args.tokens)

    def _reference(self, case: Case, operand: AOperand) -> torch.Tensor:
        """What the first tokens should become; see the module's text."""
        sample = tuple(part[: self._args.sample].cpu() for part in self._inputs(case))
        choice = _choice(operand.wire, operand)
        if self.device.type == "cpu":
            shape, ranks = self._shape, range(self.group.size())
            everyone = join_ranks([random_weights(shape, CPU, rank) for rank in ranks])
            return quantized_layer(*sample, everyone, shape, RECIPE, operand)
        backend = distributed.build(self._shape, RECIPE, choice, group=self.group, device=CPU)
        if operand not in self._cpu_prepared:
            self._cpu_prepared[operand] = backend.prepare(self._cpu_weights)
        out = backend(*sample, self._cpu_prepared[operand])
        dist.barrier(group=self.group)
        backend.close()
        return out

    def _replay(self, build: Build, operand: AOperand) -> None:
        """A captured layer with tokens and routings other than those it was captured with, against calls of their own."""
        static = self._inputs(CASES[0])
        with _built(build, self._shape, operand.wire, operand, self.group) as mega:
            prepared = mega.prepare(self._weights)
            mega(*static, prepared)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = mega(*static, prepared)
            same = True
            for seed, case in enumerate(CASES[:3], start=1):
                for held, new in zip(static, self._inputs(case, seed), strict=True):
                    held.copy_(new)
                graph.replay()
                replayed = out.clone()
                same &= torch.equal(replayed, mega(*static, prepared))
            torch.cuda.synchronize()
            dist.barrier(group=self.group)
            del graph, out
        self._record("symmetric", operand, "graph replayed with other routings", identical=same)

    def _record(
        self,
        transport: str,
        operand: AOperand,
        case: str,
        *,
        identical: bool,
        error: float | None = None,
    ) -> None:
        """Note what all ranks found: the worst of it."""
        worst = torch.tensor([float(not identical), error or 0.0], dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.group)
        same, largest = worst[0].item() == 0, worst[1].item()
        self.records.append(
            {
                "transport": transport,
                "a_operand": str(operand),
                "case": case,
                "identical": same,
                "error": None if error is None else largest,
                "passed": same and largest < BF16,
            }
        )


class _built:
    """A MegaMoE that is closed when all ranks are done with it."""

    def __init__(
        self,
        build: Build,
        shape: MoEGeometry,
        wire: Wire,
        operand: AOperand,
        group: dist.ProcessGroup,
    ) -> None:
        self._mega = build(shape, _choice(wire, operand))
        self._group = group

    def __enter__(self) -> MegaMoE:
        return self._mega

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            dist.barrier(group=self._group)
        self._mega.close()


def _choice(wire: Wire, operand: AOperand) -> WireChoice:
    return WireChoice(wire=wire, a_operand=operand, wire_found="", a_operand_found="")


def _moved(weights: ExpertWeights, device: torch.device) -> ExpertWeights:
    names = ("w1", "w1_scale", "w2", "w2_scale")
    return replace(weights, **{name: getattr(weights, name).to(device) for name in names})


def _relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    if not wanted.numel():
        return 0.0
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    # A NaN is no number that a maximum would keep.
    return float(error) if error.isfinite() else float("inf")


def transports(group: dist.ProcessGroup, device: torch.device) -> dict[str, Build]:
    """What carries rows between these ranks, by name. Collective."""

    def over_group(shape: MoEGeometry, choice: WireChoice) -> MegaMoE:
        return distributed.build(shape, RECIPE, choice, group=group, device=device)

    if device.type == "cpu":
        return {"gloo": over_group}
    from atom.moe import symmetric

    def over_arenas(shape: MoEGeometry, choice: WireChoice) -> MegaMoE:
        return symmetric.build(shape, RECIPE, choice, group=group, device=device)

    found: dict[str, Build] = {"symmetric": over_arenas}
    if not shares_gpus(group, device):
        found[distributed.transport_name(group, device)] = over_group
    return found


def table(records: Sequence[dict[str, Any]]) -> str:
    """Records as markdown, cases below each other, with the largest error over them."""
    lines = [
        "| transport | A | case | wires identical | error | passed |",
        "|---|---|---|---|---|---|",
    ]
    for r in records:
        error = "–" if r["error"] is None else f"{r['error']:.1e}"
        cells = [r["transport"], r["a_operand"], r["case"], "yes" if r["identical"] else "NO"]
        cells += [error, "yes" if r["passed"] else "NO"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Check and print on rank 0; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if envs.read("WORLD_SIZE") is None:
        parser.error("ranks are started from outside: use torchrun")
    on_gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    device = CPU
    if on_gpu:
        device = torch.device("cuda", (envs.read("LOCAL_RANK") or 0) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    group = dist.group.WORLD
    if group.size() < 2 or args.experts % group.size() or args.experts // group.size() < args.topk:
        parser.error(
            f"--experts {args.experts} must give each of two or more ranks --topk {args.topk} at least"
        )
    checks = Checks(args, group, device)
    with torch.inference_mode():
        found = transports(group, device)
        for name in args.transport or found:
            if name not in found:
                parser.error(f"--transport {name} does not run here: {', '.join(found)}")
            build = found[name]
            checks.run(name, build)
            if group.rank() == 0 and args.json is not None:
                args.json.write_text(json.dumps(checks.records, indent=2) + "\n", encoding="utf-8")
    if group.rank() == 0:
        print(table(checks.records))
    dist.destroy_process_group()
    return 0 if all(record["passed"] for record in checks.records) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m atom.benchmarks.check_ranks",
        description="Whether ranks that are processes compute what they should, on every transport.",
    )
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--transport", nargs="+", metavar="NAME", help="(default: all that run here)")
    add("--hidden", type=int, default=7168, help="(default: %(default)s)")
    add("--inter", type=int, default=512, help="(default: %(default)s)")
    add("--experts", type=int, default=64, help="of all ranks (default: %(default)s)")
    add("--topk", type=int, default=6, help="(default: %(default)s)")
    add("--tokens", type=int, default=200, help="of each rank in small cases (default: 200)")
    add("--large", type=int, default=16384, help="in large ones (default: %(default)s)")
    add("--sample", type=int, default=32, help="tokens compared with a reference (default: 32)")
    add("--json", type=Path, metavar="FILE", help="write the records")
    return parser


if __name__ == "__main__":
    sys.exit(main())
