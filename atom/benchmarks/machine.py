"""The machine in words, for the head of a report."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def describe_machine() -> str:
    """Cores, processor, memory, kernel and torch, in one line."""
    name = platform.processor() or platform.machine()
    cpuinfo, meminfo = Path("/proc/cpuinfo"), Path("/proc/meminfo")
    features = ""
    if cpuinfo.exists():
        text = cpuinfo.read_text()
        for line in text.splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
        features = " with AMX" if "amx_tile" in text else ""
    memory = ""
    if meminfo.exists():
        kib = int(meminfo.read_text().split("MemTotal:")[1].split()[0])
        memory = f", {kib / 2**20:.0f} GiB"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{cores} cores of {name}{features}{memory}, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )
