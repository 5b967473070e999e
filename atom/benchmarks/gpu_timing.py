"""Times on a GPU: medians of whole calls and of single kernels, and the copy bandwidth they are compared with."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable

import torch


def call_ms(call: Callable[[], object], *, warmups: int = 3, repeats: int = 15) -> float:
    """Median milliseconds of a call on the current stream, launches included."""
    for _ in range(warmups):
        call()
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for start, end in marks:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks)


def graph_ms(call: Callable[[], object], *, repeats: int = 15) -> float:
    """As :func:`call_ms`, of the call's replay from a CUDA graph: without the host's part."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return call_ms(graph.replay, repeats=repeats)


def kernel_ms(
    call: Callable[[], object], *, warmups: int = 2, repeats: int = 5
) -> dict[str, float]:
    """Milliseconds that each kernel of a call takes, by name: medians over calls of their sums."""
    for _ in range(warmups):
        call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    sums: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        with torch.profiler.profile(activities=activities) as profile:
            call()
            torch.cuda.synchronize()
        found: dict[str, float] = defaultdict(float)
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                found[event.name] += event.time_range.elapsed_us() / 1000
        for name, value in found.items():
            sums[name].append(value)
    return {name: statistics.median(values) for name, values in sums.items()}


def copy_gb_per_s(device: torch.device, size: int = 2**31) -> float:
    """Bandwidth of a device-to-device copy, bytes read and written, in GB/s."""
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / call_ms(lambda: target.copy_(source)) / 1e6
