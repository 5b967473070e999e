"""All that is to be known of ranks on several GPUs of one host, in one call of at most nine minutes.

    scripts/bench_multi_gpu.sh [--ranks N] [--stages correctness layer server] [--seconds 540] [--out DIR]

Stages, each a process of its own with a share of the time that is left:

- ``correctness``: :mod:`atom.benchmarks.check_ranks`, on symmetric memory and on NCCL.
- ``layer``: :mod:`atom.benchmarks.bench_mega_moe`, beside what the links carry, an all-to-all of bf16 rows and transformers'
  ``AllToAllEP``, in the same run.
- ``server``: :mod:`atom.benchmarks.ab_wire` on ``-tp N`` with random weights in the shape of Qwen3-30B-A3B.

Ranks are as many as GPUs that torch sees, one process each. With fewer GPUs than ``--ranks``, processes share a GPU in the
first stage, ranks are virtual in the second, and the third is left out; without a GPU, ranks are processes over gloo, and
sizes small. Figures of such runs are shown and held to no target.

A stage that overruns is killed with all that it started; what it has written counts, and the later stages run. ``DIR`` holds
``results.json`` and ``report.md``, written anew after each stage, and each stage's log. Exit status: 0; 1 when a check of
correctness failed or was not made although it was asked for, or a stage ended with an error; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from atom.benchmarks.machine import describe_machine
from atom.benchmarks.multi_gpu_report import report
from atom.benchmarks.multi_gpu_stages import FULL, SMALL, Setup, Stage, stages
from atom.benchmarks.multi_gpu_targets import MISSED, judge
from atom.benchmarks.timed_stage import Ran, run_within

STAGES = ("correctness", "layer", "server")
SPARE_S = 8.0
"""Of all the time, for what is between stages."""

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""NVLink multicast can put GPUs that others share out of service."""


def environment(stage: Stage) -> dict[str, str]:
    """A stage's environment: this process's without what torchrun or a server reads, and without NVLink multicast."""
    taken = ("MEGA_", "ATOM_", "AITER_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(taken)}
    return {**kept, "PYTHONUNBUFFERED": "1", **NO_MULTICAST, **dict(stage.env)}


def run_stage(stage: Stage, limit: float, out: Path) -> dict[str, Any]:
    """Run one stage; returns its entry in the results."""
    if stage.why_not is not None:
        return {"status": "left out", "why": stage.why_not}
    log = out / f"{stage.name}.log"
    command = stage.command(limit)
    ran = run_within(limit, command, log=log, env=environment(stage))
    found = stage.result() or {}
    return {
        "status": _status(ran),
        "seconds": round(ran.seconds, 1),
        "limit": round(ran.limit, 1),
        "exit_status": ran.exit_status,
        "command": " ".join(command),
        **({} if ran.exit_status == 0 else {"log_end": _end(log)}),
        **found,
    }


def _status(ran: Ran) -> str:
    if ran.killed:
        return "killed at its limit"
    return "done" if ran.exit_status == 0 else "failed"


def _end(log: Path, lines: int = 15) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]


def exit_status(results: dict[str, Any], asked: Sequence[str]) -> int:
    """Of the whole run; see the module's text."""
    targets = judge(results)
    wrong = any(target.correctness and target.verdict == MISSED for target in targets)
    failed = any(stage["status"] == "failed" for stage in results["stages"].values())
    unchecked = "correctness" in asked and results["stages"]["correctness"]["status"] != "done"
    return int(wrong or failed or unchecked)


def write(results: dict[str, Any], out: Path) -> str:
    """Write JSON and table; returns the table."""
    text = report(results, judge(results))
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    (out / "report.md").write_text(text, encoding="utf-8")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages; returns the exit status."""
    start = time.monotonic()
    parser = _parser()
    args = parser.parse_args(argv)
    gpus = 0 if args.device == "cpu" else torch.cuda.device_count()
    if args.device == "cuda" and not gpus:
        parser.error("--device cuda, but torch sees no GPU")
    ranks = max(2, gpus) if args.ranks is None else args.ranks
    if ranks < 2:
        parser.error(f"--ranks {ranks}: a group has two ranks or more")
    if args.seconds <= SPARE_S:
        parser.error(f"--seconds {args.seconds:g} must be more than {SPARE_S:g}")
    small = args.sizes == "small" or (args.sizes == "auto" and not gpus)
    args.out.mkdir(parents=True, exist_ok=True)
    for stale in (*args.out.glob("*.json"), *args.out.glob("*.log"), *args.out.glob("server/*")):
        stale.unlink()
    setup = Setup(
        ranks=ranks,
        gpus=gpus,
        sizes=SMALL if small else FULL,
        out=args.out.resolve(),
        gpu_bytes=torch.cuda.get_device_properties(0).total_memory if gpus else 0,
    )
    gpu = f"{gpus} x {torch.cuda.get_device_name(0)}; " if gpus else ""
    results: dict[str, Any] = {
        "machine": gpu + describe_machine(),
        "ranks": ranks,
        "gpus": gpus,
        "ranks_are": setup.ranks_are,
        "sizes": "small" if small else "full",
        "seconds": args.seconds,
        "stages": {},
    }
    chosen = [stage for stage in stages(setup) if stage.name in args.stages]
    text = ""
    for index, stage in enumerate(chosen):
        left = args.seconds - SPARE_S - (time.monotonic() - start)
        limit = left * stage.share / sum(later.share for later in chosen[index:])
        print(f"{stage.name}: at most {limit:.0f} s", file=sys.stderr, flush=True)
        results["stages"][stage.name] = run_stage(stage, limit, setup.out)
        results["seconds_taken"] = round(time.monotonic() - start, 1)
        text = write(results, setup.out)
    print(text)
    return exit_status(results, args.stages)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_multi_gpu.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=int, help="(default: the GPUs that torch sees, at least 2)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="(default: all)")
    add("--sizes", choices=("auto", "full", "small"), default="auto", help="auto: small on CPUs")
    add("--seconds", type=float, default=540.0, help="of the whole call (default: 540)")
    add("--out", type=Path, default=Path("bench_results/multi_gpu"), metavar="DIR")
    return parser


if __name__ == "__main__":
    sys.exit(main())
