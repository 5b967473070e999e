"""All that is to be known of ranks on several GPUs of one host, in one call of at most nine minutes.

    scripts/bench_multi_gpu.sh [--ranks N] [--stages correctness layer server] [--seconds 540] [--out DIR]

Stages, in processes of their own with a share of the time that is left:

- ``correctness``: :mod:`atom.benchmarks.check_ranks`, on symmetric memory and on NCCL.
- ``layer``: :mod:`atom.benchmarks.bench_mega_moe`, beside what the links carry, an all-to-all of bf16 rows and transformers'
  ``AllToAllEP``, in the same run.
- ``server``: :mod:`atom.benchmarks.ab_wire` on ``-tp N`` with random weights in the shape of Qwen3-30B-A3B.

Ranks are as many as GPUs that torch sees, one process each. With fewer GPUs than ``--ranks``, processes share a GPU in the
first stage, ranks are virtual in the second, and the third is left out; without a GPU, ranks are processes over gloo, and
sizes small. Figures of such runs are shown and held to no target.

A part of a stage that overruns is killed with all that it started; what it has written counts, and the later ones run. ``DIR``
holds ``results.json`` and ``report.md``, written anew after each part, and each part's log. Exit status: 0; 1 when a check of
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
from atom.benchmarks.multi_gpu_stages import FULL, SMALL, Part, Setup, parts
from atom.benchmarks.multi_gpu_targets import MISSED, judge, records_of
from atom.benchmarks.timed_stage import Ran, run_within

STAGES = ("correctness", "layer", "server")
SPARE_S = 15.0
"""Of all the time, for what is before, between and after the parts: imports, ends of what was killed, reports."""

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""NVLink multicast can put GPUs that others share out of service."""


def environment(part: Part) -> dict[str, str]:
    """A part's environment: this process's without what torchrun or a server reads, and without NVLink multicast."""
    taken = ("MEGA_", "ATOM_", "AITER_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(taken)}
    return {**kept, "PYTHONUNBUFFERED": "1", **NO_MULTICAST, **dict(part.env)}


def run_part(part: Part, limit: float, out: Path) -> dict[str, Any]:
    """Run one command; returns its entry in the results."""
    entry: dict[str, Any] = {"stage": part.stage}
    if part.why_not is not None:
        return entry | {"status": "left out", "why": part.why_not}
    log = out / f"{part.name}.log"
    command = part.command(limit)
    ran = run_within(limit, command, log=log, env=environment(part))
    return {
        **entry,
        "status": _status(ran),
        "seconds": round(ran.seconds, 1),
        "limit": round(ran.limit, 1),
        "exit_status": ran.exit_status,
        "command": " ".join(command),
        **({} if ran.exit_status == 0 else {"log_end": _end(log)}),
        **(part.result() or {}),
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
    entries = results["parts"].values()
    wrong = any(target.correctness and target.verdict == MISSED for target in targets)
    failed = any(entry["status"] == "failed" for entry in entries)
    checks = [entry for entry in entries if entry["stage"] == "correctness"]
    unchecked = any(entry["status"] not in ("done", "left out") for entry in checks)
    return int(wrong or failed or unchecked or ("correctness" in asked and not checks))


def clear(part: Part, out: Path) -> None:
    """Remove what an earlier run of this part has left, lest it be taken for this one's."""
    for path in (out / f"{part.name}.log", out / f"{part.name}.json"):
        path.unlink(missing_ok=True)
    if part.stage == "server":
        (out / "server" / "report.json").unlink(missing_ok=True)


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
        "parts": {},
    }
    chosen = [part for part in parts(setup) if part.stage in args.stages]
    for part in chosen:
        clear(part, setup.out)
    text = ""
    for index, part in enumerate(chosen):
        if part.instead_of is not None:
            before = results["parts"][part.instead_of]
            if before["status"] != "failed" or records_of(before):
                continue
        later = sum(other.share for other in chosen[index + 1 :] if other.instead_of is None)
        left = args.seconds - SPARE_S - (time.monotonic() - start)
        limit = left * part.share / (part.share + later)
        print(f"{part.name}: at most {limit:.0f} s", file=sys.stderr, flush=True)
        results["parts"][part.name] = run_part(part, limit, setup.out)
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
