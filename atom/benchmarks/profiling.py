"""Where the ranks' time goes, sampled by py-spy from outside during a load."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

_RATE = 200
_TOP = 12


def rank_pids(server_pid: int) -> list[int]:
    """The processes of a server's ranks."""
    children = psutil.Process(server_pid).children(recursive=True)
    return [child.pid for child in children if "atom.engine.worker" in " ".join(child.cmdline())]


def profile_ranks(server_pid: int, load: Callable[[], object]) -> str:
    """Run ``load`` while every rank of a server is sampled.

    Returns:
        A table a rank: share of the samples of its main thread by the function on top of the stack, and by the stage
        of a step below it.

    Raises:
        RuntimeError: py-spy is not installed, or may not attach (it needs ptrace: root, or a permissive Yama).
    """
    beside = Path(sys.executable).parent / "py-spy"
    spy = str(beside) if beside.exists() else shutil.which("py-spy")
    if spy is None:
        raise RuntimeError("--profile needs py-spy: pip install 'atom[bench]'")
    with tempfile.TemporaryDirectory() as folder:
        files = {pid: Path(folder) / str(pid) for pid in rank_pids(server_pid)}
        spies = [
            subprocess.Popen(
                [
                    spy,
                    "record",
                    "--pid",
                    str(pid),
                    "--output",
                    str(file),
                    "--format",
                    "raw",
                    "--rate",
                    str(_RATE),
                    "--idle",
                    "--nonblocking",
                    "--duration",
                    "unlimited",
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for pid, file in files.items()
        ]
        try:
            load()
        finally:
            for process in spies:
                process.send_signal(signal.SIGINT)
        errors = [process.communicate(timeout=30)[1] for process in spies]
        missing = [e for e, file in zip(errors, files.values(), strict=True) if not file.exists()]
        if missing:
            raise RuntimeError(f"py-spy gave nothing: {missing[0].strip()}")
        tables = [
            f"rank {rank}\n{summarize_stacks(file.read_text())}"
            for rank, file in enumerate(files.values())
        ]
    return "\n\n".join(tables)


STAGES = {
    "experts (quantize, GEMMs)": ("experts.py", "mx.py"),
    "dispatch and combine": (
        "moe/distributed.py",
        "moe/exchange.py",
        "moe/few_rows.py",
        "moe/rows.py",
    ),
    "compiled decode step (attention, projections, router)": ("decode_step.py",),
    "attention": ("attention.py",),
    "norms": ("norms.py",),
    "sampling": ("sampling.py",),
    "other modules of the model": ("modeling_", "torch/nn/modules"),
    "scheduling and batching": ("continuous_batching", "batching.py", "step_runner.py"),
    "lockstep, messages, waiting": ("lockstep.py", "worker.py"),
}
"""The innermost frame whose file matches names the stage; the first match in this order wins within a frame."""


def summarize_stacks(raw: str) -> str:
    """A table of py-spy's raw format: stacks, outermost frame first, each with its count."""
    tops: Counter[str] = Counter()
    stages: Counter[str] = Counter()
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        # Threads that only wait (for the parent's end, say) are no part of a step.
        if not any("atom/engine/lockstep.py" in frame for frame in frames):
            continue
        tops[frames[-1]] += int(count)
        stages[_stage(frames)] += int(count)
    total = sum(tops.values()) or 1
    lines = [f"  {count / total:6.1%}  {name}" for name, count in stages.most_common()]
    lines.append("  functions on top of the stack:")
    lines += [f"  {count / total:6.1%}  {name}" for name, count in tops.most_common(_TOP)]
    return "\n".join(lines)


def _stage(frames: list[str]) -> str:
    for frame in reversed(frames):
        for stage, files in STAGES.items():
            if any(file in frame for file in files):
                return stage
    return "other"
