"""What the links between ranks carry when nothing but bytes moves: the limit that a dispatch is measured against.

GPUs of one host copy into each other's symmetric memory, all at once, with nothing to compute; ranks on CPUs, or GPUs that
share no memory, run an all-to-all of equal parts.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from atom.benchmarks import gpu_timing

GPU_BYTES = 2**30
"""Bytes that each GPU sends in one measurement."""

CPU_BYTES = 2**24
"""The same of a rank on a CPU."""


def link_gb_per_s(
    group: dist.ProcessGroup, device: torch.device, *, symmetric: bool, size: int | None = None
) -> float:
    """Gigabytes a second that each rank sends to the others, on the slowest rank, while all send.

    Collective.

    Args:
        group: two or more ranks. device: of this rank. symmetric: copy through symmetric memory instead of a collective.
        size: bytes that a rank sends; by default :data:`GPU_BYTES` or :data:`CPU_BYTES`.
    """
    size = size or (GPU_BYTES if device.type == "cuda" else CPU_BYTES)
    others = group.size() - 1
    part = size // others
    measure = _copies_ms if symmetric else _all_to_all_ms
    return others * part / slowest(measure(group, device, part), group) / 1e6


def shares_gpus(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether several ranks of one host run on one GPU, which NCCL refuses. Collective."""
    if device.type != "cuda":
        return False
    mine = (socket.gethostname(), torch.cuda.get_device_properties(device).uuid)
    everyone: list[object] = [None] * group.size()
    dist.all_gather_object(everyone, (mine[0], str(mine[1])), group=group)
    return len(set(everyone)) < group.size()


def slowest(milliseconds: float, group: dist.ProcessGroup) -> float:
    """The longest of the ranks' times. Collective."""
    longest = torch.tensor([milliseconds], dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    return longest.item()


def host_ms(
    call: Callable[[], object], repeats: int, group: dist.ProcessGroup, device: torch.device
) -> float:
    """Median over repetitions of the slowest rank's milliseconds, launches included; the first two do not count.

    Collective; all ranks start together.
    """
    times = []
    for _ in range(repeats + 2):
        dist.barrier(group=group)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    longest = torch.tensor(times[2:], dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    return statistics.median(longest.tolist())


def _copies_ms(group: dist.ProcessGroup, device: torch.device, part: int) -> float:
    """Each rank writes a part into its place in every other rank's memory, first its next rank's, then the one's after."""
    from atom.moe import symmetric

    ranks, rank = group.size(), group.rank()
    memory, addresses, barrier = symmetric.rendezvous(ranks * part, group, device)
    source = torch.randint(0, 256, (part,), dtype=torch.uint8, device=device)
    targets = [
        _memory_at(addresses[(rank + step) % ranks] + rank * part, part, device)
        for step in range(1, ranks)
    ]

    def copy() -> None:
        for target in targets:
            target.copy_(source)
        barrier()

    milliseconds = gpu_timing.call_ms(copy)
    dist.barrier(group=group)
    sender = (rank - 1) % ranks
    assert memory[sender * part : (sender + 1) * part].any(), "nothing arrived"
    return milliseconds


def _memory_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Bytes that this GPU can address, whoever's they are, as a tensor that does not own them."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _all_to_all_ms(group: dist.ProcessGroup, device: torch.device, part: int) -> float:
    ranks, rank = group.size(), group.rank()
    sizes = [part] * ranks
    sizes[rank] = 0
    source = torch.randint(0, 256, (sum(sizes),), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def exchange() -> None:
        dist.all_to_all_single(target, source, sizes, sizes, group=group)

    return host_ms(exchange, 5, group, device)
