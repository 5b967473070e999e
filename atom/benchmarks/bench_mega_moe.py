"""One MoE layer, stage by stage, on each wire: times, bytes, errors, and whether the wires agree to the bit.

    python -m atom.benchmarks.bench_mega_moe [--tokens 128 1024 16384] [--wires bf16 fp4] [--a-operand fp4] [--json FILE]
    torchrun --nproc-per-node 4 -m atom.benchmarks.bench_mega_moe --backend symmetric

On one GPU the expert group's ranks are virtual: they run one after another in one process, with the kernels and arenas of
the ``symmetric`` backend, and milliseconds are those of all ranks together. On CPUs, ranks are processes over gloo with the
``distributed`` backend, which this starts itself; then milliseconds are the slowest rank's. Under torchrun the ranks are
torchrun's, on GPUs where there are any.

Columns: ``quantize`` where it is a step of its own (a quantizing wire's sender does it while it writes rows, on a GPU);
``dispatch`` brings rows to where the experts read them; ``plan`` sorts assignments; ``unpack`` and ``expand`` turn weights
and operands into bf16 where the GEMM wants that; ``gemm1`` and ``gemm2`` are the projections (one step, ``experts``, on
CPUs); ``combine`` sums results and brings them back. Stages are timed by kernel on a GPU, where some run side by side.
``share`` is the rate at which dispatch and quantization move bytes, read and written, over the measured copy bandwidth. Records of ranks on GPUs of their own also
have, with --dispatch-peers, what the links carry, dispatch's share of it (ids and weights included, to other ranks alone), and
other dispatches of the same tokens. The file is written anew after each record.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from atom import envs
from atom.benchmarks.machine import describe_machine
from atom.benchmarks.mega_moe_layers import geometry, pairs
from atom.benchmarks.mega_moe_records import complete, save
from atom.wire.format import AOperand, Wire

STAGES = (
    "quantize",
    "dispatch",
    "plan",
    "expand",
    "unpack",
    "gemm1",
    "gemm2",
    "experts",
    "combine",
)


def table(records: Sequence[dict[str, Any]]) -> str:
    """Records as markdown."""
    stages = [s for s in STAGES if any(s in r["stages"] for r in records)]
    head = ["tokens/rank", "wire", "A", *stages, "total ms", "of bf16 wire", "dispatch of bf16"]
    head += ["share", "of grouped_mm", "sent MB", "combine MB", "error", "identical"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in records:
        cells = [r["tokens"], r["wire"], r["a_operand"]]
        cells += [_number(r["stages"].get(stage)) for stage in stages]
        cells += [_number(r["total_ms"]), _number(r.get("total_of_bf16"))]
        cells += [_number(r.get("dispatch_of_bf16")), _number(r.get("dispatch_share_of_copy"))]
        cells += [_number(r.get("of_grouped_mm")), _number(r["sent_bytes"] / 1e6)]
        cells += [_number(r["combine_bytes"] / 1e6), f"{r['error']:.6f}", str(r["identical"])]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=["auto", "symmetric", "distributed"], default="auto")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--inter", type=int, default=3072)
    parser.add_argument("--experts", type=int, default=384, help="of all ranks")
    parser.add_argument("--topk", type=int, default=6)
    parser.add_argument("--ep", type=int, default=4, help="ranks of the expert group")
    parser.add_argument("--wires", nargs="+", type=Wire, choices=list(Wire), default=list(Wire))
    parser.add_argument(
        "--a-operand", nargs="+", type=AOperand, choices=list(AOperand), default=list(AOperand)
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 1024, 16384], help="a rank")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of each rank on CPUs")
    parser.add_argument("--no-peer", action="store_true", help="leave bf16 grouped_mm out")
    parser.add_argument(
        "--dispatch-peers",
        action="store_true",
        help="of ranks that are processes: what the link carries, and other dispatches of the same tokens",
    )
    parser.add_argument("--json", type=Path, help="file for the records")
    args = parser.parse_args(argv)
    if not pairs(args):
        parser.error("no wire of --wires fits an A operand of --a-operand")
    if min(args.tokens) < 1 or args.repeats < 1:
        parser.error("--tokens and --repeats must be greater than zero")
    outside = envs.read("WORLD_SIZE")
    if outside is not None:
        args.ep = outside
    try:
        geometry(args, 1)
    except ValueError as error:
        parser.error(str(error))
    gpu = torch.cuda.is_available()
    if args.backend == "auto":
        args.backend = "symmetric" if gpu else "distributed"
    if args.backend == "symmetric" and not gpu:
        parser.error("--backend symmetric needs a GPU")
    if args.backend == "symmetric" and outside is None:
        from atom.benchmarks.mega_moe_virtual import measure
    else:
        from atom.benchmarks.mega_moe_ranks import measure

    records = measure(args)
    if records is None:  # Not rank 0.
        return 0
    complete(records)
    device = torch.cuda.get_device_name() + "; " if gpu else ""
    kind = "virtual ranks on one GPU" if records[0]["virtual"] else "ranks"
    print(f"{device}{describe_machine()}")
    print(
        f"{args.backend}, {args.ep} {kind}, hidden {args.hidden}, inter {args.inter}, {args.experts} experts, topk "
        f"{args.topk}, uniform routing; medians of {args.repeats}, milliseconds\n"
    )
    print(table(records))
    save(records, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
